"""A process's tie to whoever started it, and its place behind those beside it."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

from hplm.errors import StartError

PR_SET_PDEATHSIG = 1
SHARED_MEMORY = Path("/dev/shm")
# How names there begin, before a Triton process's (`numbered`).
BACKLOG, STOPPING = "hplm-backlog-", "hplm-stopping-"
# Some libraries have a table of as many entries as there may be files, of a limit of a thousand million too.
MOST_FILES = 65_536
# States of a process that has ended: nobody has asked yet how, or it is gone.
ENDED = ("Z", "X")
# Its place in `stat_of`.
BEGUN = 19
# Loaded here, not between a fork and its exec.
_LIBC = ctypes.CDLL(None)


def end_with_parent(parent: int) -> None:
    """Have the system send SIGTERM to this process when `parent` is gone. Raises StartError where it is gone already."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise StartError(f"process {parent}, which this one should end with, is gone")


def stack_limits(wanted_bytes: int) -> tuple[int, int] | None:
    """Limits with which threads of a process to start have stacks of so much address space; None where the system forbids it.

    Only what is touched takes memory; but a system that does not overcommit would count all of it.
    """
    with suppress(OSError):
        if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
            return None
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    return None if hard != resource.RLIM_INFINITY and hard < wanted_bytes else (wanted_bytes, hard)


def file_limits() -> tuple[int, int]:
    """Limits with which a process may have as many files and connections open as the system lets it, 65,536 at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    return (soft if soft == resource.RLIM_INFINITY else max(soft, most)), hard


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
    return f"{BACKLOG}{numbered(server)}-"


def stopping_file(server: int) -> Path:
    """The file in shared memory by which whoever runs a Triton process tells its stubs that it is about to end it.

    Triton itself tells them when no request is under way any more, which under load is never.
    """
    return SHARED_MEMORY / f"{STOPPING}{numbered(server)}"


def tell_to_stop(server: int) -> None:
    """Put the file there: a link to when the server was started, which needs no memory that may be full. Raises OSError."""
    path, when = stopping_file(server), begun(server)
    with suppress(FileNotFoundError):
        path.unlink()
    path.symlink_to(when)


def is_told_to_stop(server: int) -> bool:
    """Whether the file is there, and of this server. Only our own user's word counts.

    Another one's was for a process of the same number, whose launcher was killed as it ended that one. Clocks are not asked:
    they may be set back.
    """
    path = stopping_file(server)
    with suppress(OSError):
        return path.lstat().st_uid == os.geteuid() and os.readlink(path) == begun(server)
    return False


def at_once(path: str, flags: int) -> int:
    """To open whatever another user may have put there: no link is followed, and a pipe would wait for who writes to it."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def begun(pid: int) -> str:
    """When a process was started, in ticks since the machine was."""
    return stat_of(pid)[BEGUN]


def stat_of(pid: int) -> list[str]:
    """What the system tells of a process behind its name, state and parent first: proc(5). Raises OSError where it is gone.

    The name may be any bytes, cut within a letter too.
    """
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()


def state_of(pid: int, since: str | None = None) -> str:
    """A process's state as a letter of proc(5), "X" where it is gone, "" where it is not the one that has `begun` then.

    Raises OSError where the system has no memory or files to tell it.
    """
    try:
        told = stat_of(pid)
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return told[0] if since in (None, told[BEGUN]) else ""


def numbered(server: int) -> str:
    """A process's name among all: containers may share memory and folders, and each has a process of the same number."""
    return f"{os.stat('/proc/self/ns/pid').st_ino}-{server}"
