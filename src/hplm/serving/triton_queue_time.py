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


class TritonQueueTime:
    """Of a stage that takes all that Triton has for a call: while one lasts the next wait there, and longer behind full ones.

    `most` is what a call holds, `queue_size` what may wait there, 0 for any number: then the last call is all that is told of,
    and so it is where a call holds one, or where fewer requests of several texts fill it. `processes` take turns at what waits.
    Rather too long than too short: who waited longer is refused sooner, which is quick, so that soon less waits.
    """

    def __init__(self, most: int, queue_size: int, processes: int = 1) -> None:
        self._most = most
        self._called_s = 0.0
        # When each of as many full calls as may wait came, which followed each other; before them, when the first of all may
        # have begun to wait. Where they all waited, who is taken now came into the place of the oldest of these.
        self._full: deque[float] = deque(maxlen=-(-queue_size // (processes * max(1, most))))
        self._returned_s = 0.0

    def waited_s(self, count: int, now_s: float, oldest_s: float = math.inf) -> float:
        """Seconds, of a call of `count` requests.

        `oldest_s`: when the stage sent a request to itself that Triton has not looked at: who is handed over in a full call
        came before that.
        """
        # Who came while the last call lasted; of others it says too much, by no more than that.
        meanwhile_s = now_s - self._called_s if now_s - self._returned_s < AT_ONCE_S else 0.0
        self._called_s = now_s
        says_more = count == self._most > 1
        if not says_more or (now_s - self._returned_s > PAUSE_S and oldest_s == math.inf):
            self._full.clear()
        if not says_more:
            return meanwhile_s
        if not self._full:
            self._full.append(now_s - meanwhile_s)
        waited_s = now_s - self._full[0] if self._full else meanwhile_s
        self._full.append(now_s)
        return max(waited_s, now_s - oldest_s)

    def returned(self, now_s: float) -> None:
        """The stage is ready for another call."""
        self._returned_s = now_s
