"""A child process's tie to whoever started it."""

from __future__ import annotations

import ctypes
import os
import signal

from hplm.errors import StartError

PR_SET_PDEATHSIG = 1
# Loaded here, not between a fork and its exec.
_LIBC = ctypes.CDLL(None)


def end_with_parent(parent: int) -> None:
    """Have the system send SIGTERM to this process when `parent` is gone. Raises StartError where it is gone already."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise StartError(f"process {parent}, which this one should end with, is gone")


def end_if_orphaned(parent: int) -> None:
    """End this process at once where `parent`, which started it, is gone, however that came.

    For a process whose parent's *threads* come and go: at the end of the one that started it the system would send its signal.
    """
    if os.getppid() != parent:
        os._exit(1)
