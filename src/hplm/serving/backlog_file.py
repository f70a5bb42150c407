"""The file by which an encode stage tells earlier stages, in other processes, which requests wait in its queue."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path

from hplm.core.settings import parse_settings
from hplm.errors import ConfigError
from hplm.runtime.process import SHARED_MEMORY, at_once, backlogs_of
from hplm.scheduling.downstream_admission import Backlog, combine

# The server of this stub: its parent process when the stub starts.
SERVER = os.getppid()
# Seconds between two reads of the files.
READ_EVERY_S = 0.05
# A backlog older than this many seconds is ignored: its stage is stopped, or gone.
OLD_AFTER_S = 2.0
# A backlog older than this many seconds is removed, because each file takes time to read. Killed stages leave their files
# behind; a stage that lives writes its file again.
REMOVED_AFTER_S = 60.0


class BacklogFile:
    """The backlogs of encode stage number `stage` of one base of one store, in one server. Each process writes its own file.

    Only files of this process's user are read. Safe to read from several threads.
    """

    def __init__(self, store: Path, base: str, folder: Path = SHARED_MEMORY, *, stage: int = 1) -> None:
        name = hashlib.sha256(os.fsencode(f"{store}\0{base}\0{stage}")).hexdigest()[:16]
        self._folder = folder
        self._name = f"{backlogs_of(SERVER)}{name}"
        self._path = folder / f"{self._name}.{os.getpid()}.json"
        self._written = self._path.with_suffix(".new")
        self._logged: set[str] = set()
        self._read_s = -READ_EVERY_S
        self._last: Backlog | None = None

    def publish(self, backlog: Backlog) -> None:
        """Write this stage's backlog. If that fails, the log says so once, and earlier stages refuse nothing for it."""
        try:
            with open(self._written, "x", opener=_private) as file:
                json.dump(vars(backlog), file)
            self._written.replace(self._path)
        except OSError as error:
            with suppress(OSError):
                self._written.unlink()
            self._complain(self._path, "cannot be written", error)

    def read(self, now_s: float) -> Backlog | None:
        """Return the backlogs of all stages as one, read every 50 ms; None if no stage has published in the last seconds."""
        if now_s - self._read_s >= READ_EVERY_S:
            self._read_s = now_s
            try:
                paths = list(self._folder.glob(f"{self._name}.[0-9]*.json"))
            except OSError as error:
                # For example, this process may open no more files.
                self._complain(self._folder, "cannot be looked into", error)
                paths = []
            known = {path: backlog for path in paths if (backlog := self._read(path)) is not None}
            for path, backlog in known.items():
                if now_s - backlog.at_s > REMOVED_AFTER_S:
                    with suppress(OSError):
                        path.unlink()
            self._last = combine([backlog for backlog in known.values() if now_s - backlog.at_s <= OLD_AFTER_S])
        # Another thread may replace it meanwhile.
        last = self._last
        return last if last is not None and now_s - last.at_s <= OLD_AFTER_S else None

    def remove(self) -> None:
        """Remove this stage's file when the stage ends."""
        with suppress(OSError):
            self._path.unlink()

    def _read(self, path: Path) -> Backlog | None:
        try:
            with open(path, opener=at_once) as file:
                status = os.fstat(file.fileno())
                if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
                    raise PermissionError("another user wrote it, or it is no file")
                return parse_settings(Backlog, json.load(file), str(path))
        except FileNotFoundError:
            # The stage has just ended.
            return None
        except (OSError, ValueError, ConfigError) as error:
            self._complain(path, "cannot be read", error)
            return None

    def _complain(self, path: Path, fault: str, error: Exception) -> None:
        # Each fault once, because the files are read twenty times a second.
        if (message := f"{path} {fault} ({error})") not in self._logged:
            logging.getLogger(__name__).warning("%s: earlier stages do not go by it", message)
        self._logged.add(message)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
