"""Requests are answered once, answers leave together, and Triton is never asked about a finished request."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from hplm import errors
from hplm.triton.workarounds.full_shared_memory import LEAST_ROOM, MOST_BYTES


class Request:
    """Stands in for Triton's request and its sender. It notes every call, and whether it was asked after its end."""

    def __init__(self) -> None:
        self.asked_after_its_end = False
        self.sent = 0
        self.is_over = False

    def get_response_sender(self) -> Request:
        return self

    def is_cancelled(self) -> bool:
        time.sleep(1e-4)  # long enough for a last response to come in between
        self.asked_after_its_end |= self.is_over
        return False

    def send(self, response: Any, flags: int) -> None:
        self.sent += 1
        self.is_over = bool(flags)


@pytest.fixture
def translate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module over a stand-in for the Python module that only Triton's stubs have."""
    module: Any = ModuleType("triton_python_backend_utils")
    module.Logger = MagicMock()
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    module.TritonError = MagicMock()
    module.InferenceResponse = MagicMock()
    # Without room in shared memory the log takes no line either.
    module.Logger.log_error = MagicMock(side_effect=RuntimeError("no room"))
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", module)
    names = ("hplm.triton.bridge.translate", "hplm.triton.workarounds.finished_requests")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(names[0])
    for name in names:
        sys.modules.pop(name, None)


def test_nobody_asks_about_a_request_that_has_had_its_last_response(translate: Any) -> None:
    requests = [Request() for _ in range(4)]
    asking, replies = [], []

    def submit(given: object, client: Any) -> None:
        def ask() -> None:
            while not is_over.is_set():
                client.is_cancelled()
                time.sleep(1e-4)

        asking.append(threading.Thread(target=ask))
        replies.append(client.reply)

    is_over = threading.Event()
    translate.submit_all(
        requests, lambda request: request, submit, lambda request: lambda answer: answer, lambda refused: None
    )
    for thread in asking:
        thread.start()
    for reply in replies:
        reply("an answer")
    time.sleep(0.05)
    is_over.set()
    for thread in asking:
        thread.join()
    assert not any(request.asked_after_its_end for request in requests)


@dataclass(frozen=True)
class Response:
    """Stands in for a response with an answer or an error; `size` is its bytes of shared memory."""

    answer: Any
    size: int = 1

    def output_tensors(self) -> list[Any]:
        return [SimpleNamespace(as_numpy=lambda: np.zeros(self.size, dtype=np.uint8))]


REFUSED = "too many"
Handed = list[tuple[Any, Any]]


@pytest.fixture
def plain(translate: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module with errors as plain messages and with room in shared memory."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2 * LEAST_ROOM))
    translate.pb_utils.InferenceResponse = lambda error: Response(error)
    translate.pb_utils.TritonError = MagicMock(side_effect=lambda message, code: message)
    return translate


def call(
    translate: Any, requests: list[Any], then: Callable[[Handed], None] = lambda _: None, **given: Any
) -> tuple[Any, Handed]:
    """Return the result of `execute` and the requests that were submitted. A thread calls `then` after all submissions.

    A request of 2 is refused.
    """
    handed: Handed = []
    is_handed_over = threading.Event()

    def submit(one: Any, client: Any) -> None:
        handed.append((client.reply, client.is_cancelled))
        if len(handed) == len(requests):
            is_handed_over.set()
        if one is requests[1]:
            raise errors.QueueFullError(REFUSED)

    def answer_all() -> None:
        is_handed_over.wait()
        then(handed)

    thread = threading.Thread(target=answer_all)
    thread.start()
    found = translate.submit_all(
        requests,
        lambda one: one,
        submit,
        lambda one: lambda answer: Response(*answer),
        lambda refused: None,
        **given,
    )
    thread.join()
    for request, response in zip(requests, found or [None] * len(requests), strict=True):
        request.is_over |= response is not None
    return found, handed


def replied(*given: Any, to: slice = slice(None)) -> Callable[[Handed], None]:
    """Return a function that answers the requests `to`, each twice."""

    def reply_to(handed: Handed) -> None:
        for reply, is_cancelled in handed[to]:
            for _ in range(2):
                reply(given)
                is_cancelled()

    return reply_to


def test_what_is_refused_at_once_leaves_with_the_call_and_is_never_sent_nor_asked_about_again(plain: Any) -> None:
    requests = [Request() for _ in range(3)]
    found, handed = call(plain, requests, hold_s=0.0)
    assert found == [None, Response(errors.QueueFullError(REFUSED).wire()), None]
    replied("an answer")(handed)
    assert [request.sent for request in requests] == [1, 0, 1]
    assert not any(request.asked_after_its_end for request in requests)


def test_answers_that_come_while_a_call_is_held_leave_with_it_once(plain: Any) -> None:
    requests = [Request() for _ in range(3)]
    found, handed = call(plain, requests, replied("an answer", to=slice(1)), hold_s=3.0)
    assert found == [Response("an answer"), Response(errors.QueueFullError(REFUSED).wire()), None]
    replied("too late for the call")(handed)
    assert [request.sent for request in requests] == [0, 0, 1]
    assert not any(request.asked_after_its_end for request in requests)


def test_a_held_call_ends_when_all_are_answered(plain: Any) -> None:
    # A call that was held so long would not end.
    found, _ = call(plain, [Request() for _ in range(3)], replied("an answer"), hold_s=1e6)
    assert found == [Response("an answer"), Response(errors.QueueFullError(REFUSED).wire()), Response("an answer")]


def test_what_has_left_with_a_call_is_not_kept_by_those_who_still_wait(plain: Any) -> None:
    found, handed = call(plain, [Request() for _ in range(3)], replied("an answer", to=slice(1)), hold_s=3.0)
    left = weakref.ref(found[0])
    del found
    assert left() is None
    assert len(handed) == 3


def test_a_call_that_takes_no_answers_returns_nothing_not_even_what_is_refused_at_once(plain: Any) -> None:
    requests = [Request() for _ in range(3)]
    found, handed = call(plain, requests)
    assert found is None
    replied("an answer")(handed)
    assert [request.sent for request in requests] == [1, 1, 1]


def test_no_more_than_so_many_bytes_leave_with_a_call(plain: Any) -> None:
    requests = [Request() for _ in range(4)]
    large = MOST_BYTES // 2
    found, _ = call(plain, requests, replied("a long one", large), hold_s=1e6)
    assert [response is not None for response in found] == [True, True, False, False]
    assert [request.sent for request in requests] == [0, 0, 1, 1]


def test_where_shared_memory_is_nearly_full_each_answer_is_sent_by_itself(
    plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=LEAST_ROOM))
    requests = [Request() for _ in range(3)]
    found, _ = call(plain, requests, replied("an answer"), hold_s=1e6)
    assert found is None
    assert [request.sent for request in requests] == [1, 1, 1]


