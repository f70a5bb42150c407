"""A client over gRPC waits a while for calls under way before it closes, because cancelled calls may crash Triton."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hplm_client import Client
from hplm_client import client as module


class Connection:
    """A stand-in for tritonclient's client."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Any, Any], None]] = []
        self.answered = 0
        self.answered_when_closed = -1

    def async_infer(self, model: str, inputs: Any, callback: Callable[[Any, Any], None], **_: Any) -> None:
        self.callbacks.append(callback)

    def answer(self) -> None:
        self.answered += 1
        self.callbacks.pop()("an answer", None)

    def close(self) -> None:
        self.answered_when_closed = self.answered


@pytest.mark.parametrize("are_answered", [True, False])
def test_calls_under_way_are_answered_before_the_connection_closes_or_given_up(
    monkeypatch: pytest.MonkeyPatch, are_answered: bool
) -> None:
    monkeypatch.setattr(module, "CLOSE_GRACE_S", 60.0 if are_answered else 0.05)
    client, connection = Client("grpc://127.0.0.1:1"), Connection()
    client._triton.close()
    client._triton = connection
    for _ in range(2):
        client._start([], client._call_options(False, None))
    answering = [threading.Timer(0.05, connection.answer) for _ in range(2 * are_answered)]
    for timer in answering:
        timer.start()
    client.close()
    assert connection.answered_when_closed == 2 * are_answered


def test_a_call_of_another_thread_is_answered_before_the_connection_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_GRACE_S", 60.0)
    client, connection = Client("grpc://127.0.0.1:1"), Connection()
    client._triton.close()
    client._triton = connection
    asked, may_answer = threading.Event(), threading.Event()

    def infer(*_: Any, **__: Any) -> None:
        asked.set()
        assert may_answer.wait(60)
        connection.answered += 1

    connection.infer = infer  # type: ignore[attr-defined]
    calling = threading.Thread(target=client._infer, args=(connection, [], client._call_options(False, None)))
    calling.start()
    assert asked.wait(60)
    threading.Timer(0.05, may_answer.set).start()
    client.close()
    calling.join()
    assert connection.answered_when_closed == 1
