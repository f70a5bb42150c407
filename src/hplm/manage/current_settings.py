"""The manager's settings, read again when an export or a deletion of a base has written them anew."""

from __future__ import annotations

import threading
from pathlib import Path

from hplm.core.settings import ManagerSettings, load_settings
from hplm.errors import ConfigError
from hplm.runtime.rate_limited_log import log_rate_limited


class CurrentSettings:
    """The settings of a file as they are now. Call it for the settings; safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises ConfigError."""
        self._path = path
        self._lock = threading.Lock()
        self._read_of = self._state()
        self._settings = load_settings(ManagerSettings, path)

    def __call__(self) -> ManagerSettings:
        """Return the settings, read anew if the file has changed. A file that cannot be read leaves the last settings."""
        with self._lock:
            state = self._state()
            # An export replaces the whole repository. Where it cannot do so in one step, the file is away for a moment.
            if state not in (None, self._read_of):
                try:
                    self._settings = load_settings(ManagerSettings, self._path)
                except ConfigError as error:
                    log_rate_limited(f"the manager keeps its last settings: {error}")
                self._read_of = state
            return self._settings

    def _state(self) -> tuple[int, int, int] | None:
        """Return what changes when the file is written: its number, time and size. None if the file is away."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size