class Deaf(Request):
    """A request whose sender fails, as with full shared memory."""

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

    def submit(given: Any, client: Any) -> None:
        if given is deaf and where == "submitting":
            raise ZeroDivisionError
        if given is deaf:
            client.reply(errors.UnknownTenantError("nobody"))
        handed.append(given)

    translate.submit_all([deaf, good], read, submit, lambda request: lambda answer: answer, lambda refused: None)
    assert handed == [good]
    assert deaf.sent == 1


def test_an_answer_that_cannot_be_written_is_an_error_and_whoever_gave_it_hears_of_it(plain: Any) -> None:
    request = Request()
    replies: list[Any] = []

    def write(answer: Any) -> Any:
        raise MemoryError("no room in /dev/shm")

    plain.submit_all(
        [request], lambda one: one, lambda given, client: replies.append(client.reply), lambda one: write, print
    )
    with pytest.raises(MemoryError):
        replies[0]("an answer")
    assert (request.sent, request.is_over) == (1, True)


def test_what_is_refused_without_the_stage_is_told_to_be_counted(translate: Any) -> None:
    unreadable, no_texts, failing, refused, good = requests = [Request() for _ in range(5)]
    counted: list[str] = []

    def read(request: Any) -> Any:
        if request is unreadable:
            raise ZeroDivisionError
        if request is no_texts:
            raise errors.HiddenStatesError("none")
        return request

    def submit(given: Any, client: Any) -> None:
        if given is failing:
            raise ZeroDivisionError
        if given is refused:
            # The stage has counted this error.
            raise errors.QueueFullError(REFUSED)
        client.reply("an answer")

    def writer(request: Any) -> Any:
        return lambda answer: answer

    translate.submit_all(requests, read, submit, writer, lambda error: counted.append(error.code))
    assert counted == ["BAD_INPUT", "BAD_HIDDEN_STATES", "INTERNAL"]
    assert all(request.sent == 1 for request in requests)
    assert good.is_over


@pytest.mark.parametrize(
    ("batching", "size"),
    [
        ({}, 0),
        ({"dynamic_batching": {}}, 0),
        ({"dynamic_batching": {"default_queue_policy": {"max_queue_size": 9}}}, 9),
    ],
)
def test_how_many_may_wait_in_triton_is_of_the_models_config(translate: Any, batching: Any, size: int) -> None:
    assert translate.queue_size({"model_config": json.dumps(batching)}) == size


def test_a_model_that_another_version_exported_is_refused_with_what_to_do(translate: Any) -> None:
    def args_of(*names: str) -> dict[str, str]:
        tensors = [{"name": name} for name in names]
        return {"model_name": "hbert_plot", "model_config": json.dumps({"input": tensors[:1], "output": tensors[1:]})}

    translate.check_tensors(args_of("TEXT", "REQUEST_META"), ["TEXT", "REQUEST_META"])
    with pytest.raises(
        errors.ConfigError,
        match=r"hbert_plot has no tensor REQUEST_META.*`hplm build export --models MODELS --keep-settings ",
    ):
        translate.check_tensors(args_of("TEXT", "HIDDEN"), ["REQUEST_META"])


def test_a_response_holds_only_what_the_client_asked_for(translate: Any) -> None:
    translate.pb_utils.Tensor = lambda name, value: (name, value.tolist())
    translate.pb_utils.InferenceResponse = lambda output_tensors: output_tensors
    respond = translate.responder(SimpleNamespace(requested_output_names=lambda: ["LABEL", "LOGITS"]))
    outputs = {"LABEL": np.array([1]), "SPAN": np.array([2]), "LOGITS": np.array([3])}
    assert respond(outputs) == [("LABEL", [1]), ("LOGITS", [3])]
    assert respond({"SPAN": np.array([2])}) == []
