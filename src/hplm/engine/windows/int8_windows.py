"""The layers of a window encoder with products in int8 (see `hplm.engine.kernels.int8`).

Lower layers have no adapters. What goes into their products depends on n tokens of the vocabulary alone, so the scales of all
products are fixed. The gate behind the layers stays in floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from hplm.engine.kernels.int8 import Ranges, quantise_half, quantise_static
from hplm.engine.kernels.int8_ranges import ranges_of, sample_token_ids
from hplm.engine.kernels.onednn import pack_matrix
from hplm.models.base import Base
from hplm.models.layers import TransformerLayer
from hplm.plot.ngrams import text_ngrams

if TYPE_CHECKING:
    from hplm.engine.windows.encoder import WindowEncoder

# Windows whose ranges are measured. With MiniLM, 64 to 2,730 of them move vectors equally far (measured by hand). A domain's
# first request waits for the measurement.
WINDOWS = 256


@dataclass(frozen=True)
class Int8WindowLayer:
    """A layer as `RunWindows` takes it; the slow twin is `hplm.engine.reference.int8_window_layer`.

    `products` holds the tensors of four products: queries, keys and values; attention's output; both feed-forward products.
    Each of the first three has its factor, its rounding (see `static_codes`) and its matrix, the fourth its matrix alone.
    `scales` and `zeros` are those of the codes that go into each of the four. `weights` are the floats: both norms, and, if
    inner channels are computed apart, their first matrix, its bias and their second matrix.
    """

    products: list[list[Tensor]]
    scales: list[float]
    zeros: list[int]
    weights: list[Tensor]


def quantise_window_layer(layer: nn.Module, ranges: Ranges) -> Int8WindowLayer:
    """Quantise a TransformerLayer in fp32 without adapters, and put its matrices in oneDNN's order."""
    assert isinstance(layer, TransformerLayer)
    half, out, inner = quantise_half(layer, ranges), layer.attention_out, layer.ffn_in
    qkv = quantise_static(layer.qkv.weight, layer.qkv.bias, ranges.attention)
    fixed = (qkv, quantise_static(out.weight, out.bias, ranges.context), half.first)
    products = [
        [static.factor, torch.tensor(static.linear.zero_point + 0.5), *static.linear.packed()] for static in fixed
    ]
    linears = [*(static.linear for static in fixed), half.second]
    norms = (layer.attention_norm, layer.ffn_norm)
    weights = [tensor.detach() for norm in norms for tensor in (norm.weight, norm.bias)]
    if half.apart:
        weights += [pack_matrix(inner.weight[half.apart]), inner.bias.detach()[half.apart]]
        weights += [pack_matrix(layer.ffn_out.weight[:, half.apart])]
    return Int8WindowLayer(
        [*products, half.second.packed()],
        [linear.input_scale for linear in linears],
        [linear.zero_point for linear in linears],
        weights,
    )


def measure_window_ranges(base: Base, lower: WindowEncoder) -> list[Ranges]:
    """Measure the ranges of each layer of `lower`, the base's or a domain's, on WINDOWS windows of the sample texts."""
    ids = sample_token_ids(base)
    grams, _ = text_ngrams(np.concatenate(ids), [len(text) for text in ids], base.config)
    unique = np.unique(grams, axis=0)
    some = np.random.default_rng(0).permutation(len(unique))[:WINDOWS]
    return ranges_of(lower.layers, lambda: lower(torch.from_numpy(unique[some])))
