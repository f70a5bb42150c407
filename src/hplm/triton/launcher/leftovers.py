"""What a Triton server has in temporary folders beside itself, and what servers that were killed have left there."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from hplm.runtime.process import BACKLOG, ENDED, SHARED_MEMORY, STOPPING, numbered, state_of

PREFIX = "hplm-triton-"
# In a server's folder: which process its Triton is, locked while one of the server's processes lives.
MARK = "server"
# A server that has not told its number yet may be about to.
YOUNG_S = 60.0
# Until a process that is killed has let go of its files.
ENDING_S = 0.2


def make_folder() -> tuple[Path, IO[str]]:
    """A folder for a server to come, and its mark: to be left open for Triton, and told its number (`tell`)."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    mark = (folder / MARK).open("w")
    # Without such locks nothing is swept there.
    with suppress(OSError):
        fcntl.flock(mark, fcntl.LOCK_EX)
    return folder, mark


def hold(folder: Path) -> int:
    """Keep a server's folder from being aged away: nothing there is touched for days, and a stage that is to be loaded again
    needs it. systemd leaves alone what lies in a locked folder. Returns the descriptor to close when the folder may go.
    """
    held = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return held


def hide(folder: Path) -> None:
    """What the server of a folder has in shared memory is nobody else's to read. boost, which makes it, heeds no umask."""
    for region in SHARED_MEMORY.glob(f"{glob.escape(folder.name)}.*"):
        with suppress(OSError):
            region.chmod(0o600)


def tell(mark: IO[str], server: int) -> None:
    """Which process it is."""
    mark.write(numbered(server))
    mark.flush()


def remove(folder: Path, server: int | None) -> None:
    """A server's folder, and what it has in shared memory, which is named after the folder or the process.

    None where another process has its number by now: what is named after that is not the server's.
    """
    _remove(folder, "" if server is None else numbered(server))


def sweep() -> None:
    """Remove what servers of this user left that were killed together with whoever ran them, and end what is left of them."""
    for mark in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{MARK}"):
        # Somebody else's, one that lives, or one that has not begun yet.
        with suppress(OSError, ValueError):
            if {mark.parent.lstat().st_uid, mark.lstat().st_uid} == {os.geteuid()} and not mark.parent.is_symlink():
                _sweep(mark)


def _sweep(mark: Path) -> None:
    with mark.open() as file:
        told = file.read()
        if not told and time.time() - mark.stat().st_mtime < YOUNG_S:
            return
        server = int(told.rpartition("-")[2]) if told else 0
        is_here = bool(told) and told == numbered(server)
        has_ended = not is_here or state_of(server) in ENDED
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not (is_here and has_ended):
                raise
            # Stubs of a Triton that is gone: as long as they live, and hold this, no other group has its number.
            os.killpg(server, signal.SIGKILL)
            time.sleep(ENDING_S)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Where another process has the number by now, what is named after it is that one's.
        _remove(mark.parent, told if has_ended else "")


def _remove(folder: Path, told: str) -> None:
    """A server's folder, what is named after it, and after the process where that is `told`."""
    _unlink(f"{glob.escape(folder.name)}.*")
    if told:
        _unlink(f"{BACKLOG}{glob.escape(told)}-*")
        # No pattern finds a link that leads nowhere.
        with suppress(OSError):
            (SHARED_MEMORY / f"{STOPPING}{told}").unlink()
    with suppress(OSError):
        for inside in folder.iterdir():
            # The mark last: without it nobody would find the folder again.
            if inside.name != MARK:
                shutil.rmtree(inside, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def _unlink(names: str) -> None:
    for left in SHARED_MEMORY.glob(names):
        # Also what another user has put there, for whatever reason.
        with suppress(OSError):
            left.unlink()
