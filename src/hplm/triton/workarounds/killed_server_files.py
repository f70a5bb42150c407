"""A killed Triton leaves its files in /dev/shm, and its launcher's files in the temporary folder.

Behaviour: after SIGKILL nobody removes the shared memory of the stages.
Releases: 24.10; 26.09 cleans /dev/shm at a forced shutdown (read in its notes, not tried; SIGKILL leaves it no time).
Workaround: each server has a temporary folder, and its shared memory is named after the folder. A later start removes what
dead servers of the same user left (`sweep`), and `surviving_stubs` does so for a server that is killed with its launcher.
Switched off: harmless; only files that exist are removed.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from hplm.runtime.process import BACKLOG, ENDED, SHARED_MEMORY, STOPPING, numbered, state_of

PREFIX = "hplm-triton-"
# A file in a server's folder with the name of its Triton process (`numbered`). It is locked while a process of the server
# lives.
MARK = "server"
# Seconds that a server may take to write its name; a folder without a name is then removed.
YOUNG_S = 60.0
# Seconds until a killed process has closed its files.
ENDING_S = 0.2


def make_folder() -> tuple[Path, IO[str]]:
    """Make a folder for a new server and its mark, which Triton inherits and `write_name` fills."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    mark = (folder / MARK).open("w")
    # On a file system without locks nothing is swept.
    with suppress(OSError):
        fcntl.flock(mark, fcntl.LOCK_EX)
    return folder, mark


def flags(folder: Path, backends: Sequence[str]) -> list[str]:
    """Return flags for `tritonserver` that name the shared memory of each backend after the server's folder."""
    return [f"--backend-config={backend},shm-region-prefix-name={folder.name}." for backend in backends]


def lock_folder(folder: Path) -> int:
    """Lock a server's folder against systemd, which removes old temporary files but skips locked folders.

    No file in the folder may be touched for days, and a stage that is loaded again needs them. Return the descriptor; close
    it when the folder may go.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def hide_shared_memory(folder: Path) -> None:
    """Make the shared memory of a folder's server unreadable for other users. Triton makes it without heeding the umask."""
    for region in SHARED_MEMORY.glob(f"{glob.escape(folder.name)}.*"):
        with suppress(OSError):
            region.chmod(0o600)


def write_name(mark: IO[str], server: int) -> None:
    """Write into the mark which process the server is."""
    mark.write(numbered(server))
    mark.flush()


def remove(folder: Path, name: str) -> None:
    """Remove a server's folder and its files in shared memory, which are named after the folder or after the process.

    `name` is the process's (`numbered`), "" if another process has its number by now and files of that name.
    """
    _unlink(f"{glob.escape(folder.name)}.*")
    if name:
        _unlink(f"{BACKLOG}{glob.escape(name)}-*")
        # A pattern does not find this file, because it is a link to nothing.
        with suppress(OSError):
            (SHARED_MEMORY / f"{STOPPING}{name}").unlink()
    with suppress(OSError):
        for path in folder.iterdir():
            # The mark goes last, because a folder without it is never found again.
            if path.name != MARK:
                shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Remove the files of this user's servers that were killed with their launcher, and kill their stubs."""
    for mark in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{MARK}"):
        # An error means that the folder is another user's, or that its server lives or is about to start.
        with suppress(OSError, ValueError):
            if {mark.parent.lstat().st_uid, mark.lstat().st_uid} == {os.geteuid()} and not mark.parent.is_symlink():
                _sweep(mark)


def _sweep(mark: Path) -> None:
    with mark.open() as file:
        name = file.read()
        if not name and time.time() - mark.stat().st_mtime < YOUNG_S:
            return
        server = int(name.rpartition("-")[2]) if name else 0
        is_of_this_namespace = bool(name) and name == numbered(server)
        has_ended = not is_of_this_namespace or state_of(server) in ENDED
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not (is_of_this_namespace and has_ended):
                raise
            # Stubs of a dead Triton hold the lock. While they live, no other process group has its number.
            os.killpg(server, signal.SIGKILL)
            time.sleep(ENDING_S)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # If another process has the number by now, files named after the number are that process's.
        remove(mark.parent, name if has_ended else "")


def _unlink(pattern: str) -> None:
    for path in SHARED_MEMORY.glob(pattern):
        # Another user may own a file of such a name.
        with suppress(OSError):
            path.unlink()
