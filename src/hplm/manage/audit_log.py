"""Writes the audit log of manage requests."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from hplm.errors import HplmError
from hplm.registry.access.audit import AuditEntry
from hplm.registry.registry import Registry

# Seconds after which requests that change nothing, and refused requests, are written. Equal requests become one entry.
WRITE_EVERY_S = 10.0
# Seconds between two times that old entries are forgotten.
TRIM_EVERY_S = 3600.0
# Longest wait of `close` for a registry that does not answer.
CLOSE_S = 2.0
# Most entries that wait to be written. A registry that is away must not fill the memory; the oldest entries are lost first.
MOST_WAITING = 10_000


class AuditLog:
    """Adds entries to the registry's audit log. Safe to use from several threads.

    An entry of a change is written at once. Other entries wait for up to WRITE_EVERY_S. If the registry cannot be written, all
    entries wait, and the log of the process says so.
    """

    def __init__(self, registry: Callable[[], Registry], clock: Callable[[], float] = time.time) -> None:
        """`registry` returns the registry, or raises RegistryError while it is away. `clock` returns unix seconds."""
        self._registry, self._clock = registry, clock
        self._waiting: dict[AuditEntry, AuditEntry] = {}
        self._lost = 0
        self._changed = threading.Lock()
        self._writing = threading.Lock()
        self._trimmed_s = -TRIM_EVERY_S
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="hplm-audit", daemon=True)
        self._is_started = False

    def note(
        self, key: str | None, role: str | None, action: str, subject: str, outcome: str, *, at_once: bool
    ) -> None:
        """Add an entry. With `at_once` it is in the registry when the call returns, unless the registry is away."""
        entry = AuditEntry(self._clock(), key, role, action, subject, outcome)
        with self._changed:
            # Without a time, equal requests are equal.
            same = replace(entry, at_s=0.0)
            before = self._waiting.pop(same, None)
            self._waiting[same] = entry if before is None else replace(entry, times=before.times + 1)
            if len(self._waiting) > MOST_WAITING:
                del self._waiting[next(iter(self._waiting))]
                self._lost += 1
            if not self._is_started:
                self._is_started = True
                self._thread.start()
        if at_once:
            self.write()

    def write(self) -> None:
        """Write what waits. If the registry is away, it waits on."""
        with self._writing:
            with self._changed:
                entries, lost = list(self._waiting.items()), self._lost
                self._waiting, self._lost = {}, 0
            if not entries:
                return
            try:
                registry = self._registry()
                registry.add_audit([entry for _, entry in entries])
                if self._clock() - self._trimmed_s >= TRIM_EVERY_S:
                    self._trimmed_s = self._clock()
                    registry.trim_audit(self._clock())
            except HplmError as error:
                logging.getLogger(__name__).error("%d entries of the audit log wait: %s", len(entries), error.wire())
                with self._changed:
                    self._lost += lost
                    for same, entry in reversed(entries):
                        self._waiting = {same: entry, **self._waiting}
                return
        if lost:
            logging.getLogger(__name__).error("%d entries of the audit log were lost while the registry was away", lost)

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _loop(self) -> None:
        while not self._stopped.wait(WRITE_EVERY_S):
            self.write()
        self.write()
