"""Stages without Triton, and requests to them: each has one reply, whether it is refused at once or answered later."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from hplm.errors import HplmError
from hplm.serving.request import Client, Request


def never() -> bool:
    return False


class CallbackClient(Client[Any]):
    """A client of plain functions."""

    def __init__(
        self,
        reply: Callable[..., object],
        is_cancelled: Callable[[], bool] = never,
        is_over: Callable[[], bool] = never,
    ) -> None:
        self._reply = reply
        self._is_cancelled = is_cancelled
        self._is_over = is_over

    @property
    def is_over(self) -> bool:
        return self._is_over()

    def reply(self, answer: Any, *, is_last: bool = True) -> None:
        assert is_last
        self._reply(answer)

    def is_cancelled(self) -> bool:
        return self._is_cancelled()


class Stage(Protocol):
    submit: Callable[[Request[Any, Any]], None]
    start: Callable[[], None]
    stop: Callable[[], None]


AnyStage = TypeVar("AnyStage", bound=Stage)


class Started(ExitStack):
    """Stages that stop when a test is over."""

    def add(self, stage: AnyStage) -> AnyStage:
        stage.start()
        self.callback(stage.stop)
        return stage


def submit(stage: Stage, request: Request[Any, Any], reply: Callable[[Any], object]) -> None:
    """Submit a copy of a request as a backend does: the stage raises the error of a request that it refuses at once."""
    try:
        stage.submit(replace(request, client=CallbackClient(reply)))
    except HplmError as error:
        reply(error)
