"""The lower layers with products in int8, for windows that no table has (see `hplm.engine.kernels.int8`).

They have no adapters, so what goes into a layer's products depends on n tokens of the vocabulary alone: the scales of all are
fixed. The gate behind the layers stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hplm.engine.kernels.int8 import Ranges, quantise_half, quantise_static
from hplm.engine.kernels.onednn import pack_matrix
from hplm.models.layers import TransformerLayer


@dataclass(frozen=True)
class Int8WindowLayer:
    """A layer as `run_windows.RunWindows` takes it; the slow twin is `hplm.engine.reference.int8_window_layer`.

    `products`: of the queries, keys and values, of what attention goes through and of the feed-forward half's first product
    factor, rounding (see `static_codes`) and matrix; of its second the matrix alone. `scales` and `zeros`: of the codes that go
    into each of the four. `weights`: what is no integer, the two norms', and where inner channels are apart their first
    matrix, its bias and their second matrix.
    """

    products: list[list[Tensor]]
    scales: list[float]
    zeros: list[int]
    weights: list[Tensor]


def quantise_window_layer(layer: nn.Module, ranges: Ranges) -> Int8WindowLayer:
    """A TransformerLayer in fp32 without adapters, its matrices in oneDNN's order."""
    assert isinstance(layer, TransformerLayer)
    half, out, inner = quantise_half(layer, ranges), layer.attention_out, layer.ffn_in
    qkv = quantise_static(layer.qkv.weight, layer.qkv.bias, ranges.attention)
    fixed = (qkv, quantise_static(out.weight, out.bias, ranges.context), half.first)
    products = [[one.factor, torch.tensor(one.linear.zero_point + 0.5), *one.linear.packed()] for one in fixed]
    linears = [*(one.linear for one in fixed), half.second]
    norms = (layer.attention_norm, layer.ffn_norm)
    weights = [tensor.detach() for norm in norms for tensor in (norm.weight, norm.bias)]
    if half.apart:
        weights += [pack_matrix(inner.weight[half.apart]), inner.bias.detach()[half.apart]]
        weights += [pack_matrix(layer.ffn_out.weight[:, half.apart])]
    return Int8WindowLayer(
        [*products, half.second.packed()],
        [one.input_scale for one in linears],
        [one.zero_point for one in linears],
        weights,
    )
