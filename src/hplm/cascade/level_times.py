"""How long a level has taken recently, which decides whether a text can still go there."""

from __future__ import annotations

import math
from collections import deque

# The share of recent texts whose time is at most the expected time.
QUANTILE = 0.9
# Seconds after which a time no longer counts, so that a level that was slow is tried again.
KEEP_S = 10.0
# The most times that count.
MOST_TIMES = 256
# With fewer recent times, one slow text would keep all others away.
LEAST_TIMES = 16
# Seconds between two computations of the quantile.
EVERY_S = 0.05


class LevelTime:
    """The high quantile of a level's recent times, from the text's arrival in the level's queue to its answer.

    Not safe to use from several threads. Times are of one clock.
    """

    def __init__(self) -> None:
        self._times: deque[tuple[float, float]] = deque(maxlen=MOST_TIMES)
        self._quantile_s: float | None = None
        self._next_s = -math.inf

    def add(self, seconds: float, now_s: float) -> None:
        """Note the seconds that a text has taken, which is answered or given up now."""
        self._times.append((now_s, seconds))

    def expected_s(self, now_s: float, default_s: float) -> float:
        """Return the seconds that a text may take; `default_s` if there are too few recent times."""
        if now_s >= self._next_s:
            self._next_s = now_s + EVERY_S
            while self._times and self._times[0][0] < now_s - KEEP_S:
                self._times.popleft()
            self._quantile_s = None
            if len(self._times) >= LEAST_TIMES:
                ordered = sorted(seconds for _, seconds in self._times)
                self._quantile_s = ordered[math.ceil(QUANTILE * len(ordered)) - 1]
        return default_s if self._quantile_s is None else self._quantile_s
