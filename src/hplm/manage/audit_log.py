"""Writes the audit log of manage requests."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hplm.errors import HplmError
from hplm.manage.rights import CHANGES
from hplm.registry.access.audit import AuditEntry
from hplm.registry.registry import Registry
from hplm.runtime.rate_limited_log import log_rate_limited

# Seconds after which requests that change nothing, and refused requests, are written. Equal requests become one entry.
WRITE_EVERY_S = 10.0
# Seconds after which old entries are forgotten, and the number of new entries after which they are.
TRIM_EVERY_S = 3600.0
TRIM_EVERY = 10_000
# Longest wait of `close` for a registry that does not answer.
CLOSE_S = 2.0
# Most changes that wait to be written, and most other entries. Neither a registry that is away nor a flood of requests may
# fill the memory. The oldest entries are lost first.
MOST_WAITING = 10_000


class _Waiting:
    """At most MOST_WAITING entries that wait to be written, oldest first. Equal requests are one entry."""

    def __init__(self) -> None:
        self.entries: dict[AuditEntry, AuditEntry] = {}
        self.lost = 0

    def add(self, entry: AuditEntry) -> None:
        # Without a time and a number, equal requests are equal.
        same = replace(entry, at_s=0.0, times=1)
        before = self.entries.pop(same, None)
        self.entries[same] = entry if before is None else replace(entry, times=before.times + entry.times)
        if len(self.entries) > MOST_WAITING:
            del self.entries[next(iter(self.entries))]
            self.lost += 1

    def add_all(self, other: _Waiting) -> None:
        for entry in other.entries.values():
            self.add(entry)
        self.lost += other.lost


class AuditLog:
    """Adds entries to the registry's audit log. Safe to use from several threads.

    An entry of a change is written at once. Other entries wait for up to WRITE_EVERY_S. If the registry cannot be written, all
    entries wait, and the log of the process says so. Other entries push out no changes, neither here nor in the registry.
    """

    def __init__(self, registry: Callable[[], Registry], clock: Callable[[], float] = time.time) -> None:
        """`registry` returns the registry, or raises RegistryError while it is away. `clock` returns unix seconds."""
        self._registry, self._clock = registry, clock
        self._changes, self._others = _Waiting(), _Waiting()
        self._changed = threading.Lock()
        self._writing = threading.Lock()
        self._trimmed_s = -TRIM_EVERY_S
        self._untrimmed = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="hplm-audit", daemon=True)
        self._is_started = False

    def note(
        self,
        key: str | None,
        role: str | None,
        action: str,
        subject: str,
        outcome: str,
        details: Mapping[str, Any] | None = None,
        *,
        is_change: bool,
    ) -> None:
        """Add an entry. That of a change is in the registry when the call returns, unless the registry cannot be written."""
        with self._changed:
            waiting = self._changes if is_change else self._others
            waiting.add(AuditEntry(self._clock(), key, role, action, subject, outcome, details=details or {}))
            if not self._is_started:
                try:
                    self._thread.start()
                    self._is_started = True
                except RuntimeError as error:
                    _log("entries of the audit log wait for a thread", error)
        if is_change:
            self.write()

    def write(self) -> None:
        """Write what waits. If the registry cannot be written, it waits on."""
        with self._writing:
            with self._changed:
                changes, others = self._changes, self._others
                self._changes, self._others = _Waiting(), _Waiting()
            entries = sorted([*changes.entries.values(), *others.entries.values()], key=lambda entry: entry.at_s)
            if not entries:
                return
            try:
                self._registry().add_audit(entries)
            except Exception as error:
                # Also errors that are not the registry's, such as too many open files: no entry may be lost, and the thread
                # must live on.
                _log("entries of the audit log wait", error)
                with self._changed:
                    changes.add_all(self._changes)
                    others.add_all(self._others)
                    self._changes, self._others = changes, others
                return
            self._untrimmed += len(entries)
            self._trim()
        if changes.lost or others.lost:
            logging.getLogger(__name__).error(
                "the audit log lacks %d changes and %d other entries: more than %d different ones waited to be written",
                changes.lost,
                others.lost,
                MOST_WAITING,
            )

    def close(self) -> None:
        """Write what is left, and end the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _trim(self) -> None:
        now_s = self._clock()
        if now_s - self._trimmed_s < TRIM_EVERY_S and self._untrimmed < TRIM_EVERY:
            return
        self._trimmed_s, self._untrimmed = now_s, 0
        try:
            self._registry().trim_audit(now_s, CHANGES)
        except Exception as error:
            _log("old entries of the audit log stay", error)

    def _loop(self) -> None:
        while not self._stopped.wait(WRITE_EVERY_S):
            self.write()
        self.write()


def _log(what: str, error: Exception) -> None:
    """Log an error, an unexpected one with its traceback."""
    if isinstance(error, HplmError):
        log_rate_limited(f"{what}: {error.wire()}")
    else:
        log_rate_limited(f"{what}: {type(error).__name__}", error)
