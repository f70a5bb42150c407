"""What is asked of Triton about a request, and when."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from hplm import errors


class Request:
    """Stands in for Triton's request and for its sender: notes every call, and that it was asked after its end."""

    def __init__(self) -> None:
        self.asked_after_its_end = False
        self.sent = 0
        self._is_over = False

    def get_response_sender(self) -> Request:
        return self

    def is_cancelled(self) -> bool:
        time.sleep(1e-4)  # long enough for a last response to come in between
        self.asked_after_its_end |= self._is_over
        return False

    def send(self, response: Any, flags: int) -> None:
        self.sent += 1
        self._is_over = bool(flags)


@pytest.fixture
def translate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, over a stand-in for the one that only Triton's stubs have."""
    module: Any = ModuleType("triton_python_backend_utils")
    module.Logger = MagicMock()
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    module.TritonError = MagicMock()
    module.InferenceResponse = MagicMock()
    # Without room it takes no line either.
    module.Logger.log_error = MagicMock(side_effect=RuntimeError("no room"))
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", module)
    monkeypatch.delitem(sys.modules, "hplm.triton.translate", raising=False)
    yield importlib.import_module("hplm.triton.translate")
    sys.modules.pop("hplm.triton.translate", None)


def test_nobody_asks_about_a_request_that_has_had_its_last_response(translate: Any) -> None:
    requests = [Request() for _ in range(4)]
    asking, replies = [], []

    def submit(given: object, reply: Any, is_cancelled: Any) -> None:
        def ask() -> None:
            while not is_over.is_set():
                is_cancelled()
                time.sleep(1e-4)

        asking.append(threading.Thread(target=ask))
        replies.append(reply)

    is_over = threading.Event()
    translate.submit_all(requests, lambda request: request, submit, lambda request: lambda given, answer: answer)
    for thread in asking:
        thread.start()
    for reply in replies:
        reply("an answer")
    time.sleep(0.05)
    is_over.set()
    for thread in asking:
        thread.join()
    assert not any(request.asked_after_its_end for request in requests)


def test_what_is_refused_at_once_is_returned_and_never_sent_nor_asked_about_again(translate: Any) -> None:
    requests = [Request() for _ in range(3)]
    translate.pb_utils.InferenceResponse = lambda error: error
    translate.pb_utils.TritonError = MagicMock(side_effect=lambda message, code: message)
    replies: list[Any] = []

    def submit(given: Any, reply: Any, is_cancelled: Any) -> None:
        replies.append((reply, is_cancelled))
        if given is requests[1]:
            raise errors.QueueFullError("too many")

    found = translate.submit_all(requests, lambda one: one, submit, lambda one: lambda given, answer: answer)
    assert found == [None, errors.QueueFullError("too many").wire(), None]
    for reply, is_cancelled in replies:
        reply("an answer")
        is_cancelled()
    assert [request.sent for request in requests] == [1, 0, 1]
    assert not any(request.asked_after_its_end for request in requests)


class Deaf(Request):
    """Its sender fails, as where shared memory is full."""

    def send(self, response: Any, flags: int) -> None:
        self.sent += 1
        raise RuntimeError("no room")


@pytest.mark.parametrize("where", ["reading", "refusing", "submitting"])
def test_a_request_that_cannot_even_be_refused_ends_no_other_and_gets_no_second_answer(
    translate: Any, where: str
) -> None:
    deaf, good = Deaf(), Request()
    handed: list[Any] = []

    def read(request: Any) -> Any:
        if request is deaf and where == "reading":
            raise errors.EmptyTextError("nothing")
        return request

    def submit(given: Any, reply: Any, is_cancelled: Any) -> None:
        if given is deaf and where == "submitting":
            raise ZeroDivisionError
        if given is deaf:
            reply(errors.UnknownTenantError("nobody"))
        handed.append(given)

    translate.submit_all([deaf, good], read, submit, lambda request: lambda given, answer: answer)
    assert handed == [good]
    assert deaf.sent == 1
