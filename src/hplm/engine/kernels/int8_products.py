"""Products in int8 by oneDNN, for `hplm.engine.kernels.run_layers` and `hplm.engine.windows.run_windows`."""

# No `from __future__ import annotations`, see `hplm.engine.kernels.scripted`.

import torch
import torch.nn.functional as F
from torch import Tensor


def static_codes(tokens: Tensor, factor: Tensor, rounding: Tensor) -> Tensor:
    """Return codes, uint8, of inputs `[..., in]` of an Int8StaticLinear; `rounding` is its zero point and a half."""
    return cut_off(torch.addcmul(rounding, tokens.float(), factor).clamp_(0, 255))


def cut_off(values: Tensor) -> Tensor:
    """Cut fp32 values from 0 to below 256 to whole numbers: uint8. A value out of range would wrap.

    The conversion goes through int16: torch converts straight to bytes one by one, four times as slowly (measured by hand).
    """
    return values.to(torch.int16).to(torch.uint8)


def product(codes: Tensor, input_scale: float, input_zero: int, matrix: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Compute a product of codes: `[..., in]` -> `[..., out]` in `dtype`. `matrix` is packed, with or without a bias."""
    bias: Tensor | None = matrix[3] if len(matrix) > 3 else None
    return torch.ops.onednn.qlinear_pointwise(
        codes, input_scale, input_zero, matrix[0], matrix[1], matrix[2], bias, 1.0, 0, dtype, "none", [], ""
    )


def gelu_codes(
    codes: Tensor, input_scale: float, input_zero: int, matrix: list[Tensor], scale: float, zero: int
) -> Tensor:
    """Compute the GELU of a product of codes `[..., in]`, as codes with `scale` and `zero`. `matrix`: `Int8Linear.packed`."""
    return torch.ops.onednn.qlinear_pointwise(
        codes,
        input_scale,
        input_zero,
        matrix[0],
        matrix[1],
        matrix[2],
        matrix[3],
        scale,
        zero,
        torch.uint8,
        "gelu",
        [],
        "none",
    )


def feed_forward(
    hidden: Tensor,
    first: list[Tensor],
    second: list[Tensor],
    scales: tuple[float, float],
    zeros: tuple[int, int],
    apart: list[Tensor],
) -> Tensor:
    """Compute `hidden` plus its feed-forward half before LayerNorm, fp32 `[..., H]`, as `PackedHalf` holds it.

    The slow twin is `hplm.engine.reference.int8_feed_forward`.
    """
    codes = static_codes(hidden, first[0], first[1])
    inner = gelu_codes(codes, scales[0], zeros[0], first[2:], scales[1], zeros[1])
    outer = product(inner, scales[1], zeros[1], second, torch.float32).add_(hidden)
    if len(apart) > 0:
        channels = torch.ops.mkldnn._linear_pointwise(hidden, apart[0], apart[1], "none", [], "")
        outer.add_(torch.ops.mkldnn._linear_pointwise(F.gelu(channels), apart[2], None, "none", [], ""))
    return outer
