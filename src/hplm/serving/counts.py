"""Counters of what a stage has done."""

from __future__ import annotations

import threading
from collections import Counter

from hplm.errors import HplmError


class Counts:
    """Counters since the start of the process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, event: str, times: int = 1) -> None:
        with self._lock:
            self._counts[event] += times

    def add_answer(self, answer: object) -> None:
        """Count an answer by its outcome: `ok`, or an error's code in lower case."""
        self.add(answer.code.lower() if isinstance(answer, HplmError) else "ok")

    def read(self) -> Counter[str]:
        with self._lock:
            return Counter(self._counts)
