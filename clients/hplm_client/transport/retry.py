"""Retries of requests that the server cannot answer for a moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from hplm.errors import HplmError, InternalError

Answer = TypeVar("Answer")
# Seconds after which no new attempt begins; a restart of the server takes less.
RETRY_S = 30.0
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0


def is_temporary(error: HplmError) -> bool:
    """Return whether the same request may succeed soon: the server is starting, full, or restarting a part of itself."""
    return error.status == "UNAVAILABLE" or isinstance(error, InternalError)


def with_retries(
    ask: Callable[[], Answer],
    retry_s: float = RETRY_S,
    is_temporary: Callable[[HplmError], bool] = is_temporary,
    *,
    min_attempts: int = 1,
) -> Answer:
    """Return the answer of `ask`, called again for `retry_s` seconds while its error is temporary. Raises its last error.

    There are at least `min_attempts`, however long each took to fail. A request must do no harm if the server gets it twice.
    """
    deadline_s, pause_s, attempts = time.monotonic() + retry_s, FIRST_PAUSE_S, 0
    while True:
        try:
            return ask()
        except HplmError as error:
            attempts += 1
            is_late = time.monotonic() + pause_s > deadline_s
            if not is_temporary(error) or (attempts >= min_attempts and is_late):
                raise
        time.sleep(pause_s)
        pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
