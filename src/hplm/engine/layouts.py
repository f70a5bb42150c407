"""Batching modes: how the texts of a batch lie in one tensor (TCB section 4).

`packed` puts texts one after another, without padding. The other modes are for comparison. `naive` pads every text to the
longest. `turbo` sorts texts by length and splits the batch if that saves padding (TurboTransformers). `concat` joins texts in
rows of a fixed length behind a mask (TCB 4.1). `slotted` cuts those rows into row slots that attend separately (TCB 4.2).

An encoder finishes all texts of a layout with its last layer. So memory of a finished row slot is freed early (TCB 4.2.2) only
between layouts: `turbo` runs several, and frees each before the next starts. The other modes run one layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hplm.core.settings import Batching
from hplm.models.layers import equal_runs

# Cost of a split of `turbo`, in tokens: starting a layout takes time.
SPLIT_TOKENS = 64


@dataclass(frozen=True)
class Attention:
    """Rows of tokens that attend to each other: `counts[i]` rows of `lengths[i]` tokens, all of a row or as `mask` says.

    `mask` needs a single run of rows: bool, broadcast to `[rows, heads, length, length]`.
    """

    counts: list[int]
    lengths: list[int]
    mask: Tensor | None = None


@dataclass(frozen=True)
class Layout:
    """One tensor of `size` tokens: text `texts[i]` of the batch starts at `starts[i]` and has `lengths[i]` tokens. The rest is
    padding.
    """

    size: int
    texts: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    attention: Attention

    @property
    def is_packed(self) -> bool:
        """Whether the texts stand one after another in their order, without padding."""
        return self.starts == _in_order(self.lengths)[1] and self.size == sum(self.lengths)


def packed(lengths: Sequence[int]) -> list[Layout]:
    """Lay texts out without padding."""
    counts, sizes = (list(column) for column in zip(*equal_runs(lengths), strict=True))
    return [Layout(sum(lengths), *_in_order(lengths), Attention(counts, sizes))]


def turbo(lengths: Sequence[int]) -> list[Layout]:
    """Sort texts by length, and split them by dynamic programming into layouts of less padding."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    # best[k]: least cost of the k shortest texts, and the start of their last layout.
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        best.append(min((best[s][0] + (end - s) * longest + SPLIT_TOKENS, s) for s in range(end)))
    layouts: list[Layout] = []
    end = len(order)
    while end:
        start = best[end][1]
        part = order[start:end]
        layouts.append(_rows(part, lengths, lengths[part[-1]]))
        end = start
    return layouts[::-1]


def lay_out(
    batching: Batching, lengths: Sequence[int], row_tokens: int, slot_tokens: int | None = None, pad_to: int = 0
) -> list[Layout]:
    """Return the layouts of a batch.

    `row_tokens` is L of `concat`. `slot_tokens` is the row slot that a policy chose for `slotted`. `pad_to` is the least row
    of `naive`.
    """
    longest = max(lengths)
    if batching == "packed":
        return packed(lengths)
    if batching == "naive":
        # Each text has a row.
        return [_rows(range(len(lengths)), lengths, max(longest, pad_to))]
    if batching == "turbo":
        return turbo(lengths)
    # A mask separates the texts of a row (TCB eq. 5). In `slotted` a row is as wide as a row slot (eq. 8).
    return [_joined(lengths, max(longest, row_tokens if batching == "concat" else slot_tokens or 0))]


def _in_order(lengths: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    starts = [0]
    for length in lengths[:-1]:
        starts.append(starts[-1] + length)
    return tuple(range(len(lengths))), tuple(starts), tuple(lengths)


def _rows(texts: Sequence[int], lengths: Sequence[int], width: int) -> Layout:
    own = tuple(lengths[i] for i in texts)

    starts = tuple(row * width for row in range(len(own)))
    seen = torch.arange(width) < torch.tensor(own)[:, None]
    attention = Attention([len(own)], [width], seen[:, None, None, :])
    return Layout(len(own) * width, tuple(texts), starts, own, attention)


def _joined(lengths: Sequence[int], width: int) -> Layout:
    """Join texts in rows by first fit, longest first."""
    free: list[int] = []
    starts = [0] * len(lengths)
    for text in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((r for r, space in enumerate(free) if space >= lengths[text]), len(free))
        if row == len(free):
            free.append(width)
        starts[text] = row * width + width - free[row]
        free[row] -= lengths[text]
    rows = len(free)

    owner = torch.full((rows * width,), -1)
    for text, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        owner[start : start + length] = text
    owner = owner.view(rows, width)
    # Padding attends to padding, because attention over no token would give NaN.
    attention = Attention([rows], [width], (owner[:, :, None] == owner[:, None, :])[:, None])
    return Layout(rows * width, tuple(range(len(lengths))), tuple(starts), tuple(lengths), attention)
