"""Products in int8 as oneDNN does them, for `hplm.engine.kernels.run_layers` and `hplm.engine.kernels.run_windows`."""

# No `from __future__ import annotations` here: TorchScript reads the types themselves, not their names.

import torch
from torch import Tensor


def static_codes(tokens: Tensor, factor: Tensor, rounding: Tensor) -> Tensor:
    """`[..., in]` -> codes, uint8, of an Int8StaticLinear with `factor`; `rounding` is its zero point and a half."""
    return cut_off(torch.addcmul(rounding, tokens.float(), factor).clamp_(0, 255))


def cut_off(values: Tensor) -> Tensor:
    """Of fp32 from 0 to below 256 what is before the point: uint8. What is out of range would wrap.

    By way of 16 bits: straight to bytes torch goes one by one, which takes four times as long (by hand).
    """
    return values.to(torch.int16).to(torch.uint8)


def product(codes: Tensor, input_scale: float, input_zero: int, matrix: list[Tensor], dtype: torch.dtype) -> Tensor:
    """`[..., in]` -> `[..., out]` in `dtype`. `matrix`: what `Int8Linear.packed` gives, or that without its bias."""
    bias: Tensor | None = matrix[3] if len(matrix) > 3 else None
    return torch.ops.onednn.qlinear_pointwise(
        codes, input_scale, input_zero, matrix[0], matrix[1], matrix[2], bias, 1.0, 0, dtype, "none", [], ""
    )


def gelu_codes(
    codes: Tensor, input_scale: float, input_zero: int, matrix: list[Tensor], scale: float, zero: int
) -> Tensor:
    """`[..., in]` -> the GELU of `[..., out]` as codes with `scale` and `zero`. `matrix`: what `Int8Linear.packed` gives."""
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
