"""Attention of a batch's rows: its number format, a call for each length of rows, or one call for all rows on a GPU."""

# No `from __future__ import annotations`, see `hplm.engine.kernels.scripted`.

import logging
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

# Numbers of a head in a row, from which attention in bfloat16 pays with AMX; see `float32_attention_below`.
AMX_ATTENTION = 1280
# Attention in one call takes head sizes that are multiples of this.
JOINED_HEAD_STEP = 8


def float32_attention_below(device: torch.device, head_size: int) -> int:
    """Return the length below which rows attend in float32; longer rows attend in the layers' own format.

    A CPU converts bfloat16 within its attention, which costs more than it saves with short rows. Without AMX, float32 was
    faster for all rows tried. With AMX both formats are equally fast at 20 tokens with heads of 64 numbers, and at 40 tokens
    with heads of 32. Rows of 256 tokens are 2.7 and 2.0 times as fast in bfloat16 (one Xeon core).
    """
    if device.type != "cpu":
        return 0
    return AMX_ATTENTION // head_size if torch.cpu._is_amx_tile_supported() else sys.maxsize


def attends_at_once(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Return whether rows of all lengths attend in one call a layer: on a GPU that has a kernel for it.

    A call for each length would be some 30 calls a layer.
    """
    if device.type != "cuda" or head_size % JOINED_HEAD_STEP:
        return False
    try:
        attend_at_once(torch.zeros(2, 3 * head_size, dtype=dtype, device=device), ends_of([2], [1], device), 1, 1)
    except RuntimeError as error:
        logging.getLogger(__name__).warning("rows attend length by length, which is slower here: %s", error)
        return False
    return True


def ends_of(counts: list[int], lengths: list[int], device: torch.device) -> Tensor:
    """Return 0 and the ends of rows, `counts[i]` of `lengths[i]` tokens one after another: int32 `[rows + 1]`."""
    ends = [0]
    for i in range(len(counts)):
        for _ in range(counts[i]):
            ends.append(ends[-1] + lengths[i])
    return torch.tensor(ends, dtype=torch.int32, device=device)


def attend_at_once(qkv: Tensor, ends: Tensor, longest: int, num_heads: int) -> Tensor:
    """Compute attention within each of rows one after another: `qkv` `[N, 3 * H]` -> `[N, H]`; `ends` is from `ends_of`."""
    parts = qkv.view(1, qkv.size(0), 3, num_heads, -1)
    # 80 us a call, flash attention took 90 us (64 rows of 22 tokens, H100, by hand). It supports float32 too.
    context = torch.ops.aten._efficient_attention_forward(
        parts[:, :, 0], parts[:, :, 1], parts[:, :, 2], None, ends, ends, longest, longest, 0.0, 0
    )[0]
    return context.reshape(qkv.size(0), -1)


def attend_by_length(
    qkv: Tensor,
    counts: list[int],
    lengths: list[int],
    num_heads: int,
    float32_below: int,
    mask: Tensor | None,
    relative: Tensor | None,
) -> Tensor:
    """Compute attention, one call for each length of rows: `qkv` `[N, 3 * H]` -> `[N, H]`.

    There are `counts[i]` rows of `lengths[i]` tokens one after another. Rows shorter than `float32_below` attend in fp32.
    `mask` and `relative` are those of RunLayers.
    """
    size = qkv.size(1) // 3
    context = torch.empty([qkv.size(0), size], dtype=qkv.dtype, device=qkv.device)
    start = 0
    for i in range(len(counts)):
        end = start + counts[i] * lengths[i]
        rows = qkv[start:end]
        if lengths[i] < float32_below:
            rows = rows.float()
        run = rows.view(counts[i], lengths[i], 3, num_heads, size // num_heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            run[0], run[1], run[2], attn_mask=_mask(mask, relative, lengths[i], rows.dtype)
        )
        context[start:end] = attended.transpose(1, 2).reshape(end - start, size)
        start = end
    # Fillers must be numbers too, although no text reads them.
    context[start:] = 0
    return context


def _mask(mask: Tensor | None, relative: Tensor | None, length: int, dtype: torch.dtype) -> Tensor | None:
    """Return the mask of rows of `length`: scores to add, in `dtype`, or which scores count."""
    if relative is None:
        return mask
    bias = relative[:, :length, :length].unsqueeze(0).to(dtype)
    return bias if mask is None else bias.masked_fill(mask.logical_not(), float("-inf"))
