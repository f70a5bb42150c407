"""When to wait for more requests: a request costs less if it goes together with others, if enough come during the wait."""

from __future__ import annotations

import math

# Requests that must come during a wait. Fewer save nothing, and the requests that wait are answered later.
_LEAST_GATHERED = 2.0
# Seconds over which the rate of requests is averaged: the longer ago requests came, the less they count. At least this many
# waits, so that a few requests that come at once do not count as a high rate.
_OVER_S = 0.1
_OVER_WAITS = 10


class Rate:
    """The rate of requests in the recent past, and whether it makes a wait of `wait_s` worthwhile."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._over_s = max(_OVER_S, _OVER_WAITS * wait_s)
        self._per_s = 0.0
        self._last_s = -math.inf

    def add(self, requests: int, now_s: float) -> bool:
        """Count requests that come now. Returns whether two or more are expected during a wait."""
        self._per_s = self._per_s * math.exp((self._last_s - now_s) / self._over_s) + requests / self._over_s
        self._last_s = now_s
        return self._per_s * self._wait_s >= _LEAST_GATHERED


class BatchPacing:
    """When the next batch of a stage may begin: `every_s` after a batch of several requests, if that wait is worthwhile."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._rate = Rate(every_s)
        self._next_from_s = -math.inf

    def left_s(self, now_s: float) -> float:
        """Return the seconds until the next batch may begin, 0 or less if it may begin now."""
        return self._next_from_s - now_s

    def began(self, requests: int, now_s: float) -> None:
        """Note that a batch begins now."""
        enough = self._rate.add(requests, now_s)
        # After a batch of one request, requests come one by one, and a wait would only delay each.
        if requests > 1 and enough:
            self._next_from_s = now_s + self._every_s


class ReplyHold:
    """How long a Triton call stays open so that its answers leave together: up to `most_s`.

    A call of `full` requests is not held, because more requests wait already. Nor is a call held if few requests come.
    """

    def __init__(self, most_s: float, full: int) -> None:
        self._most_s = most_s
        self._full = full
        self._rate = Rate(most_s)

    def seconds(self, requests: int, now_s: float) -> float:
        """Return for how many seconds to hold a call of `requests` that begins now."""
        enough = self._rate.add(requests, now_s)
        return self._most_s if enough and requests < self._full else 0.0
