"""Products on a CPU through oneDNN with matrices in its own order, and batches of few sizes, which it wants.

Handed plain matrices, it or MKL puts them in order again in every call. In its order a product is faster, most with few
tokens. With AVX-512 it also rounds a token the same whatever number of others goes with it, in bfloat16 and in float32, but for
bfloat16 with AMX, where it cuts sums over more than some 512 channels by the number of tokens; one token alone it may round
otherwise in float32, so nothing goes alone.
"""

# No `from __future__ import annotations` here: TorchScript compiles `rounded`.

import torch
from torch import Tensor


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
