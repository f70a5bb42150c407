"""The memory that this process may use, and how the C library manages it."""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import suppress
from pathlib import Path

from hplm.runtime import cgroups

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def count_memory(cgroup: Path = cgroups.ROOT, own: Path = cgroups.OWN) -> int:
    """Return the bytes that this process and its neighbours may use: the machine's, or the limit of a container or unit."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for words in cgroups.limits("memory.max", cgroup, own):
        with suppress(ValueError):  # "max" without a limit
            most = min(most, *map(int, words))
    return most


def count_process_memory(pid: int) -> int:
    """Return the bytes of memory of a process, with its share of the pages that it shares with other processes.

    Shared pages count in full if the system does not tell the share to this user. 0 if the process is gone.
    """
    folder = Path("/proc", str(pid))
    with suppress(OSError, IndexError):
        shares = [
            line.split()[1] for line in (folder / "smaps_rollup").read_text().splitlines() if line.startswith("Pss:")
        ]
        return int(shares[0]) << 10
    with suppress(OSError):
        return int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def keep_freed_memory() -> None:
    """Keep freed memory for the next batch instead of returning it to the system, if the C library has such a setting.

    Each layer allocates and frees megabytes of intermediate results. By default glibc maps each of them anew, and every page
    faults again, which takes 5 to 25 % of a batch's time. Call this before other threads start.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # glibc accepts at most 32 MiB. With one arena, a thread reuses memory that another thread has freed.
    if mallopt is not None:
        for setting, value in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_ARENA_MAX, 1)):
            mallopt(setting, value)


def freeze_garbage_collection() -> None:
    """Exclude all present objects from Python's garbage collection. Call this when a stage is loaded.

    A library as large as torch leaves half a million objects that live as long as the process. While thousands of requests
    waited, each collection went through them and stopped every thread for a third of a second.
    """
    gc.collect()
    gc.freeze()
