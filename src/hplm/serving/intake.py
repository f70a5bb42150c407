"""How long requests have waited in Triton before it handed them over, which it does not say."""

from __future__ import annotations


class Intake:
    """Of a stage that takes every request at once: where Triton's calls are full one after another, more waits there.

    `most` is what a call holds, `queue_size` what may wait there, 0 for any number: then nothing is told. Rather too long than
    too short: who waited longer is refused sooner, which is quick, so that soon less waits.
    """

    def __init__(self, most: int, queue_size: int) -> None:
        self._most = most
        self._queue_size = queue_size
        self._full_since_s: float | None = None
        self._taken = 0

    def waited_s(self, count: int, now_s: float) -> float:
        """Seconds, of a call of `count` requests."""
        if count < self._most:
            self._full_since_s = None
            return 0.0
        if self._full_since_s is None:
            self._full_since_s, self._taken = now_s, 0
        self._taken += count
        full_s = now_s - self._full_since_s
        # Those in front of it were taken at the rate of these.
        return min(full_s, full_s * self._queue_size / self._taken)
