"""How many jobs there are, for the metrics page."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress

from hplm.errors import RegistryError
from hplm.manage.lease_expiry import WATCH_S, LeaseExpiry
from hplm.registry.registry import Registry
from hplm.store.layout import Store

STATES = ("queued", "running", "lost", "done", "failed", "cancelled")
EVERY_S = 5.0


class JobCounts:
    """By state, as the registry had it some seconds ago; nothing, or what it was, while that cannot be read.

    In a thread of its own, since a database that is away may keep it waiting. It only reads.
    """

    def __init__(self, store: Store, *, every_s: float = EVERY_S, watch_s: float = WATCH_S) -> None:
        self._store, self._every_s, self._watch_s = store, every_s, watch_s
        self._counts: Mapping[str, int] = {}
        self._stopped = threading.Event()
        threading.Thread(target=self._loop, name="hplm-job-counts", daemon=True).start()

    def read(self) -> Mapping[str, int]:
        return self._counts

    def stop(self) -> None:
        """It waits for nothing."""
        self._stopped.set()

    def _loop(self) -> None:
        lapses = LeaseExpiry(self._watch_s)
        while True:
            # Opened each time: SQLite has one view of a file for a whole process, and a connection that was opened while the
            # disk could only be read would keep the manager from writing after.
            with suppress(RegistryError), closing(Registry.open_read_only(self._store)) as registry:
                found = registry.count_jobs(time.time(), lapsed=lapses)
                self._counts = {state: found[state] for state in STATES}
            if self._stopped.wait(self._every_s):
                return
