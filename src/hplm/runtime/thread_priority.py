"""How threads that compute share the machine with those that pass requests on."""

from __future__ import annotations

import fcntl
import logging
import os
import threading

# How long a Python thread may keep the others waiting. With Python's 5 ms, computing waits that long between layers
# whenever a request is being read or answered; with 0.1 ms the waiting threads' own waking takes an eighth of the machine.
SWITCH_INTERVAL_S = 1e-3


class ExclusiveLock:
    """A file lock held while a stage computes, for measuring what it is worth that stages compute at the same time."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "w")  # noqa: SIM115  kept for the life of the stage

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


def be_nice(nice: int, name: str) -> bool:
    """Tell the system how much this thread matters beside others, and the threads that it starts: -20 most, 19 least.

    A thread that computes all the time is made to wait whenever one that only passes a request on wakes on its core, even
    while another core is idle. Logged, not raised, where the process has no right to: it then computes as any other. Returns
    whether it had.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    except OSError as error:
        logging.getLogger(__name__).warning(
            "%s: computing at the usual priority, nice %d was refused (%s): under load fewer requests are answered; allow it "
            "with `--cap-add SYS_NICE`, under systemd `AmbientCapabilities=CAP_SYS_NICE`, or set compute_nice to 0",
            *(name, nice, error.strerror),
        )
        return False
    return True
