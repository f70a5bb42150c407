"""Products on a CPU through oneDNN with matrices in its own order, and batches of few sizes, which it wants.

Handed plain matrices, it or MKL puts them in order again in every call. In its order a product is faster, most with few
tokens. With AVX-512 it also rounds a token the same whatever number of others goes with it, in bfloat16 and in float32, but for
bfloat16 with AMX, where it cuts sums over more than some 512 channels by the number of tokens; one token alone it may round
otherwise in float32, so nothing goes alone.
"""

# No `from __future__ import annotations` here: TorchScript compiles `rounded`.

import torch
from torch import Tensor, nn


def rounded(size: int, step: int = 8) -> int:
    """A size at least as large, and as `step`, one of few: 32 multiples of `step`, and 16 more for each doubling beyond.

    oneDNN makes a product ready for its sizes when it first meets them, which takes a millisecond and hundreds of KB, and
    remembers the last thousand: with batches of any number of tokens that is much time and gigabytes.
    """
    while 32 * step < size:
        step *= 2
    return (size + step - 1) // step * step


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrices there can be put in oneDNN's order."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def pack_matrix(weight: Tensor) -> Tensor:
    """`weight` `[out, in]` in oneDNN's order, for `_linear_pointwise` alone."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return packed


class PackedLinear(nn.Module):
    """A product that is trained no more, its matrix in oneDNN's order and in `dtype`, which is also what it gives; with `gelu`
    the GELU of it.

    It computes where it is: it cannot be saved, copied or moved.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, gelu: bool = False) -> None:
        super().__init__()
        self._then: tuple[str, list[float], str] = ("gelu", [], "none") if gelu else ("none", [], "")
        self.dtype = dtype
        self.weight = pack_matrix(weight.to(dtype))
        self.bias = None if bias is None else bias.detach().to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        found: Tensor = torch.ops.mkldnn._linear_pointwise(tokens.to(self.dtype), self.weight, self.bias, *self._then)
        return found

    def _save_to_state_dict(self, *_: object) -> None:
        # Without this, a state would lack the matrix and nobody would know.
        raise TypeError("a matrix in oneDNN's order cannot be saved: save the module before it is packed")


def pack_linears(module: nn.Module, dtype: torch.dtype) -> None:
    """Every Linear below `module` becomes a PackedLinear, where its device can; those that are one already stay."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and can_pack(child.weight.device, dtype):
                setattr(parent, name, PackedLinear(child.weight, child.bias, dtype))
