"""Faults that come with each request, in the log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

WINDOW_S = 30.0
MOST_SAID = 100


class RateLimitedLog:
    """Faults of requests in the log, each once in half a minute, and a hundred at most: who asks on must not fill the disk."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: set[str] = set()
        self._unsaid = 0
        self._since_s = clock()
        self._lock = threading.Lock()

    def say(self, words: str, error: BaseException | None = None) -> None:
        """With `error`'s traceback where it is given. What was left out before is counted in a line of its own."""
        unsaid = 0
        with self._lock:
            if self._clock() - self._since_s >= WINDOW_S:
                unsaid, self._unsaid = self._unsaid, 0
                self._said.clear()
                self._since_s = self._clock()
            is_new = words not in self._said and len(self._said) < MOST_SAID
            if is_new:
                self._said.add(words)
            else:
                self._unsaid += 1
        log = logging.getLogger(__name__)
        if unsaid:
            log.error("%d more faults of requests, most like those above, were left out", unsaid)
        if is_new:
            log.error("%s", words, exc_info=error)


COMPLAINTS = RateLimitedLog()


def log_rate_limited(words: str, error: BaseException | None = None) -> None:
    """`RateLimitedLog.say` of this process."""
    COMPLAINTS.say(words, error)
