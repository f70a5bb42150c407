"""Each tenant's texts of the last hour and day, in a file in shared memory that all stages of a store add to."""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hplm.runtime.process import SHARED_MEMORY
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.runtime.shared_records import SharedRecords

# Prefix of the names of these files in shared memory.
PREFIX = "hplm-counts-"
# A tenant takes 1.7 KB from its first text on, so that a file takes at most 115 MB.
MOST_TENANTS = 65_536
# A file that no stage has touched for this many seconds holds no text of the last day.
FORGOTTEN_S = 2 * 86_400.0
# Seconds between two touches by a process.
TOUCH_EVERY_S = 3600.0
# A slot of a ring: the number of its period since 1970, and the counts in the order of `Counts`.
_SLOT = struct.Struct("=6Q")


class Counts(NamedTuple):
    """Texts by outcome, and tokens looked up.

    `ok` were answered; `refused`: the server could not answer now, or a limit of the tenant was reached; `invalid`: the
    request was at fault; `failed`: the server was at fault.
    """

    ok: int = 0
    refused: int = 0
    invalid: int = 0
    failed: int = 0
    tokens: int = 0

    def plus(self, other: Counts) -> Counts:
        """Return the sums of both."""
        return Counts(*(mine + its for mine, its in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Ring:
    """`slots` periods of `period_s` seconds that a record holds. Their sum is of the last `slots` periods, the current too."""

    period_s: int
    slots: int


# The last hour is exact to 5 minutes, the last day to an hour.
HOUR, DAY = Ring(300, 12), Ring(3600, 24)
_RINGS = (HOUR, DAY)
_BODY_BYTES = sum(ring.slots for ring in _RINGS) * _SLOT.size


class RecentCounts:
    """The file of one store, which outlives servers but not the machine's next start. Safe to use from several threads.

    All servers of one user on this machine that serve the store add to it. A count that cannot be written is lost, and the
    log says so. Raises OSError on construction if the file cannot be made.
    """

    def __init__(self, store: Path, registry: str = "", *, folder: Path = SHARED_MEMORY) -> None:
        self._records = SharedRecords(_path(store, registry, folder), _BODY_BYTES, MOST_TENANTS)
        self._touched_s = 0.0

    def close(self) -> None:
        self._records.close()

    def add(self, counts: Mapping[str, Counts], now_s: float) -> None:
        """Add counts by tenant. `now_s` is unix time."""
        if abs(now_s - self._touched_s) > TOUCH_EVERY_S:
            self._touched_s = now_s
            self._records.touch()
        for tenant, count in counts.items():
            if (index := self._records.find_or_add(tenant)) is None:
                log_rate_limited("the file of tenants' counts is full: texts of further tenants are not counted")
                continue
            try:
                with self._records.locked_record(index):
                    self._add(index, count, now_s)
            except TimeoutError as error:
                log_rate_limited(f"counts of a tenant are lost: {error}")

    def read(self, tenant: str, now_s: float) -> dict[Ring, Counts]:
        """Return a tenant's counts of the last hour and day."""
        sums = {ring: Counts() for ring in _RINGS}
        if (index := self._records.find(tenant)) is None:
            return sums
        for ring, at, _ in self._slots(index, now_s):
            newest = int(now_s) // ring.period_s
            for slot in range(ring.slots):
                period, *counts = _SLOT.unpack_from(self._records.memory, at + slot * _SLOT.size)
                if newest - ring.slots < period <= newest:
                    sums[ring] = sums[ring].plus(Counts(*counts))
        return sums

    def _add(self, index: int, count: Counts, now_s: float) -> None:
        memory = self._records.memory
        for ring, at, current in self._slots(index, now_s):
            newest = int(now_s) // ring.period_s
            period, *counts = _SLOT.unpack_from(memory, at + current * _SLOT.size)
            before = Counts(*counts) if period == newest else Counts()
            _SLOT.pack_into(memory, at + current * _SLOT.size, newest, *before.plus(count))

    def _slots(self, index: int, now_s: float) -> Iterator[tuple[Ring, int, int]]:
        """Yield each ring, the offset of its first slot in memory, and its slot of the current period."""
        at = self._records.body_at(index)
        for ring in _RINGS:
            yield ring, at, int(now_s) // ring.period_s % ring.slots
            at += ring.slots * _SLOT.size


def read_recent(store: Path, registry: str, tenant: str, *, folder: Path = SHARED_MEMORY) -> dict[Ring, Counts]:
    """Return a tenant's counts of the last hour and day, from the file of a store on this machine. Raises OSError."""
    if not _path(store, registry, folder).exists():
        return {ring: Counts() for ring in _RINGS}
    with closing(RecentCounts(store, registry, folder=folder)) as recent:
        return recent.read(tenant, time.time())


def sweep(folder: Path = SHARED_MEMORY) -> None:
    """Remove this user's files that no stage has touched for two days."""
    for path in folder.glob(f"{PREFIX}*"):
        with suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > FORGOTTEN_S:
                path.unlink()


def counts_of(outcomes: Counter[str], tokens: int) -> Counts:
    """Return counts of texts by the names of `Counts`."""
    return Counts(outcomes["ok"], outcomes["refused"], outcomes["invalid"], outcomes["failed"], tokens)


def _path(store: Path, registry: str, folder: Path) -> Path:
    name = hashlib.sha256(os.fsencode(f"{store.absolute()}\0{registry}")).hexdigest()[:16]
    return folder / f"{PREFIX}{os.geteuid()}-{name}"
