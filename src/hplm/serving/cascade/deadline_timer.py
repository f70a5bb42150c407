"""Calls functions at the deadlines of texts that wait for a further level."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

from hplm.runtime.rate_limited_log import log_rate_limited

# The longest wait for an alarm, in seconds. A client may set a timeout of a thousand centuries, and Python refuses such a wait.
MOST_WAIT_S = 3600.0
# Alarms that were called off are taken out once they are half of all, from this number of alarms on.
LEAST_SWEPT = 1024


class Alarm:
    """A function to call at a time, unless it is called off before."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring: Callable[[], None] | None = ring

    @property
    def is_off(self) -> bool:
        """Whether the alarm is called off."""
        return self._ring is None

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
        # The number of alarms at which those that are off are taken out. Clients choose how far away an alarm is.
        self._sweep_at = LEAST_SWEPT
        self._ids = itertools.count()
        self._changed = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._loop, name="cascade-deadlines", daemon=True)
        self._thread.start()

    def add(self, at_s: float, ring: Callable[[], None]) -> Alarm:
        """Call `ring` at a time of the monotonic clock, or at once if it has passed. Return the alarm."""
        alarm = Alarm(ring)
        with self._changed:
            if len(self._alarms) >= self._sweep_at:
                self._alarms = [entry for entry in self._alarms if not entry[2].is_off]
                heapq.heapify(self._alarms)
                self._sweep_at = max(LEAST_SWEPT, 2 * len(self._alarms))
            heapq.heappush(self._alarms, (at_s, next(self._ids), alarm))
            if self._alarms[0][2] is alarm:
                self._changed.notify()
        return alarm

    def __len__(self) -> int:
        return len(self._alarms)

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
                left_s = self._alarms[0][0] - now_s if self._alarms else MOST_WAIT_S
                self._changed.wait(min(left_s, MOST_WAIT_S))
        return None
