"""How much memory there is, and how the C library hands it out to this process."""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import suppress
from pathlib import Path

from hplm.runtime import cgroups

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def count_memory(cgroup: Path = cgroups.ROOT, own: Path = cgroups.OWN) -> int:
    """Bytes that this process and those beside it may use: the machine's, or a container's or systemd unit's limit."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for words in cgroups.limits("memory.max", cgroup, own):
        with suppress(ValueError):  # "max" without a limit
            found = min(found, *map(int, words))
    return found


def keep_freed_memory() -> None:
    """Keep freed memory for the next batch instead of giving it back, where the C library has such a setting.

    Intermediate results of megabytes come and go with every layer. As glibc comes, each is mapped anew and every page of
    it faults once more: 5 to 25 % of a batch's time. To be called before other threads start.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # 32 MiB is the most that glibc takes; one arena, so that what one thread freed another finds.
    if mallopt is not None:
        for setting, value in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_ARENA_MAX, 1)):
            mallopt(setting, value)


def stop_searching_what_stays() -> None:
    """Take all objects there are now out of Python's search for garbage: to be called when a stage is loaded.

    A library as large as torch leaves half a million objects that live as long as the process. Going through them took
    a third of a second again and again, with every thread stopped, whenever thousands of requests waited.
    """
    gc.collect()
    gc.freeze()
