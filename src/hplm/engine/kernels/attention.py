"""How rows of a batch attend: in which format, and where a GPU takes them all in one call."""

# No `from __future__ import annotations`, see `hplm.engine.kernels.scripted`.

import logging
import sys

import torch
from torch import Tensor

# Numbers in a row of one head, see `float32_attention_below`.
AMX_ATTENTION = 1280
# Heads of other sizes would have to be filled up for attention in one call.
JOINED_HEAD_STEP = 8


def float32_attention_below(device: torch.device, head_size: int) -> int:
    """Rows that are shorter attend in float32, others in the layers' own format.

    A CPU converts bfloat16 within its attention, which with short rows costs more than it saves; without AMX float32 was
    faster with all that were tried. With it rows of 20 tokens are as fast in either with heads of 64 numbers, rows of 40 with
    heads of 32, and rows of 256 are 2.7 and 2.0 times as fast in bfloat16 (one Xeon core).
    """
    if device.type != "cpu":
        return 0
    return AMX_ATTENTION // head_size if torch.cpu._is_amx_tile_supported() else sys.maxsize


def attends_at_once(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether rows of all lengths attend in one call a layer: on a GPU that has a kernel for it, where a call for each length
    would be some 30 a layer.
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
    """Where rows end, `counts[i]` of `lengths[i]` tokens one after another, and 0 first: int32 `[rows + 1]`."""
    ends = [0]
    for i in range(len(counts)):
        for _ in range(counts[i]):
            ends.append(ends[-1] + lengths[i])
    return torch.tensor(ends, dtype=torch.int32, device=device)


def attend_at_once(qkv: Tensor, ends: Tensor, longest: int, num_heads: int) -> Tensor:
    """Attention of rows one after another, each to itself: `qkv` `[N, 3 * H]` -> `[N, H]`; `ends` by `ends_of`."""
    parts = qkv.view(1, qkv.size(0), 3, num_heads, -1)
    # 80 us a call where flash attention took 90 (64 rows of 22 tokens, H100, by hand), and there for float32 too.
    found = torch.ops.aten._efficient_attention_forward(
        parts[:, :, 0], parts[:, :, 1], parts[:, :, 2], None, ends, ends, longest, longest, 0.0, 0
    )[0]
    return found.reshape(qkv.size(0), -1)
