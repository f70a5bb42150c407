"""Leases that have run out, as one process sees them: by the clock alone a living worker's does when the clock jumps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

# Longer than a living worker takes to renew one.
WATCH_S = 10.0


class LeaseExpiry:
    """Takes a lease for lapsed when it has been over, and the same, for `watch_s` of a clock that never jumps."""

    def __init__(self, watch_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._watch_s, self._monotonic = watch_s, monotonic
        self._since: dict[tuple[str, float], float] = {}

    @property
    def is_watching(self) -> bool:
        """Whether one of those that were over last may be taken soon."""
        now_s = self._monotonic()
        return any(now_s - since_s < self._watch_s for since_s in self._since.values())

    def __call__(self, over: Mapping[str, float]) -> set[str]:
        """Of leases that are over by the clock now, each its end by job, those that have lapsed."""
        now_s = self._monotonic()
        self._since = {lease: self._since.get(lease, now_s) for lease in over.items()}
        return {job for (job, _), since_s in self._since.items() if now_s - since_s >= self._watch_s}
