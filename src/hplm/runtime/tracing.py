"""Spans of what a process did when, for a picture of the pipeline (HMI Fig. 17). One JSON line a span.

Times are of the machine's monotonic clock, so the files of several processes can be laid side by side.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

_NOTHING = nullcontext()


class Tracer:
    """Writes spans to a file; without a path it does nothing."""

    def __init__(self, path: Path | None, process: str) -> None:
        self._process = process
        # Line by line: a process that is killed loses nothing but its last span.
        self._file = path.open("a", buffering=1) if path is not None else None
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        return self._file is not None

    def span(self, name: str, **about: Any) -> AbstractContextManager[None]:
        """What happens in the block, on the calling thread."""
        return self._timed(name, about) if self.is_on else _NOTHING

    @contextmanager
    def _timed(self, name: str, about: dict[str, Any]) -> Iterator[None]:
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            line = {
                "name": name,
                "process": self._process,
                "pid": os.getpid(),
                "thread": threading.current_thread().name,
                "start_us": start_ns / 1000,
                "duration_us": (time.monotonic_ns() - start_ns) / 1000,
                "about": about,
            }
            with self._lock:
                if self._file is not None:
                    try:
                        self._file.write(json.dumps(line) + "\n")
                    except OSError as error:
                        # What is timed goes on.
                        logging.getLogger(__name__).error("%s is written no more: %s", self._file.name, error)
                        self._end()

    def close(self) -> None:
        """Spans that end later are lost."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._file is not None:
            # It tries once more to write what it could not.
            with suppress(OSError):
                self._file.close()
            self._file = None
