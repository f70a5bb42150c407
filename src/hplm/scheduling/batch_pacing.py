"""When to wait for more requests: going together they cost less each, where enough come to be worth the wait."""

from __future__ import annotations

import math

# A wait in which fewer come saves nothing, and whoever waits is later.
_LEAST_GATHERED = 2.0
# Over which the rate is taken: requests count the less the longer ago they came. Not over less than so many waits, or a few
# that come at once would count for a rate of many.
_OVER_S = 0.1
_OVER_WAITS = 10


class Rate:
    """Whether enough requests come for a wait of `wait_s`, by those of late."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._over_s = max(_OVER_S, _OVER_WAITS * wait_s)
        self._per_s = 0.0
        self._last_s = -math.inf

    def add(self, requests: int, now_s: float) -> bool:
        """So many come, or go, now. Whether two or more come in the wait."""
        self._per_s = self._per_s * math.exp((self._last_s - now_s) / self._over_s) + requests / self._over_s
        self._last_s = now_s
        return self._per_s * self._wait_s >= _LEAST_GATHERED


class BatchPacing:
    """When the next batch of a stage may begin: after one of several requests `every_s` after it, where that pays."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._rate = Rate(every_s)
        self._next_from_s = -math.inf

    def left_s(self, now_s: float) -> float:
        """Seconds until the next batch may begin, 0 or less where it may now."""
        return self._next_from_s - now_s

    def began(self, requests: int, now_s: float) -> None:
        """A batch begins now."""
        enough = self._rate.add(requests, now_s)
        # One alone says that requests come one by one: waiting for others would only delay them.
        if requests > 1 and enough:
            self._next_from_s = now_s + self._every_s


class ReplyHold:
    """How long a call of Triton's lasts for its answers to leave with it: `most_s` where that pays, else not at all.

    A call of `full` requests does not: more wait already.
    """

    def __init__(self, most_s: float, full: int) -> None:
        self._most_s = most_s
        self._full = full
        self._rate = Rate(most_s)

    def seconds(self, requests: int, now_s: float) -> float:
        """Of a call that begins now with so many."""
        enough = self._rate.add(requests, now_s)
        return self._most_s if enough and requests < self._full else 0.0
