"""Windows computed while serving: a bounded table in memory that forgets the least recently used."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from hplm.plot.table import Rows, Values


class Overlay:
    """A table of at most `capacity` windows of n tokens with values `[capacity, n, H]` in float16."""

    name = "overlay"

    def __init__(self, capacity: int, n: int, hidden_size: int) -> None:
        self.size = n
        self.capacity = capacity
        self.values: Values = np.zeros((capacity, n, hidden_size), dtype=np.float16)
        self._row_of: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._row_of)

    def find(self, grams: npt.NDArray[np.int64]) -> Rows:
        """Row of each window `[W, n]`, -1 where it is not remembered; a hit counts as a use."""
        rows = np.full(len(grams), -1, dtype=np.int64)
        for index, key in enumerate(_keys(grams)):
            if (row := self._row_of.get(key)) is not None:
                rows[index] = row
                self._row_of.move_to_end(key)
        return rows

    def remember(self, grams: npt.NDArray[np.int64], values: Values) -> None:
        """Keep windows `[W, n]` with values `[W, n, H]`; of more than fit, the last ones."""
        kept = slice(max(0, len(grams) - self.capacity), None)
        for key, value in zip(_keys(grams[kept]), values[kept], strict=True):
            row = self._row_of.pop(key, None)
            if row is None:
                row = len(self._row_of) if len(self) < self.capacity else self._row_of.popitem(last=False)[1]
            self.values[row] = value
            self._row_of[key] = row


def _keys(grams: npt.NDArray[np.int64]) -> list[bytes]:
    rows = np.ascontiguousarray(grams, dtype=np.uint32)
    return [row.tobytes() for row in rows]
