"""Which stored vectors make each token's hidden state: branch, ..., root, then bigram, then unigram (HMI eq. 3).

Pure planning over numpy; `hplm.nn.lookup` carries the plan out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hplm.plot.windows import Ids, Mask, centre, shifted, windows


class Table(Protocol):
    """What the planner asks of a table: its name, how many tokens its n-grams have, and where they are."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    def find(self, grams: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]: ...


Compute = Callable[[Ids], Table]


@dataclass(frozen=True)
class Gather:
    """Vectors to take from one table: token t sums those at `flat[offsets[t]:offsets[t + 1]]` of its `[rows * size, H]`."""

    table: Table
    flat: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]


@dataclass(frozen=True)
class LookupPlan:
    """What to gather for N tokens, by how many vectors to divide, and how many windows each level answered."""

    gathers: tuple[Gather, ...]
    vector_counts: npt.NDArray[np.int64]
    windows_by_level: dict[str, int]


def resolve(
    grams: Ids, chain: Sequence[Table]
) -> tuple[list[tuple[Table, npt.NDArray[np.int64], npt.NDArray[np.int64]]], npt.NDArray[np.int64]]:
    """Ask the tables in order for windows `[W, n]`: `(table, window numbers, rows)` of each, and the windows nobody has."""
    missing = np.arange(len(grams))
    answers = []
    for table in chain:
        if not len(missing):
            break
        wanted = grams[missing]
        start = centre(grams.shape[1]) - centre(table.size)
        rows = table.find(wanted[:, start : start + table.size])
        hit = rows >= 0
        answers.append((table, missing[hit], rows[hit]))
        missing = missing[~hit]
    return answers, missing


def plan(
    ids: Ids, lengths: Sequence[int], chain: Sequence[Table], n: int, pad_id: int, compute: Compute | None = None
) -> LookupPlan:
    """The look-up of packed texts: `ids` `[N]`, `lengths` summing to N.

    Windows that no table of the chain has go to `compute`; without it the chain must end in the unigrams, which have
    every token. A window found at a shorter level is the same window with fewer tokens: it gives vectors only for those.
    """
    grams, exists = windows(ids, lengths, n, pad_id)
    answers, missing = resolve(grams, chain)
    if len(missing):
        assert compute is not None, "a chain without `compute` ends in a table of the whole vocabulary"
        computed = compute(grams[missing])
        answers.append((computed, missing, computed.find(grams[missing])))
    count = np.zeros(len(ids), dtype=np.int64)
    gathers = []
    levels: dict[str, int] = {}
    for table, found, rows in answers:
        levels[table.name] = levels.get(table.name, 0) + len(found)
        if len(found):
            row_of = np.full(len(ids), -1, dtype=np.int64)
            row_of[found] = rows
            flat, per_token = _by_token(row_of, exists, table.size)
            count += per_token
            gathers.append(Gather(table, flat, np.concatenate([[0], np.cumsum(per_token)])))
    return LookupPlan(tuple(gathers), count, levels)


def _by_token(
    row_of: npt.NDArray[np.int64], exists: Mask, size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Turn rows of windows `[N]` (-1: not in this table) into places of vectors, token after token, and how many each has.

    Window t's vector at place i belongs to token t + i - centre; shifting the columns puts them beside their token.
    """
    total, n = exists.shape
    start = centre(n) - centre(size)
    places = np.full((total, size), -1, dtype=np.int64)
    for place in range(size):
        window, token = shifted(place + start - centre(n), total)
        stored = exists[window, start + place] & (row_of[window] >= 0)
        places[token, place] = np.where(stored, row_of[window] * size + place, -1)
    valid = places >= 0
    return places[valid], valid.sum(axis=1)
