"""Requests to a stage without Triton: whether refused at once or answered later, each has one reply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from hplm.errors import HplmError


class Stage(Protocol):
    submit: Callable[..., None]


def submit(stage: Stage, given: Any, reply: Callable[[Any], object], *is_cancelled: Callable[[], bool]) -> None:
    """As a backend does: what the stage refuses at once it raises, and never replies."""
    try:
        stage.submit(given, reply, *is_cancelled)
    except HplmError as error:
        reply(error)
