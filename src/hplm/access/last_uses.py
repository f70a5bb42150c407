"""When keys were last used: serving processes write it to a folder in memory, and `hplm serve` writes it to the registry.

Serving processes never write the registry. Each process has one file in the folder. It writes the file only when `hplm serve`
has taken the file before, so that no use is lost and the folder stays small.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from hplm.registry.registry import Registry
from hplm.runtime.polling import Poller
from hplm.store.layout import Store

# Seconds between two writes of a process, and between two visits of `hplm serve`. A last use is listed after both.
WRITE_EVERY_S = 5.0
COLLECT_EVERY_S = 5.0
ENDING = ".uses"


class LastUseWriter:
    """Writes the last uses of this process's keys into `folder`. Used by one thread."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = folder / f"{os.getpid()}{ENDING}"
        self._clock = clock
        self._waiting: dict[str, float] = {}
        self._written_s = clock()

    def add(self, used_s: Mapping[str, float]) -> None:
        """Add last uses, in unix seconds by the keys' ids, and write all that wait every WRITE_EVERY_S. Raises OSError."""
        self._waiting.update(used_s)
        if not self._waiting or self._clock() - self._written_s < WRITE_EVERY_S:
            return
        self._written_s = self._clock()
        if not self._path.exists():
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(self._waiting))
            partial.rename(self._path)
            self._waiting = {}


class LastUseCollector:
    """Takes the last uses that serving processes write into `folder`, and records them in the registry, until `close`."""

    def __init__(self, folder: Path, store: Store) -> None:
        self._folder, self._store = folder, store
        self._waiting: dict[str, float] = {}
        self._registry: Registry | None = None
        fault = "the last uses of keys wait"
        self._poller = Poller(self.collect, name="hplm-last-uses", every_s=COLLECT_EVERY_S, fault=fault)

    def start(self) -> None:
        """Start to collect."""
        self._poller.start()

    def close(self) -> None:
        """Stop, and record what is left."""
        self._poller.close()
        self._poller.poll()
        if self._registry is not None:
            self._registry.close()

    def collect(self) -> None:
        """Take all files, and record what they hold. If the registry cannot be written, it waits. Raises RegistryError."""
        for path in sorted(self._folder.glob(f"*{ENDING}")):
            for key_id, used_s in _taken(path).items():
                self._waiting[key_id] = max(used_s, self._waiting.get(key_id, 0.0))
        if self._waiting:
            if self._registry is None:
                self._registry = Registry.open(self._store)
            self._registry.note_key_uses(self._waiting)
            self._waiting = {}


def _taken(path: Path) -> dict[str, float]:
    """Return what a file holds, and remove the file. A file that another process has damaged holds nothing."""
    with suppress(OSError):
        raw = path.read_bytes()
        path.unlink()
        with suppress(ValueError):
            return {str(key_id): float(used_s) for key_id, used_s in json.loads(raw).items()}
    return {}
