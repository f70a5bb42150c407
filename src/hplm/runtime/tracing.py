"""Spans of a process's work, for a picture of the pipeline (HMI Fig. 17). Each span is one JSON line.

Times are on the machine's monotonic clock, so that the files of several processes can be compared.
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
    """Writes spans to a file. Without a path it does nothing."""

    def __init__(self, path: Path | None, process: str) -> None:
        self._process = process
        # Written line by line, so that a killed process loses only its last span.
        self._file = path.open("a", buffering=1) if path is not None else None
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        return self._file is not None

    def span(self, name: str, **details: Any) -> AbstractContextManager[None]:
        """Record the block as a span of the calling thread."""
        return self._timed(name, details) if self.is_on else _NOTHING

    @contextmanager
    def _timed(self, name: str, details: dict[str, Any]) -> Iterator[None]:
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
                "about": details,
            }
            with self._lock:
                if self._file is not None:
                    try:
                        self._file.write(json.dumps(line) + "\n")
                    except OSError as error:
                        # The traced work goes on.
                        logging.getLogger(__name__).error("%s gets no further spans: %s", self._file.name, error)
                        self._end()

    def close(self) -> None:
        """Close the file. Spans that end later are lost."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._file is not None:
            # Closing tries once more to write what could not be written.
            with suppress(OSError):
                self._file.close()
            self._file = None
