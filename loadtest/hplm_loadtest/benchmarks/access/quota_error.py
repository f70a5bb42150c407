"""How far the requests that were admitted differ from a quota. Pure: all times are given, in seconds of one clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hplm.quotas.token_bucket import Rate, full, refilled, wait_s


class Admitted(NamedTuple):
    """A request that was admitted some time between `sent_s` and `done_s`, of `amount` units of a quota."""

    sent_s: float
    done_s: float
    amount: float


class Used(NamedTuple):
    """What clients that want more than a quota were admitted: units, and the most and the least seconds that it took."""

    units: float
    most_s: float
    least_s: float

    def error(self, per_s: float) -> float:
        """Return the units that were certainly admitted beyond `per_s` a second, below 0 if units were certainly missing."""
        return max(0.0, self.units - per_s * self.most_s) + min(0.0, self.units - per_s * self.least_s)


def used(requests: Sequence[tuple[Admitted, bool]]) -> Used:
    """Return what was used by `requests` of clients that never pause, each with whether it was admitted."""
    admitted = [request for request, is_admitted in requests if is_admitted]
    if not admitted:
        return Used(0.0, 0.0, 0.0)
    first_s, done_s = min(one.sent_s for one in admitted), max(one.done_s for one in admitted)
    # Nobody asks any more after the last request was sent.
    asked_s = min(done_s, max(request.sent_s for request, _ in requests))
    return Used(sum(one.amount for one in admitted), done_s - first_s, asked_s - first_s)


def burst(admitted: Sequence[Admitted], per_s: float) -> float:
    """Return the most units above `per_s` a second that were certainly admitted within any time, however short.

    A token bucket admits at most its capacity. A request counts in a time if it was sent and answered within it.
    """
    most = 0.0
    done_s: list[float] = []
    amounts: list[float] = []
    for one in sorted(admitted, key=lambda request: -request.sent_s):
        at = int(np.searchsorted(done_s, one.done_s))
        done_s.insert(at, one.done_s)
        amounts.insert(at, one.amount)
        above = np.cumsum(amounts) - per_s * (np.array(done_s) - one.sent_s)
        most = max(most, float(above.max()))
    return most


def wrongly_refused(requests: Sequence[tuple[Admitted, bool]], rate: Rate) -> int:
    """Return how many requests of a client were refused although its quota certainly had room.

    `requests` are of a client that sends its next request when the last is done, with whether each was admitted. Earlier
    requests count as admitted as late as possible, and a request as decided as early as possible, so that the quota of this
    count has no more room than the server's.
    """
    wrong = 0
    bucket = None
    for request, is_admitted in sorted(requests):
        now = full(rate, request.sent_s) if bucket is None else refilled(bucket, rate, request.sent_s)
        if is_admitted:
            now = full(rate, request.done_s) if bucket is None else refilled(bucket, rate, request.done_s)
            bucket = now._replace(level=now.level - request.amount)
        elif wait_s(now.level, rate, request.amount) == 0.0:
            wrong += 1
    return wrong
