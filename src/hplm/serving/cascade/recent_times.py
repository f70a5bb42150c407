"""How long each level has taken recently."""

from __future__ import annotations

import threading

from hplm.cascade.level_times import LevelTime


class RecentTimes:
    """The recent times of levels by base. Safe to use from several threads."""

    def __init__(self) -> None:
        self._times: dict[str, LevelTime] = {}
        self._lock = threading.Lock()

    def add(self, base: str, seconds: float, now_s: float) -> None:
        """Do as `LevelTime.add`."""
        with self._lock:
            self._times.setdefault(base, LevelTime()).add(seconds, now_s)

    def expected_s(self, base: str, now_s: float, default_s: float) -> float:
        """Do as `LevelTime.expected_s`."""
        with self._lock:
            return self._times.setdefault(base, LevelTime()).expected_s(now_s, default_s)
