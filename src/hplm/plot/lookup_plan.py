"""Which stored vectors make each token's hidden state: branch, ..., root, then bigram, then unigram (HMI eq. 3).

Pure planning over numpy; `hplm.engine.open_domain` carries the plan out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hplm.plot.arena import Vectors
from hplm.plot.keys import Keys, pack
from hplm.plot.windows import Ids, Mask, centre, shifted, windows

Rows = npt.NDArray[np.int64]


class Table(Protocol):
    """What the planner asks of a table: its name, how many tokens its n-grams have, where they and their vectors are."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def memory(self) -> Vectors: ...
    @property
    def first(self) -> int: ...
    def find(self, grams: Ids, which: Rows, keys: Keys) -> Rows: ...


# Windows `[W, n]` -> a table that has them all, and the row of each.
Compute = Callable[[Ids], tuple[Table, Rows]]


@dataclass(frozen=True)
class LookupPlan:
    """What to gather for N tokens, and how many windows each level answered.

    Token t is the mean of the vectors of `memory` `[V, H]` at `flat[offsets[t]:offsets[t + 1]]`.
    """

    memory: Vectors
    flat: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    windows_by_level: dict[str, int]


Answers = list[tuple[Table, npt.NDArray[np.int64], Rows]]


def resolve(grams: Ids, chain: Sequence[Table]) -> tuple[Answers, npt.NDArray[np.int64]]:
    """Ask the tables in order for windows `[W, n]`: `(table, window numbers, rows)` of each, and the windows nobody has."""
    missing = np.arange(len(grams))
    answers: Answers = []
    size = 0
    for table in chain:
        if not len(missing):
            break
        if table.size != size:
            size = table.size
            start = centre(grams.shape[1]) - centre(size)
            parts = grams[:, start : start + size]
            keys = pack(parts, table.vocab_size)[missing]
            # In order, neighbours are found in the same few cache lines: a third of the time.
            order = np.argsort(keys)
            missing, keys = missing[order], keys[order]
        rows = table.find(parts, missing, keys)
        hit = rows >= 0
        answers.append((table, missing[hit], rows[hit]))
        left = np.flatnonzero(~hit)
        missing, keys = missing[left], keys[left]
    return answers, missing


def plan(
    ids: Ids, lengths: Sequence[int], chain: Sequence[Table], n: int, pad_id: int, compute: Compute | None = None
) -> LookupPlan:
    """The look-up of packed texts, at least one token: `ids` `[N]`, `lengths` summing to N.

    Windows that no table of the chain has go to `compute`; without it the chain must end in the unigrams, which have
    every token. A window found at a shorter level is the same window with fewer tokens: it gives vectors only for those.
    """
    grams, exists = windows(ids, lengths, n, pad_id)
    answers, missing = resolve(grams, chain)
    if len(missing):
        assert compute is not None, "a chain without `compute` ends in a table of the whole vocabulary"
        missing.sort()
        computed, rows = compute(grams[missing])
        answers.append((computed, missing, rows))
    memories = list({id(table.memory): table.memory for table, _, _ in answers}.values())
    places, owners = _by_token(answers, exists, [id(memory) for memory in memories])
    memory, places = _one_memory(memories, places, owners)
    stored = owners >= 0
    offsets = np.zeros(len(ids) + 1, dtype=np.int64)
    # Column by column: summing rows of three takes numpy five times as long.
    for place in range(n):
        offsets[1:] += stored[:, place]
    levels: dict[str, int] = {}
    for table, found, _ in answers:
        levels[table.name] = levels.get(table.name, 0) + len(found)
    return LookupPlan(memory, places[stored], np.cumsum(offsets), levels)


def _one_memory(memories: Sequence[Vectors], places: Rows, owners: npt.NDArray[np.int8]) -> tuple[Vectors, Rows]:
    """One memory `[V, H]` and the places `[N, n]` in it; of several, the vectors that are needed are copied.

    So a token is one sum, the same to the last bit whether a window was just computed or is remembered beside the tables:
    two sums in float16 would round twice.
    """
    if len(memories) == 1:
        return memories[0], places
    taken = [memory[places[owners == number]] for number, memory in enumerate(memories)]
    moved = np.zeros_like(places)
    start = 0
    for number, vectors in enumerate(taken):
        moved[owners == number] = np.arange(start, start + len(vectors))
        start += len(vectors)
    return np.concatenate(taken), moved


def _by_token(
    answers: Answers, exists: Mask, memories: list[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]:
    """Beside each token, the vectors it takes: their places in a memory and the number of the memory, both `[N, n]`.

    Window t's vector at place i belongs to token t + i - centre. Where there is none, the owner is -1.
    """
    total, n = exists.shape
    first = np.empty(total, dtype=np.int64)
    owner = np.empty(total, dtype=np.int8)
    stored = exists
    for table, found, rows in answers:
        start = centre(n) - centre(table.size)
        first[found] = table.first + rows * table.size - start
        owner[found] = memories.index(id(table.memory))
        if table.size < n:
            stored = stored.copy() if stored is exists else stored
            stored[found, :start] = False
            stored[found, start + table.size :] = False
    places = np.zeros((total, n), dtype=np.int64)
    owners = np.full((total, n), -1, dtype=np.int8)
    for place in range(n):
        window, token = shifted(place - centre(n), total)
        places[token, place] = first[window] + place
        owners[token, place] = np.where(stored[window, place], owner[window], -1)
    return places, owners
