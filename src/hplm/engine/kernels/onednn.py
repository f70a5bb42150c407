"""Products on a CPU through oneDNN with matrices in its own order, and batches of few sizes, which suit oneDNN.

With plain matrices, oneDNN or MKL reorders them in every call. In oneDNN's order a product is faster, most with few tokens.
With AVX-512, oneDNN also rounds a token the same for any number of tokens beside it, in bfloat16 and in float32. There are two
exceptions. In bfloat16 with AMX it splits sums over more than some 512 channels by the number of tokens. In float32 it may
round a single token otherwise, so no token is computed alone.
"""

# No `from __future__ import annotations`, because TorchScript compiles `rounded`.

import torch
from torch import Tensor


def rounded(size: int, step: int = 8) -> int:
    """Return `size` rounded up to one of few sizes: 32 multiples of `step`, and 16 more for each doubling beyond.

    oneDNN prepares a product at the first call of a size, which takes a millisecond and hundreds of KB. It remembers the last
    thousand. With batches of any size that would be much time and gigabytes.
    """
    while 32 * step < size:
        step *= 2
    return (size + step - 1) // step * step


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether matrices on the device can be put in oneDNN's order."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def pack_matrix(weight: Tensor) -> Tensor:
    """Put `weight` `[out, in]` in oneDNN's order, for `_linear_pointwise` alone."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return packed
