"""A log for faults that may come with every request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

# Seconds in which a message is logged once.
WINDOW_S = 30.0
# The most messages that are logged in WINDOW_S.
MOST_MESSAGES = 100


class RateLimitedLog:
    """Logs each message once in WINDOW_S and at most MOST_MESSAGES, so that repeated requests do not fill the disk."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: set[str] = set()
        self._skipped = 0
        self._since_s = clock()
        self._lock = threading.Lock()

    def log(self, message: str, error: BaseException | None = None) -> None:
        """Log a message, with the traceback of `error` if there is one. A line of its own counts skipped messages."""
        skipped = 0
        with self._lock:
            if self._clock() - self._since_s >= WINDOW_S:
                skipped, self._skipped = self._skipped, 0
                self._logged.clear()
                self._since_s = self._clock()
            is_new = message not in self._logged and len(self._logged) < MOST_MESSAGES
            if is_new:
                self._logged.add(message)
            else:
                self._skipped += 1
        logger = logging.getLogger(__name__)
        if skipped:
            logger.error("%d more faults of requests, most like those above, were left out", skipped)
        if is_new:
            logger.error("%s", message, exc_info=error)


PROCESS_LOG = RateLimitedLog()


def log_rate_limited(message: str, error: BaseException | None = None) -> None:
    """Log with the one `RateLimitedLog` of this process."""
    PROCESS_LOG.log(message, error)
