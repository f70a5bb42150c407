"""What a Triton server has in temporary folders beside itself, and what servers that were killed have left there."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

from hplm.process import SHARED_MEMORY, backlogs_of, numbered, stopping_file

PREFIX = "hplm-triton-"
# In a server's folder: which process its Triton is, locked while one of the server's processes lives.
MARK = "server"


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


def remove(folder: Path, server: int) -> None:
    """A server's folder, and what it has in shared memory, which is named after the folder or the process."""
    _unlink(f"{glob.escape(folder.name)}.*", f"{backlogs_of(server)}*")
    # No pattern finds a link that leads nowhere.
    with suppress(OSError):
        stopping_file(server).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Remove what servers of this user left that were killed together with whoever ran them."""
    for mark in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{MARK}"):
        # Somebody else's, one that lives, or one that has not begun yet.
        with suppress(OSError, ValueError):
            if {mark.parent.lstat().st_uid, mark.lstat().st_uid} != {os.geteuid()} or mark.parent.is_symlink():
                continue
            with mark.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                told = file.read()
                server = int(told.rpartition("-")[2])
                if told == numbered(server) and not Path(f"/proc/{server}").exists():
                    remove(mark.parent, server)
                else:
                    # Of another container, or another process has the number by now.
                    _unlink(f"{glob.escape(mark.parent.name)}.*")
                    shutil.rmtree(mark.parent, ignore_errors=True)


def _unlink(*names: str) -> None:
    for name in names:
        for left in SHARED_MEMORY.glob(name):
            # Also what another user has put there, for whatever reason.
            with suppress(OSError):
                left.unlink()
