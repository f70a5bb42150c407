"""Reads tenants' bank files into the page cache before a measurement.

A bank of nine gigabytes is in the page cache after it was built, but not after a restart or after other files were read.
Without the page cache every first load of a tenant reads the disk.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

CHUNK = 1 << 20  # bytes that are checked and read at once


def into_page_cache(store: Path) -> int:
    """Read the parts of a store's bank files that the page cache lacks, and return their bytes.

    If the parts do not fit into memory, nothing is read and a warning is logged.
    """
    missing: list[tuple[Path, int]] = []
    for file in sorted(store.glob("banks/*/*.bin")):
        with file.open("rb", buffering=0) as opened:
            offsets = range(0, file.stat().st_size, CHUNK)
            missing += [(file, offset) for offset in offsets if not _is_cached(opened.fileno(), offset)]
    if len(missing) * CHUNK > 0.8 * _available_bytes():
        logging.getLogger(__name__).warning(
            "%.1f GB of tenants in %s do not fit into the page cache: loads of tenants are reads of the disk",
            len(missing) * CHUNK / 1e9,
            store,
        )
        return 0
    size = 0
    for file, offset in missing:
        with file.open("rb", buffering=0) as opened:
            size += len(os.pread(opened.fileno(), CHUNK, offset))
    return size


def _is_cached(handle: int, offset: int) -> bool:
    """Return whether the byte can be read without waiting for the disk."""
    try:
        return os.preadv(handle, [bytearray(1)], offset, os.RWF_NOWAIT) > 0
    except OSError:
        # The read would have to wait, or the file system does not support the check.
        return False


def _available_bytes() -> int:
    """Return the bytes of memory that the page cache can use."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return 1024 * int(rest.split()[0])
    raise OSError("/proc/meminfo has no MemAvailable")
