"""Tenants' files in the page cache before anything is measured.

A bank of nine gigabytes is there when it was just built, and not after a restart: then every first load is a read of the disk,
ten times as slow.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

CHUNK = 16 << 20


@cache
def into_page_cache(store: Path) -> bool:
    """Read a store's bank files once in the life of this process; says so where they are too large for the free memory."""
    files = sorted(store.glob("banks/*/*.bin"))
    size = sum(file.stat().st_size for file in files)
    fits = size < 0.8 * _available()
    if fits:
        for file in files:
            with file.open("rb", buffering=0) as opened:
                while opened.read(CHUNK):
                    pass
    else:
        logging.getLogger(__name__).warning(
            "%.1f GB of tenants in %s do not fit into the page cache: loads of tenants are reads of the disk",
            size / 1e9,
            store,
        )
    return fits


def _available() -> int:
    """Bytes that the page cache could have."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return 1024 * int(rest.split()[0])
    raise OSError("/proc/meminfo has no MemAvailable")
