"""A thread that repeats a read that may fail or hang."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

WARN_EVERY_S = 30.0  # at most one log line about failures in this time
# A poll that takes longer waits for a disk or a network that may not come back.
BLIND_AFTER_S = 3.0


class Poller:
    """Calls `poll` every `every_s` seconds, counts its failures and logs them now and then, after the words `fault`.

    `afterwards` is called after each poll. It must not raise, and it may take long.
    """

    def __init__(
        self,
        poll: Callable[[], None],
        *,
        name: str,
        every_s: float,
        fault: str,
        afterwards: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._every_s, self._fault, self._clock = poll, every_s, fault, clock
        self._afterwards = afterwards
        self._stopped = threading.Event()
        self._warned_s = -WARN_EVERY_S
        self._has_failed = False
        self._polling_since_s: float | None = None
        self._failures = 0
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)

    def start(self) -> None:
        """Start to poll."""
        self._thread.start()

    def close(self) -> None:
        """Stop polling. A poll that hangs is left behind after `BLIND_AFTER_S`."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(BLIND_AFTER_S)

    @property
    def failures(self) -> int:
        """The number of polls that failed or took too long."""
        return self._failures + self._hangs

    def is_blind(self) -> bool:
        """Return whether the last poll failed, or hangs. A poll that hangs is logged here: its own thread is blocked."""
        if self._hangs:
            self._warn("a poll hangs")
            return True
        return self._has_failed

    def poll(self) -> None:
        """Poll once. An error is counted and logged, not raised."""
        self._polling_since_s = self._clock()
        try:
            self._read()
            self._failures += self._hangs
            self._has_failed = False
        except Exception as error:
            self._has_failed = True
            self._failures += 1
            self._warn(repr(error))
        finally:
            self._polling_since_s = None

    @property
    def _hangs(self) -> bool:
        """Whether a poll takes longer than any poll should."""
        since_s = self._polling_since_s
        return since_s is not None and self._clock() - since_s > BLIND_AFTER_S

    def _follow(self) -> None:
        while not self._stopped.wait(self._every_s):
            self.poll()
            self._afterwards()

    def _warn(self, why: str) -> None:
        if self._clock() - self._warned_s >= WARN_EVERY_S:
            self._warned_s = self._clock()
            logging.getLogger(__name__).error("%s: %s", self._fault, why)
