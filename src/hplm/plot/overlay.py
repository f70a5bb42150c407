"""n-grams computed while serving: a bounded table in memory that forgets the least recently used."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hplm.core.settings import BaseConfig
from hplm.plot.keys import Keys, fits, pack
from hplm.plot.table import Rows, Spare, Values


class Overlay:
    """A table of at most `capacity` n-grams with values `[capacity, v, H]` in float16, in `room` if there is one.

    Use is counted by call. Among the n-grams that were last used in the same call, any may be forgotten first.
    """

    name = "overlay"

    def __init__(self, capacity: int, config: BaseConfig, room: Spare | None = None) -> None:
        n, v, hidden_size = config.window, config.vectors_per_ngram, config.hidden_size
        self.size = n
        self.vectors_per_ngram = v
        self.capacity = capacity
        room = room or Spare(np.zeros((capacity * v, hidden_size), dtype=np.float16), 0)
        self.memory, self.first = room.memory, room.first
        own = self.memory[self.first : self.first + capacity * v]
        self.values: Values = own.reshape(capacity, v, hidden_size)
        self.vocab_size = config.vocab_size
        self._grams = np.zeros((capacity, n), dtype=np.int64)
        self._used = np.zeros(capacity, dtype=np.int64)
        self._calls = 0
        # Sorted keys, and the row of each.
        self._keys: Keys = np.zeros(0, dtype=np.uint64)
        self._rows: Rows = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, grams: npt.NDArray[np.int64], which: Rows, keys: Keys) -> Rows:
        """Return rows as `PlotTable.find` does. A hit counts as a use."""
        if not len(self):
            return np.full(len(keys), -1, dtype=np.int64)
        places = np.searchsorted(self._keys, keys)
        places[places == len(self)] = 0
        rows = self._rows[places]
        hit = self._keys[places] == keys
        if not fits(self.size, self.vocab_size):
            hit &= (self._grams[rows] == grams[which]).all(axis=1)
        self._calls += 1
        self._used[rows[hit]] = self._calls
        return np.where(hit, rows, -1)

    def remember(self, grams: npt.NDArray[np.int64], values: Values) -> None:
        """Keep n-grams `[W, n]` with values `[W, v, H]`. If more come than fit, the last ones are kept."""
        keys, first = np.unique(pack(grams, self.vocab_size), return_index=True)
        fresh = np.sort(first[~np.isin(keys, self._keys)])[-self.capacity :]
        if not len(fresh):
            return
        rows = self._make_room(len(fresh))
        self.values[rows] = values[fresh]
        self._grams[rows] = grams[fresh]
        self._calls += 1
        self._used[rows] = self._calls
        keys = pack(grams[fresh], self.vocab_size)
        order = np.argsort(keys)
        places = np.searchsorted(self._keys, keys[order])
        self._keys = np.insert(self._keys, places, keys[order])
        self._rows = np.insert(self._rows, places, rows[order])

    def _make_room(self, count: int) -> Rows:
        """Return rows to fill: free rows first, then the least recently used ones, whose keys are dropped."""
        free = np.arange(len(self), min(self.capacity, len(self) + count))
        lacking = count - len(free)
        if not lacking:
            return free
        oldest = np.argpartition(self._used[: len(self)], lacking - 1)[:lacking]
        kept = ~np.isin(self._rows, oldest)
        self._keys, self._rows = self._keys[kept], self._rows[kept]
        return np.concatenate([free, oldest])
