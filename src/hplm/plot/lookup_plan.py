"""Planning a look-up: the stored vectors of each token, from branch, ..., root, then bigram, then unigram (HMI eq. 3).

Pure planning over numpy; `hplm.engine.open_domain` carries the plan out. Of the lower encoder's form a plan knows how many
vectors an n-gram has, and no more (see `hplm.models.lower`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hplm.core.settings import BaseConfig
from hplm.plot.arena import Vectors
from hplm.plot.keys import Keys, pack
from hplm.plot.ngrams import Ids, Mask, centre, middle, shifted, text_ngrams

Rows = npt.NDArray[np.int64]


class Table(Protocol):
    """A table as the planner uses it: n-grams of `size` tokens, each with `vectors_per_ngram` vectors in `memory`."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def vectors_per_ngram(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def memory(self) -> Vectors: ...
    @property
    def first(self) -> int: ...
    def find(self, grams: Ids, which: Rows, keys: Keys) -> Rows: ...


# n-grams `[W, n]` -> a table that has them all, and the row of each.
Compute = Callable[[Ids], tuple[Table, Rows]]


@dataclass(frozen=True)
class LookupPlan:
    """The vectors to gather for N tokens, and how many n-grams each level answered.

    Token t is the mean of the vectors of `memory` `[V, H]` at `flat[offsets[t]:offsets[t + 1]]`.
    """

    memory: Vectors
    flat: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    windows_by_level: dict[str, int]


# For each table: the numbers of the n-grams that it answered, and their rows in it.
Answers = list[tuple[Table, npt.NDArray[np.int64], Rows]]


def resolve(grams: Ids, chain: Sequence[Table]) -> tuple[Answers, npt.NDArray[np.int64]]:
    """Search the tables in order for n-grams `[W, n]`. Return the answers, and the numbers of the n-grams that no table has."""
    missing = np.arange(len(grams))
    answers: Answers = []
    size = 0
    for table in chain:
        if not len(missing):
            break
        if table.size != size:
            size = table.size
            parts = grams[:, middle(size, grams.shape[1])]
            keys = pack(parts, table.vocab_size)[missing]
            # A search in the order of the keys stays in the same few cache lines: it takes a third of the time.
            order = np.argsort(keys)
            missing, keys = missing[order], keys[order]
        rows = table.find(parts, missing, keys)
        hit = rows >= 0
        answers.append((table, missing[hit], rows[hit]))
        misses = np.flatnonzero(~hit)
        missing, keys = missing[misses], keys[misses]
    return answers, missing


def plan(
    ids: Ids, lengths: Sequence[int], chain: Sequence[Table], config: BaseConfig, compute: Compute | None = None
) -> LookupPlan:
    """Plan the look-up of packed texts with at least one token: `ids` `[N]`, `lengths` summing to N.

    `compute` answers n-grams that no table of the chain has. Without it the chain must end in the unigrams, which hold
    every token. A shorter n-gram stands for the whole n-gram and gives vectors only for the tokens that it has.
    """
    grams, exists = text_ngrams(ids, lengths, config)
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
    for place in range(stored.shape[1]):
        offsets[1:] += stored[:, place]
    levels: dict[str, int] = {}
    for table, answered, _ in answers:
        levels[table.name] = levels.get(table.name, 0) + len(answered)
    return LookupPlan(memory, places[stored], np.cumsum(offsets), levels)


def _one_memory(memories: Sequence[Vectors], places: Rows, owners: npt.NDArray[np.int8]) -> tuple[Vectors, Rows]:
    """Return one memory `[V, H]` and the places `[N, v]` in it. If there are several memories, the needed vectors are copied.

    So a token is one sum, the same to the last bit whether an n-gram was just computed or is remembered beside the tables:
    two sums in float16 would round twice.
    """
    if len(memories) == 1:
        return memories[0], places
    needed = [memory[places[owners == number]] for number, memory in enumerate(memories)]
    moved = np.zeros_like(places)
    start = 0
    for number, vectors in enumerate(needed):
        moved[owners == number] = np.arange(start, start + len(vectors))
        start += len(vectors)
    return np.concatenate(needed), moved


def _by_token(
    answers: Answers, exists: Mask, memories: list[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]:
    """Return each token's vectors: their places in a memory and the number of the memory, both `[N, v]`.

    Vector i of n-gram t belongs to token t + i - centre. The owner is -1 where a token has no vector.
    """
    total, v = exists.shape
    first = np.empty(total, dtype=np.int64)
    owner = np.empty(total, dtype=np.int8)
    stored = exists
    for table, answered, rows in answers:
        count = table.vectors_per_ngram
        kept = middle(count, v)
        first[answered] = table.first + rows * count - kept.start
        owner[answered] = memories.index(id(table.memory))
        if count < v:
            stored = stored.copy() if stored is exists else stored
            stored[answered, : kept.start] = False
            stored[answered, kept.stop :] = False
    places = np.zeros((total, v), dtype=np.int64)
    owners = np.full((total, v), -1, dtype=np.int8)
    for place in range(v):
        gram, token = shifted(place - centre(v), total)
        places[token, place] = first[gram] + place
        owners[token, place] = np.where(stored[gram, place], owner[gram], -1)
    return places, owners
