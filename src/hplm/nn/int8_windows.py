"""The lower layers with products in int8, for windows that no table has (see `hplm.nn.int8`).

They have no adapters, so what goes into a layer's products depends on n tokens of the vocabulary alone: the scales of all are
fixed. The gate behind the layers stays as it is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hplm.nn.encoder import Attend, TransformerLayer
from hplm.nn.int8 import Int8StaticLinear, Ranges, quantise_half, quantise_static
from hplm.nn.int8_products import gelu_codes, product, static_codes
from hplm.nn.onednn import PackedLinear


class Int8WindowLayer(nn.Module):
    """A layer that is trained no more, in fp32 but for its products. The slow twin is `hplm.nn.reference.int8_window_layer`.

    It computes where it is: it cannot be saved, copied or moved.
    """

    def __init__(self, layer: nn.Module, ranges: Ranges) -> None:
        super().__init__()
        assert isinstance(layer, TransformerLayer)
        half = quantise_half(layer, ranges)
        out, inner, outer = layer.attention_out, layer.ffn_in, layer.ffn_out
        self._qkv = _Product(quantise_static(layer.qkv.weight, layer.qkv.bias, ranges.attention))
        self._out = _Product(quantise_static(out.weight, out.bias, ranges.context))
        self._first = _Product(half.first)
        self._second = half.second.packed()
        self._inner_codes = half.second.input_scale, half.second.zero_point
        self._apart: tuple[PackedLinear, PackedLinear] | None = None
        if half.apart:
            self._apart = (
                PackedLinear(inner.weight[half.apart], inner.bias[half.apart], torch.float32),
                PackedLinear(outer.weight[:, half.apart], None, torch.float32),
            )
        self.attention_norm, self.ffn_norm = layer.attention_norm, layer.ffn_norm

    @property
    def products(self) -> list[list[Tensor]]:
        """What `RunWindows` takes: of the first three products factor, rounding and matrix, of the last its matrix."""
        return [*(one.tensors for one in (self._qkv, self._out, self._first)), self._second]

    @property
    def input_codes(self) -> list[tuple[float, int]]:
        """Scale and zero point of what goes into each of the four."""
        return [*(one.input_codes for one in (self._qkv, self._out, self._first)), self._inner_codes]

    @property
    def float_weights(self) -> list[Tensor]:
        """What is no integer: the two norms', and where channels are apart their two matrices and the first one's bias."""
        norms = (self.attention_norm, self.ffn_norm)
        found = [tensor.detach() for norm in norms for tensor in (norm.weight, norm.bias)]
        if self._apart is not None:
            first, second = self._apart
            assert first.bias is not None
            found += [first.weight, first.bias, second.weight]
        return found

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        """`[..., H]` -> `[..., H]`, as TransformerLayer does without adapters."""
        query, key, value = self._qkv(hidden).chunk(3, dim=-1)
        hidden = self.attention_norm(hidden + self._out(attend(query, key, value)))
        codes = self._first.gelu_codes(hidden, *self._inner_codes)
        found = product(codes, *self._inner_codes, self._second, torch.float32).add_(hidden)
        if self._apart is not None:
            first, second = self._apart
            found.add_(second(F.gelu(first(hidden))))
        return self.ffn_norm(found)

    def _save_to_state_dict(self, *_: object) -> None:
        # Without this, a state would lack the matrices and nobody would know.
        raise TypeError("a layer in integers cannot be saved: save the module before it is packed")


class _Product:
    """A product with fixed scales, its matrix in oneDNN's order."""

    def __init__(self, given: Int8StaticLinear) -> None:
        self._factor = given.factor
        self._scale, self._zero_point = given.linear.input_scale, given.linear.zero_point
        self._matrix = given.linear.packed()
        self._rounding = torch.tensor(given.linear.zero_point + 0.5)

    @property
    def tensors(self) -> list[Tensor]:
        return [self._factor, self._rounding, *self._matrix]

    @property
    def input_codes(self) -> tuple[float, int]:
        return self._scale, self._zero_point

    def __call__(self, tokens: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        codes = static_codes(tokens, self._factor, self._rounding)
        return product(codes, self._scale, self._zero_point, self._matrix, torch.float32)

    def gelu_codes(self, tokens: Tensor, scale: float, zero: int) -> Tensor:
        """`[..., in]` -> the GELU of `[..., out]` as codes with `scale` and `zero`."""
        codes = static_codes(tokens, self._factor, self._rounding)
        return gelu_codes(codes, self._scale, self._zero_point, self._matrix, scale, zero)
