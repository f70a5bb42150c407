"""Calls functions at the deadlines of texts that wait for a further level."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable

from hplm.runtime.rate_limited_log import log_rate_limited


class Alarm:
    """A function to call at a time, unless it is called off before."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring: Callable[[], None] | None = ring

    def call_off(self) -> None:
        """Forget the function, and with it the text that it holds in memory."""
        self._ring = None

    def ring(self) -> None:
        """Call the function, unless it is called off."""
        if (ring := self._ring) is not None:
            ring()


class DeadlineTimer:
    """A thread that rings alarms in the order of their times. Safe to use from several threads."""

    def __init__(self) -> None:
        self._alarms: list[tuple[float, int, Alarm]] = []
        self._ids = itertools.count()
        self._changed = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._loop, name="cascade-deadlines", daemon=True)
        self._thread.start()

    def add(self, at_s: float, ring: Callable[[], None]) -> Alarm:
        """Call `ring` at a time of the monotonic clock, or at once if it has passed. Return the alarm."""
        alarm = Alarm(ring)
        with self._changed:
            heapq.heappush(self._alarms, (at_s, next(self._ids), alarm))
            if self._alarms[0][2] is alarm:
                self._changed.notify()
        return alarm

    def stop(self) -> None:
        """End the thread. Alarms that have not rung never ring."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self._thread.join()

    def _loop(self) -> None:
        while (due := self._due()) is not None:
            for alarm in due:
                try:
                    alarm.ring()
                except Exception as error:
                    log_rate_limited("cascade: a late text could not be answered", error)
            del due

    def _due(self) -> list[Alarm] | None:
        """Wait for the next alarms. Return None at the end."""
        with self._changed:
            while not self._is_stopping:
                now_s = time.monotonic()
                due = []
                while self._alarms and self._alarms[0][0] <= now_s:
                    due.append(heapq.heappop(self._alarms)[2])
                if due:
                    return due
                next_s = self._alarms[0][0] if self._alarms else math.inf
                self._changed.wait(None if next_s == math.inf else next_s - now_s)
        return None
