"""How a stage tells the stage before it what waits: a small file in memory, for they are two processes."""

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

# As a stub starts: the server that it belongs to.
SERVER = os.getppid()
READ_EVERY_S = 0.05
# A stage that says nothing for so long is stopped, or gone.
OLD_AFTER_S = 2.0
# What a stage that was killed left is removed: each file takes its time to read. One that lives writes it anew.
REMOVED_AFTER_S = 60.0


class BacklogFile:
    """Of the stages of one server that serve one base of one store, each its own. Only the user who writes it is believed."""

    def __init__(self, store: Path, base: str, folder: Path = SHARED_MEMORY) -> None:
        name = hashlib.sha256(f"{store}\0{base}".encode()).hexdigest()[:16]
        self._folder = folder
        self._name = f"{backlogs_of(SERVER)}{name}"
        self._path = folder / f"{self._name}.{os.getpid()}.json"
        self._written = self._path.with_suffix(".new")
        self._said: set[str] = set()
        self._read_s = -READ_EVERY_S
        self._last: Backlog | None = None

    def publish(self, backlog: Backlog) -> None:
        """Tell it. Where it cannot be written, that is logged once: the stage before then refuses nothing for this one."""
        try:
            with open(self._written, "x", opener=_private) as file:
                json.dump(vars(backlog), file)
            self._written.replace(self._path)
        except OSError as error:
            with suppress(OSError):
                self._written.unlink()
            self._complain(self._path, "cannot be written", error)

    def read(self, now_s: float) -> Backlog | None:
        """What was told last, of all stages together, looked at every 50 ms; None where nothing was told of late."""
        if now_s - self._read_s >= READ_EVERY_S:
            self._read_s = now_s
            try:
                paths = list(self._folder.glob(f"{self._name}.[0-9]*.json"))
            except OSError as error:
                # As where no more files may be open.
                self._complain(self._folder, "cannot be looked into", error)
                paths = []
            told = {path: self._read(path) for path in paths}
            for path, one in told.items():
                if one is not None and now_s - one.at_s > REMOVED_AFTER_S:
                    with suppress(OSError):
                        path.unlink()
            self._last = combine([one for one in told.values() if one is not None and now_s - one.at_s <= OLD_AFTER_S])
        # Several threads read.
        last = self._last
        return last if last is not None and now_s - last.at_s <= OLD_AFTER_S else None

    def remove(self) -> None:
        """At the end of the stage that tells."""
        with suppress(OSError):
            self._path.unlink()

    def _read(self, path: Path) -> Backlog | None:
        try:
            with open(path, opener=at_once) as file:
                about = os.fstat(file.fileno())
                if about.st_uid != os.geteuid() or not stat.S_ISREG(about.st_mode):
                    raise PermissionError("another user wrote it, or it is no file")
                return parse_settings(Backlog, json.load(file), str(path))
        except FileNotFoundError:
            # Its stage has just ended.
            return None
        except (OSError, ValueError, ConfigError) as error:
            self._complain(path, "cannot be read", error)
            return None

    def _complain(self, path: Path, what: str, error: Exception) -> None:
        # Each fault once: it is looked at twenty times a second.
        if (said := f"{path} {what} ({error})") not in self._said:
            logging.getLogger(__name__).warning("%s: the look-up stage does not go by it", said)
        self._said.add(said)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
