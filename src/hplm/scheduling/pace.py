"""When the next batch of a stage may begin: fewer and fuller ones cost less a request, where enough come to fill them."""

from __future__ import annotations

import math

# Over which the rate is taken: requests count the less the longer ago they went.
_OVER_S = 0.1
# A pause in which fewer come saves nothing, and whoever waits for them is later.
_LEAST_GATHERED = 2.0


class Pace:
    """After a batch of several requests the next begins `every_s` after it at the earliest, while two or more come in such a
    time: what comes in between goes together.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        # Requests a second of late, as of the last batch.
        self._rate = 0.0
        self._began_s = -math.inf
        self._next_from_s = -math.inf

    def left_s(self, now_s: float) -> float:
        """Seconds until the next batch may begin, 0 or less where it may now."""
        return self._next_from_s - now_s

    def began(self, requests: int, now_s: float) -> None:
        """A batch begins now."""
        self._rate = self._rate * math.exp((self._began_s - now_s) / _OVER_S) + requests / _OVER_S
        self._began_s = now_s
        # One alone says that requests come one by one: waiting for others would only delay them.
        if requests > 1 and self._rate * self._every_s >= _LEAST_GATHERED:
            self._next_from_s = now_s + self._every_s
