"""Processes: the tie to a parent, limits, names that are unique on the machine, and signs between processes."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from hplm.errors import ConfigError, StartError

PR_SET_PDEATHSIG = 1
SHARED_MEMORY = Path("/dev/shm")
# Prefixes of file names in shared memory. The name of a Triton process follows (`numbered`).
BACKLOG, STOPPING = "hplm-backlog-", "hplm-stopping-"
# Some libraries allocate a table with an entry for each file that may be open, so the limit must not be a thousand million.
MOST_FILES = 65_536
# States of a process that has ended: its parent has not read the status yet, or the process is gone.
ENDED = ("Z", "X")
# The index of the start time in `stat_of`.
BEGUN = 19
# Loaded at import, because nothing may be loaded between a fork and its exec.
_LIBC = ctypes.CDLL(None)


def end_with_parent(parent: int) -> None:
    """Have the system send SIGTERM to this process when `parent` is gone. Raises StartError if it is gone already."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise StartError(f"process {parent} is gone, and this process should end with it")


def file_limits() -> tuple[int, int]:
    """Return limits with which a process may open as many files and connections as the system allows, at most MOST_FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    return (soft if soft == resource.RLIM_INFINITY else max(soft, most)), hard


def pin_to_cores(cores: Collection[int]) -> None:
    """Let all threads of this process run on these cores alone. Raises ConfigError if the process may not use one of them."""
    allowed = os.sched_getaffinity(0)
    if missing := set(cores) - allowed:
        raise ConfigError(
            f"core {min(missing)} is not one of this process: its cores are {', '.join(map(str, sorted(allowed)))}; export "
            "the base with other --cores"
        )
    # A thread that is started meanwhile has the cores of the thread that starts it.
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


def give_way_for_memory() -> None:
    """Have the system kill this process before any other if memory runs out, if the system has such a setting."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def end_if_orphaned(parent: int) -> None:
    """End this process at once if `parent`, which started it, is gone.

    `end_with_parent` is no use if threads of the parent end: the system sends its signal when the thread that started the
    process ends.
    """
    if os.getppid() != parent:
        os._exit(1)


def backlogs_of(server: int) -> str:
    """Return the prefix of the files in shared memory by which the stubs of a Triton process exchange their backlogs."""
    return f"{BACKLOG}{numbered(server)}-"


def stopping_file(server: int) -> Path:
    """Return the file in shared memory by which the launcher tells the stubs of a Triton process that it ends Triton.

    See `hplm.triton.workarounds.late_finalize`.
    """
    return SHARED_MEMORY / f"{STOPPING}{numbered(server)}"


def tell_to_stop(server: int) -> None:
    """Make the file: a link to the server's start time, because a link needs no shared memory. Raises OSError."""
    path, start_time = stopping_file(server), begun(server)
    with suppress(FileNotFoundError):
        path.unlink()
    path.symlink_to(start_time)


def is_told_to_stop(server: int) -> bool:
    """Return whether the file exists and is of this server and this user.

    A file with another start time is of an earlier process with the same number. The start time is in ticks, because clocks
    may be set back.
    """
    path = stopping_file(server)
    with suppress(OSError):
        return path.lstat().st_uid == os.geteuid() and os.readlink(path) == begun(server)
    return False


def at_once(path: str, flags: int) -> int:
    """Open a file that another user may have made: follow no link, and do not wait for the writer of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def begun(pid: int) -> str:
    """Return when a process was started, in ticks since the machine started."""
    return stat_of(pid)[BEGUN]


def stat_of(pid: int) -> list[str]:
    """Return the fields of a process's `stat` file after its name: state, parent and so on, see proc(5).

    The name may be any bytes, and may be cut within a letter. Raises OSError if the process is gone.
    """
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()


def state_of(pid: int, since: str | None = None) -> str:
    """Return a process's state as a letter of proc(5): "X" if it is gone, "" if it did not start at `since`.

    Raises OSError if the system has no memory or files left to tell the state.
    """
    try:
        fields = stat_of(pid)
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return fields[0] if since in (None, fields[BEGUN]) else ""


def numbered(server: int) -> str:
    """Return a name of a process that is unique on the machine.

    Containers may share memory and folders, and each may have a process of the same number.
    """
    return f"{os.stat('/proc/self/ns/pid').st_ino}-{server}"
