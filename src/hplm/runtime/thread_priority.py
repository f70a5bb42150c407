"""How computing threads share the machine with threads that forward requests."""

from __future__ import annotations

import fcntl
import logging
import os
import threading

# Seconds that a Python thread may hold the interpreter lock. With Python's default of 5 ms, a computing thread waits that long
# between layers while a request is read or answered. With 0.1 ms, waking threads takes an eighth of the machine.
SWITCH_INTERVAL_S = 1e-3


class ExclusiveLock:
    """A file lock that a stage holds while it computes, to measure the gain of stages that compute at the same time."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "w")  # noqa: SIM115  open as long as the stage lives

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


def be_nice(nice: int, name: str) -> bool:
    """Set the nice value of this thread and of threads that it starts: -20 is the highest priority, 19 the lowest.

    Without it, a computing thread waits whenever a forwarding thread wakes on its core, even if another core is idle. If the
    process may not do this, a warning is logged and the priority stays. Returns whether it was set. `name` is the stage.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    except OSError as error:
        logging.getLogger(__name__).warning(
            "%s: computing at the usual priority, because nice %d was refused (%s): fewer requests are answered under load; "
            "allow it with `--cap-add SYS_NICE`, under systemd `AmbientCapabilities=CAP_SYS_NICE`, or set compute_nice to 0",
            *(name, nice, error.strerror),
        )
        return False
    return True
