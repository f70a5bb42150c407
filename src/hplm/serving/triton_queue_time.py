"""An estimate of how long requests have queued inside Triton, which does not report it."""

from __future__ import annotations

import math
from collections import deque

# On busy cores Triton may begin the next call this many seconds after the last. If a stage was idle for longer, no request
# waited in Triton, unless a request that the stage sent to itself waits too.
PAUSE_S = 0.03
# A call that begins within this many seconds after the last may have waited for its end: before that, Triton passes on the
# answers that the last call brought back.
AT_ONCE_S = 0.003


class TritonQueueTime:
    """Estimates how long the requests of a call have waited in Triton, for a stage that takes all that Triton has.

    While a call lasts the next requests wait, and behind full calls they wait for longer. `most` requests fit in a call, and
    `queue_size` may wait in Triton, 0 for any number. `processes` of the stage take turns at the requests.

    The estimate covers only the last call in three cases: `queue_size` is 0, `most` is 1, or requests of several texts fill a
    call with fewer than `most`. It is rather too long than too short: a request that waited longer is refused sooner. Refusing
    is quick, so that fewer requests wait soon.
    """

    def __init__(self, most: int, queue_size: int, processes: int = 1) -> None:
        self._most = most
        self._called_s = 0.0
        # When the last full calls in a row began, as many calls as may wait; the first entry is when the first request may have
        # begun to wait. If all of these waited, a request that is taken now came into the place of the oldest of them.
        self._full: deque[float] = deque(maxlen=-(-queue_size // (processes * max(1, most))))
        self._returned_s = 0.0

    def waited_s(self, count: int, now_s: float, oldest_s: float = math.inf) -> float:
        """Return the seconds that the `count` requests of a call which begins now have waited.

        `oldest_s`: when the stage sent itself a request that Triton has not looked at. The requests of a full call are older.
        """
        # Requests may have come at any time during the last call, so this is too long by up to its duration.
        meanwhile_s = now_s - self._called_s if now_s - self._returned_s < AT_ONCE_S else 0.0
        self._called_s = now_s
        is_full = count == self._most > 1
        if not is_full or (now_s - self._returned_s > PAUSE_S and oldest_s == math.inf):
            self._full.clear()
        if not is_full:
            return meanwhile_s
        if not self._full:
            self._full.append(now_s - meanwhile_s)
        waited_s = now_s - self._full[0] if self._full else meanwhile_s
        self._full.append(now_s)
        return max(waited_s, now_s - oldest_s)

    def returned(self, now_s: float) -> None:
        """Note that a call has returned, and the stage is ready for another."""
        self._returned_s = now_s
