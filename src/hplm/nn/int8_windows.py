"""The lower layers with products in int8, for windows that no table has (see `hplm.nn.int8`).

They have no adapters, and what goes into each product lies behind a LayerNorm, is a mean of what does, or has gone through a
GELU: the scales of all products are fixed.

A few of a layer's inner channels are several times as large as all others: in one scale with them, they would leave the others
a few codes each. Those are computed apart, in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hplm.nn.encoder import Attend, TransformerLayer
from hplm.nn.int8 import Int8StaticLinear, Ranges, quantise, quantise_static
from hplm.nn.onednn import PackedLinear

# Of MiniLM's layers one or two are: with none apart vectors move by 1.2 % of their variance, with these by 0.1 % (by hand).
APART = 8


def channels_apart(ranges: Ranges) -> list[int]:
    """The largest of the inner channels."""
    found: list[int] = ranges.inner.topk(min(APART, len(ranges.inner))).indices.tolist()
    return found


class Int8WindowLayer(nn.Module):
    """A layer that is trained no more, in fp32 but for its products. The slow twin is `hplm.nn.reference.int8_window_layer`.

    It computes where it is: it cannot be saved, copied or moved.
    """

    def __init__(self, layer: nn.Module, ranges: Ranges) -> None:
        super().__init__()
        assert isinstance(layer, TransformerLayer)
        apart = channels_apart(ranges)
        half = quantise(layer, ranges, apart)
        out, inner, outer = layer.attention_out, layer.ffn_in, layer.ffn_out
        self._qkv = _Product(quantise_static(layer.qkv.weight, layer.qkv.bias, ranges.attention))
        self._out = _Product(quantise_static(out.weight, out.bias, ranges.context))
        self._first = _Product(Int8StaticLinear(half.factor, half.first))
        self._second = half.second.packed()
        self._inner = half.second.input_scale, half.second.zero_point
        self._apart_in = PackedLinear(inner.weight[apart], inner.bias[apart], torch.float32)
        self._apart_out = PackedLinear(outer.weight[:, apart], None, torch.float32)
        self.attention_norm, self.ffn_norm = layer.attention_norm, layer.ffn_norm

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        """`[..., H]` -> `[..., H]`, as TransformerLayer does without adapters."""
        query, key, value = self._qkv(hidden).chunk(3, dim=-1)
        hidden = self.attention_norm(hidden + self._out(attend(query, key, value)))
        codes = self._first(hidden, "gelu", *self._inner, torch.uint8)
        found = _multiply(codes, *self._inner, self._second).add_(hidden)
        return self.ffn_norm(found.add_(self._apart_out(F.gelu(self._apart_in(hidden)))))


class _Product:
    """A product with fixed scales, its matrix in oneDNN's order."""

    def __init__(self, given: Int8StaticLinear) -> None:
        self._factor = given.factor
        self._input_scale, self._zero_point = given.linear.input_scale, given.linear.zero_point
        self._matrix = given.linear.packed()
        # A conversion to bytes cuts off what is behind the point, and wraps what is out of range.
        self._rounding = torch.tensor(given.linear.zero_point + 0.5)

    def __call__(self, tokens: Tensor, *into: Any) -> Tensor:
        """`[..., in]` -> `[..., out]`, `into` as `_multiply` has it."""
        codes = torch.addcmul(self._rounding, tokens, self._factor).clamp_(0, 255).to(torch.uint8)
        return _multiply(codes, self._input_scale, self._zero_point, self._matrix, *into)


def _multiply(
    codes: Tensor,
    input_scale: float,
    input_zero: int,
    matrix: list[Tensor],
    then: str = "none",
    scale: float = 1.0,
    zero: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`matrix` as `Int8Linear.packed` has it; `then` is done to what comes out, whose `scale` and `zero` are those of codes."""
    found: Tensor = torch.ops.onednn.qlinear_pointwise(
        codes, input_scale, input_zero, *matrix, scale, zero, dtype, then, [], "none" if then == "gelu" else ""
    )
    return found
