"""The layers of a window encoder with products in int8 (see `hplm.engine.kernels.int8`).

Lower layers have no adapters. What goes into their products depends on n tokens of the vocabulary alone, so the scales of all
products are fixed. The gate behind the layers stays in floats.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from hplm.engine.kernels.int8 import PackedHalf, Ranges, pack_half, pack_static, quantise_static
from hplm.engine.kernels.int8_ranges import ranges_of, sample_ngrams
from hplm.models.base import Base
from hplm.models.layers import TransformerLayer
from hplm.models.lower import LowerEncoder


@dataclass(frozen=True)
class Int8WindowLayer:
    """A layer as `RunWindows` takes it; the slow twin is `hplm.engine.reference.int8_window_layer`.

    `qkv` and `out` hold the tensors of `pack_static` for queries, keys and values, and for attention's output. `scales` and
    `zeros` are those of the codes that go into these two. `norms` are weight and bias of both LayerNorms.
    """

    qkv: list[Tensor]
    out: list[Tensor]
    scales: tuple[float, float]
    zeros: tuple[int, int]
    half: PackedHalf
    norms: list[Tensor]


def quantise_window_layer(layer: nn.Module, ranges: Ranges) -> Int8WindowLayer:
    """Quantise a TransformerLayer in fp32 without adapters, and put its matrices in oneDNN's order."""
    assert isinstance(layer, TransformerLayer)
    qkv = quantise_static(layer.qkv.weight, layer.qkv.bias, ranges.attention)
    out = quantise_static(layer.attention_out.weight, layer.attention_out.bias, ranges.context)
    norms = (layer.attention_norm, layer.ffn_norm)
    return Int8WindowLayer(
        pack_static(qkv),
        pack_static(out),
        (qkv.linear.input_scale, out.linear.input_scale),
        (qkv.linear.zero_point, out.linear.zero_point),
        pack_half(layer, ranges),
        [tensor.detach() for norm in norms for tensor in (norm.weight, norm.bias)],
    )


def measure_window_ranges(base: Base, lower: LowerEncoder) -> list[Ranges]:
    """Measure the ranges of each layer of `lower`, a window encoder of the base or of a domain, on sample windows."""
    windows = sample_ngrams(base)
    layers = lower.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    return ranges_of(layers, lambda: lower(windows))
