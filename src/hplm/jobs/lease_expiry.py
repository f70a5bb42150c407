"""Leases that have expired, as one process sees them.

The clock alone does not say so: if the clock jumps, the lease of a living worker process looks expired too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

# Seconds that an expired lease must stay unchanged. A living worker process renews its lease in less time.
WATCH_S = 10.0


class LeaseExpiry:
    """Decides that a lease has expired if its end is past and has not changed for `watch_s` of a monotonic clock."""

    def __init__(self, watch_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._watch_s, self._monotonic = watch_s, monotonic
        self._first_seen_s: dict[tuple[str, float], float] = {}

    @property
    def is_watching(self) -> bool:
        """Whether a lease of the last call may count as expired soon."""
        now_s = self._monotonic()
        return any(now_s - first_seen_s < self._watch_s for first_seen_s in self._first_seen_s.values())

    def __call__(self, overdue: Mapping[str, float]) -> set[str]:
        """Return the jobs whose leases have expired. `overdue` maps jobs to lease ends that are past by the clock."""
        now_s = self._monotonic()
        self._first_seen_s = {lease: self._first_seen_s.get(lease, now_s) for lease in overdue.items()}
        return {job for (job, _), first_seen_s in self._first_seen_s.items() if now_s - first_seen_s >= self._watch_s}
