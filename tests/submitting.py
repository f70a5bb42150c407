"""Stages without Triton, and requests to them: whether refused at once or answered later, each has one reply."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

from hplm.errors import HplmError


class Stage(Protocol):
    submit: Callable[..., None]
    start: Callable[[], None]
    stop: Callable[[], None]


AnyStage = TypeVar("AnyStage", bound=Stage)


class Started(ExitStack):
    """Stages that stop when a test is over."""

    def add(self, stage: AnyStage) -> AnyStage:
        stage.start()
        self.callback(stage.stop)
        return stage


def submit(stage: Stage, given: Any, reply: Callable[[Any], object], *is_cancelled: Callable[[], bool]) -> None:
    """As a backend does: what the stage refuses at once it raises, and never replies."""
    try:
        stage.submit(given, reply, *is_cancelled)
    except HplmError as error:
        reply(error)
