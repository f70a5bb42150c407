"""Waiting in tests for what other processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Return as soon as `condition()` holds."""
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, f"did not happen in {seconds:g} s"
        time.sleep(0.02)
