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


@pytest.fixture
def plain(translate: Any) -> Any:
    """Responses are what they are made of."""
    translate.pb_utils.InferenceResponse = lambda error: error
    translate.pb_utils.TritonError = MagicMock(side_effect=lambda message, code: message)
    return translate


Submitted = list[tuple[Any, Any]]


def submit_all(translate: Any, requests: list[Any], refused: Any = None, **given: Any) -> tuple[Any, Submitted]:
    """What `execute` would return, and how each request's answer can be given and its client be asked for."""
    handed: Submitted = []

    def submit(one: Any, reply: Any, is_cancelled: Any) -> None:
        handed.append((reply, is_cancelled))
        if one is refused:
            raise errors.QueueFullError("too many")

    def write(one: Any, answer: Any) -> Any:
        return answer

    return translate.submit_all(requests, lambda one: one, submit, lambda one: write, **given), handed


def test_what_is_refused_at_once_is_returned_and_never_sent_nor_asked_about_again(plain: Any) -> None:
    requests = [Request() for _ in range(3)]
    found, handed = submit_all(plain, requests, refused=requests[1], hold_s=0.0)
    assert found == [None, errors.QueueFullError("too many").wire(), None]
    for reply, is_cancelled in handed:
        reply("an answer")
        is_cancelled()
    assert [request.sent for request in requests] == [1, 0, 1]
    assert not any(request.asked_after_its_end for request in requests)


def test_answers_that_come_while_a_call_is_held_leave_with_it_once(plain: Any) -> None:
    requests = [Request() for _ in range(3)]
    handed: Submitted = []

    def submit(one: Any, reply: Any, is_cancelled: Any) -> None:
        handed.append((reply, is_cancelled))

    def answer_two() -> None:
        while len(handed) < 3:
            time.sleep(1e-3)
        for reply, is_cancelled in handed[:2]:
            for answer in ("the answer", "another"):
                reply(answer)
                is_cancelled()

    threading.Thread(target=answer_two).start()
    found = plain.submit_all(requests, lambda one: one, submit, lambda one: lambda given, answer: answer, hold_s=0.5)
    assert found == ["the answer", "the answer", None]
    handed[2][0]("too late for the call")
    assert [request.sent for request in requests] == [0, 0, 1]
    assert not any(request.asked_after_its_end for request in requests)


def test_a_held_call_ends_when_all_are_answered(plain: Any) -> None:
    requests = [Request()]

    def submit(one: Any, reply: Any, is_cancelled: Any) -> None:
        threading.Timer(0.05, reply, ["the answer"]).start()

    # Held for as long as this it would not end.
    found = plain.submit_all(requests, lambda one: one, submit, lambda one: lambda given, answer: answer, hold_s=1e6)
    assert found == ["the answer"]


def test_a_call_that_is_not_held_returns_nothing_not_even_what_is_refused_at_once(plain: Any) -> None:
    requests = [Request() for _ in range(2)]
    found, handed = submit_all(plain, requests, refused=requests[1])
    assert found is None
    handed[0][0]("an answer")
    assert [request.sent for request in requests] == [1, 1]


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
