"""Asking again where the server cannot answer for a moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from hplm.errors import HplmError, InternalError

Answer = TypeVar("Answer")
PATIENCE_S = 30.0
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0


def passes(error: HplmError) -> bool:
    """Whether the same request may be answered soon: the server is starting, full, or restarting a part of itself."""
    return error.status == "UNAVAILABLE" or isinstance(error, InternalError)


def patiently(
    ask: Callable[[], Answer],
    patience_s: float = PATIENCE_S,
    passes: Callable[[HplmError], bool] = passes,
    *,
    least: int = 1,
) -> Answer:
    """Ask until there is an answer or an error that stays; for requests that change nothing when they come twice.

    At `least` so often, however long each took to fail.
    """
    deadline_s, pause_s = time.monotonic() + patience_s, FIRST_PAUSE_S
    while True:
        try:
            return ask()
        except HplmError as error:
            least -= 1
            if not passes(error) or (least <= 0 and time.monotonic() + pause_s > deadline_s):
                raise
        time.sleep(pause_s)
        pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
