"""The number of jobs in each state, for the metrics page."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress

from hplm.errors import RegistryError
from hplm.jobs.lease_expiry import WATCH_S, LeaseExpiry
from hplm.registry.registry import Registry
from hplm.store.layout import Store

STATES = ("queued", "running", "lost", "done", "failed", "cancelled")
EVERY_S = 5.0  # seconds between two reads of the registry


class JobCounts:
    """The number of jobs by state, read from the registry every `every_s` seconds.

    If the registry cannot be read, the counts stay as they were; before the first read they are empty. The read runs
    in its own thread, because a database that is away may block. This class only reads.
    """

    def __init__(self, store: Store, *, every_s: float = EVERY_S, watch_s: float = WATCH_S) -> None:
        self._store, self._every_s, self._watch_s = store, every_s, watch_s
        self._counts: Mapping[str, int] = {}
        self._stopped = threading.Event()
        threading.Thread(target=self._loop, name="hplm-job-counts", daemon=True).start()

    def read(self) -> Mapping[str, int]:
        return self._counts

    def stop(self) -> None:
        """Stop reading. Does not wait for the thread."""
        self._stopped.set()

    def _loop(self) -> None:
        expiry = LeaseExpiry(self._watch_s)
        while True:
            # The registry is opened each time. SQLite has one view of a file for a whole process: a connection opened
            # while the disk was read-only would later keep the manager from writing.
            with suppress(RegistryError), closing(Registry.open_read_only(self._store)) as registry:
                counts = registry.count_jobs(time.time(), expired=expiry)
                self._counts = {state: counts[state] for state in STATES}
            if self._stopped.wait(self._every_s):
                return
