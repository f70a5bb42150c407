"""Tenants' files in the page cache before anything is measured.

A bank of nine gigabytes is there when it was just built, and not after a restart, or when other files took its place: then
every first load is a read of the disk.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

CHUNK = 1 << 20


def into_page_cache(store: Path) -> int:
    """Read what the page cache lacks of a store's bank files; returns how many bytes. Says so where they cannot fit."""
    missing: list[tuple[Path, int]] = []
    for file in sorted(store.glob("banks/*/*.bin")):
        with file.open("rb", buffering=0) as opened:
            offsets = range(0, file.stat().st_size, CHUNK)
            missing += [(file, offset) for offset in offsets if not _is_there(opened.fileno(), offset)]
    if len(missing) * CHUNK > 0.8 * _available():
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


def _is_there(handle: int, offset: int) -> bool:
    """Whether the byte can be read without waiting for the disk."""
    try:
        return os.preadv(handle, [bytearray(1)], offset, os.RWF_NOWAIT) > 0
    except OSError:
        # It would have to wait, or the file system cannot tell.
        return False


def _available() -> int:
    """Bytes that the page cache could have."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return 1024 * int(rest.split()[0])
    raise OSError("/proc/meminfo has no MemAvailable")
