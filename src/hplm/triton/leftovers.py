"""What a Triton server has in temporary folders beside itself, and what servers that were killed have left there."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

from hplm.process import SHARED_MEMORY, backlogs_of, stopping_file

PREFIX = "hplm-triton-"
# In a server's folder: the number of its Triton's process, locked while one of its processes lives.
MARK = "server"


def make_folder() -> tuple[Path, IO[str]]:
    """A folder for a server to come, and its mark: to be left open for Triton, and told its number (`tell`)."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    mark = (folder / MARK).open("w")
    fcntl.flock(mark, fcntl.LOCK_EX)
    return folder, mark


def tell(mark: IO[str], server: int) -> None:
    """Which process it is."""
    mark.write(str(server))
    mark.flush()


def remove(folder: Path, server: int) -> None:
    """A server's folder, and what it has in shared memory, which is named after the folder or the process."""
    for names in (f"{folder.name}.*", f"{backlogs_of(server)}*"):
        for left in SHARED_MEMORY.glob(names):
            # Also what another user has put there, for whatever reason.
            with suppress(OSError):
                left.unlink()
    with suppress(OSError):
        stopping_file(server).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Remove what servers of this user left that were killed together with whoever ran them."""
    for mark in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{MARK}"):
        # Somebody else's, one that lives, or one that has not begun yet.
        with suppress(OSError, ValueError):
            if mark.lstat().st_uid != os.geteuid():
                continue
            with mark.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(mark.parent, int(file.read()))
