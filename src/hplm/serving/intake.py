"""How long requests have waited in Triton before it handed them over, which it does not say."""

from __future__ import annotations

import math
from collections import deque

# Where all cores are busy Triton comes so late to what waits; a stage that it left alone for longer had nothing waiting there,
# unless a request of its own waits too.
PAUSE_S = 0.03
# A call that comes sooner after the last may have waited for its end: before that Triton passes the answers on that it
# brought back.
AT_ONCE_S = 0.003


class Intake:
    """Of a stage that takes all that Triton has for a call: while one lasts the next wait there, and longer behind full ones.

    `most` is what a call holds, `queue_size` what may wait there, 0 for any number: then the last call is all that is told
    of, and so it is where a call holds one. `processes` take turns at what waits. Rather too long than too short: who waited
    longer is refused sooner, which is quick, so that soon less waits.
    """

    def __init__(self, most: int, queue_size: int, processes: int = 1) -> None:
        self._holds_several = most > 1
        self._queue_size = -(-queue_size // processes)
        self._called_s = 0.0
        # When each of the full calls that followed each other came, and with how many requests, of the newest that hold as
        # many as may wait; before them, when the first of all may have begun to wait. Where so many waited, who is taken now
        # came into the place of the oldest of these.
        self._full: deque[tuple[float, int]] = deque()
        self._returned_s = 0.0

    def waited_s(self, count: int, now_s: float, oldest_s: float = math.inf, *, is_full: bool) -> float:
        """Seconds, of a call of `count` requests that `is_full`.

        `oldest_s`: when the stage sent a request to itself that Triton has not looked at: who is handed over in a full call
        came before that.
        """
        # Who came while the last call lasted; of others it says too much, by no more than that.
        meanwhile_s = now_s - self._called_s if now_s - self._returned_s < AT_ONCE_S else 0.0
        self._called_s = now_s
        says_more = is_full and self._holds_several
        if not says_more or (now_s - self._returned_s > PAUSE_S and oldest_s == math.inf):
            self._full.clear()
        if not says_more:
            return meanwhile_s
        if not self._full:
            self._add(now_s - meanwhile_s, 0)
        waited_s = now_s - self._full[0][0] if self._full else meanwhile_s
        self._add(now_s, count)
        return max(waited_s, now_s - oldest_s)

    def _add(self, now_s: float, count: int) -> None:
        self._full.append((now_s, count))
        waiting = sum(of_call for _, of_call in self._full)
        while self._full and waiting - self._full[0][1] >= self._queue_size:
            waiting -= self._full.popleft()[1]

    def returned(self, now_s: float) -> None:
        """The stage is ready for another call."""
        self._returned_s = now_s
