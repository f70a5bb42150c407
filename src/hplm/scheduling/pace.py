"""When to wait for more requests: going together they cost less each, where enough come to be worth the wait."""

from __future__ import annotations

import math

# Over which the rate is taken: requests count the less the longer ago they came.
_OVER_S = 0.1
# A wait in which fewer come saves nothing, and whoever waits is later.
_LEAST_GATHERED = 2.0


class Rate:
    """Whether enough requests come, by those of late."""

    def __init__(self) -> None:
        self._per_s = 0.0
        self._last_s = -math.inf

    def add(self, requests: int, now_s: float) -> None:
        """So many came, or went, now."""
        self._per_s = self._per_s * math.exp((self._last_s - now_s) / _OVER_S) + requests / _OVER_S
        self._last_s = now_s

    def fills(self, wait_s: float) -> bool:
        """Whether two or more come in so much time, as of the last `add`."""
        return self._per_s * wait_s >= _LEAST_GATHERED


class Pace:
    """When the next batch of a stage may begin: after one of several requests `every_s` after it, while `every_s` fills."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._rate = Rate()
        self._next_from_s = -math.inf

    def left_s(self, now_s: float) -> float:
        """Seconds until the next batch may begin, 0 or less where it may now."""
        return self._next_from_s - now_s

    def began(self, requests: int, now_s: float) -> None:
        """A batch begins now."""
        self._rate.add(requests, now_s)
        # One alone says that requests come one by one: waiting for others would only delay them.
        if requests > 1 and self._rate.fills(self._every_s):
            self._next_from_s = now_s + self._every_s


class Hold:
    """How long a call of Triton's lasts for its answers to leave with it: `most_s`, while that fills, else not at all."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._rate = Rate()

    def seconds(self, requests: int, now_s: float) -> float:
        """Of a call that begins now with so many."""
        self._rate.add(requests, now_s)
        return self._most_s if self._rate.fills(self._most_s) else 0.0
