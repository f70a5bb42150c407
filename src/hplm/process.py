"""A process's tie to whoever started it, and its place behind those beside it."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

from hplm.errors import StartError

PR_SET_PDEATHSIG = 1
SHARED_MEMORY = Path("/dev/shm")
# Loaded here, not between a fork and its exec.
_LIBC = ctypes.CDLL(None)


def end_with_parent(parent: int) -> None:
    """Have the system send SIGTERM to this process when `parent` is gone. Raises StartError where it is gone already."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise StartError(f"process {parent}, which this one should end with, is gone")


def give_way_for_memory() -> None:
    """Have the system end this process before any other where memory runs out, as far as the system has such a setting."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def end_if_orphaned(parent: int) -> None:
    """End this process at once where `parent`, which started it, is gone, however that came.

    For a process whose parent's *threads* come and go: at the end of the one that started it the system would send its signal.
    """
    if os.getppid() != parent:
        os._exit(1)


def backlogs_of(server: int) -> str:
    """How the names of files in shared memory begin by which the stubs of a Triton process tell each other what waits."""
    return f"hplm-backlog-{_numbered(server)}-"


def stopping_file(server: int) -> Path:
    """The file in shared memory by which whoever runs a Triton process tells its stubs that it is about to end it.

    Triton itself tells them when no request is under way any more, which under load is never.
    """
    return SHARED_MEMORY / f"hplm-stopping-{_numbered(server)}"


def is_told_to_stop(server: int) -> bool:
    """Whether the file is there. Only our own user's word counts."""
    with suppress(OSError):
        return stopping_file(server).lstat().st_uid == os.geteuid()
    return False


def _numbered(server: int) -> str:
    """Containers may share that memory, and then each has a process of the same number."""
    return f"{os.stat('/proc/self/ns/pid').st_ino}-{server}"
