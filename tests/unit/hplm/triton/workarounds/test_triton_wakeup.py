"""A stage has Triton look after a call that no other follows, where Triton bounds what waits, until it is no Triton we know."""

from __future__ import annotations

import importlib
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from tests.waiting import until

# As Triton has it: what is a long integer comes as a string.
POLICY = {"max_queue_size": 9, "allow_timeout_override": True, "default_timeout_microseconds": "1000000"}
SENT = 4  # after a call, where no answer comes


def answer(error: str | None) -> Any:
    return SimpleNamespace(has_error=lambda: error is not None, error=lambda: SimpleNamespace(message=lambda: error))


class Triton:
    """Stands in for the module that only Triton's stubs have; `exec` of a request calls `answer`."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answer: Callable[[], Any] = lambda: answer("[request id: x] Request timeout expired")
        self.log_info = MagicMock()
        module: Any = ModuleType("triton_python_backend_utils")
        module.Logger = SimpleNamespace(log_info=self.log_info)
        module.Tensor = lambda name, value: (name, value)
        module.InferenceRequest = self._request
        self.module = module

    def _request(self, **given: Any) -> Any:
        self.asked.append(given)
        return SimpleNamespace(exec=lambda: self.answer())


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[Triton]:
    triton = Triton()
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton.module)
    names = [f"hplm.triton.{name}" for name in ("bridge.translate", "workarounds.triton_wakeup")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    # From the package it would be the one that another test has left there.
    importlib.import_module("hplm.triton.bridge.translate")
    yield triton
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def make(triton: Triton) -> Iterator[Callable[..., Any]]:
    made = []

    def make(**policy: Any) -> Any:
        config = {"dynamic_batching": {"default_queue_policy": {**POLICY, **policy}}}
        args = {"model_name": "stage", "model_version": "3", "model_config": json.dumps(config)}
        made.append(
            importlib.import_module("hplm.triton.workarounds.triton_wakeup").TritonWakeup(
                args, {"TENANT": np.zeros((1, 1))}
            )
        )
        return made[-1]

    yield make
    for waker in made:
        waker.stop()


def call(waker: Any) -> None:
    waker.began()
    waker.ended(of_many=False)


def test_after_a_call_that_no_other_follows_the_model_gets_a_request_that_expires_at_once(
    triton: Triton, make: Any
) -> None:
    waker = make()
    waker.began()
    assert not triton.asked
    waker.ended(of_many=False)
    until(lambda: triton.asked)
    asked = triton.asked[0]
    assert (asked["model_name"], asked["model_version"], asked["timeout"]) == ("stage", 3, 1)
    assert len(asked["inputs"]) == 1
    assert waker.counts["failed_wakes"] == 0


def test_nothing_is_sent_while_a_call_lasts(triton: Triton, make: Any) -> None:
    triton.answer = lambda: answer("something else")
    lasting, ended = make(), make()
    call(lasting)
    lasting.began()
    before = lasting.counts["wakes"]
    call(ended)
    until(lambda: ended.counts["wakes"] == SENT)
    assert lasting.counts["wakes"] == before


@pytest.mark.parametrize(
    ("policy", "is_told"),
    [
        ({"max_queue_size": 0}, False),
        ({"allow_timeout_override": False}, True),
        ({"default_timeout_microseconds": 0}, True),
    ],
)
def test_nothing_is_sent_where_triton_keeps_nobody_nor_where_it_would_be_handed_over(
    triton: Triton, make: Any, policy: dict[str, Any], is_told: bool
) -> None:
    triton.answer = lambda: answer("something else")
    silent, control = make(**policy), make()
    call(silent)
    call(control)
    until(lambda: control.counts["wakes"] == SENT)
    assert not silent.counts["wakes"]
    assert triton.log_info.called == is_told


@pytest.mark.parametrize("error", [None, "BAD_TENANT_NAME: a stage's own words"])
def test_where_none_ever_expires_it_gives_up_and_says_so_once(triton: Triton, make: Any, error: str | None) -> None:
    triton.answer = lambda: answer(error)
    waker = make()
    while waker.counts["failed_wakes"] < 20:
        before = waker.counts["failed_wakes"]
        call(waker)
        until(lambda before=before: waker.counts["failed_wakes"] >= before + SENT)
    call(waker)
    until(lambda: triton.log_info.called)
    assert waker.counts["wakes"] == 20
    triton.log_info.assert_called_once()


def test_what_fails_for_a_while_is_tried_after_the_next_call_again(triton: Triton, make: Any) -> None:
    def fail() -> Any:
        raise RuntimeError("no room")

    waker = make()
    for number, triton.answer in enumerate((fail, lambda: answer("Server is stopping")) * 5, 1):
        call(waker)
        until(lambda number=number: waker.counts["failed_wakes"] == number * SENT)
    assert not triton.log_info.called


def test_where_no_thread_can_be_started_the_next_call_is_followed_by_a_look_all_the_same(
    triton: Triton, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waker = make()
    with monkeypatch.context() as broken:
        broken.setattr(threading.Thread, "start", MagicMock(side_effect=RuntimeError("can't start new thread")))
        call(waker)
        until(lambda: waker.counts["failed_wakes"] == SENT)
    # Else `stop` would wait for what was never sent.
    assert not waker._waiting
    call(waker)
    until(lambda: triton.asked)


def test_where_there_is_no_place_for_another_triton_is_asked_again_and_nothing_has_failed(
    triton: Triton, make: Any
) -> None:
    triton.answer = lambda: answer("Exceeds maximum queue size")
    waker = make()
    call(waker)
    until(lambda: waker.counts["wakes"] == SENT)
    assert not waker.counts["failed_wakes"]


def test_it_knows_since_when_its_oldest_request_waits(triton: Triton, make: Any) -> None:
    may_end = threading.Event()

    def waiting() -> Any:
        assert may_end.wait(60)
        return answer("[request id: x] Request timeout expired")

    triton.answer = waiting
    waker = make()
    assert waker.oldest_s == math.inf
    before_s = time.monotonic()
    call(waker)
    until(lambda: len(triton.asked) == SENT)
    oldest_s = waker.oldest_s
    assert before_s <= oldest_s <= time.monotonic()
    may_end.set()
    until(lambda: waker.oldest_s == math.inf)


def test_one_that_is_never_answered_does_not_make_all_who_come_later_look_old(
    triton: Triton, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    triton.answer = lambda: answer(None if may_end.wait(60) else "late")
    waker = make()
    monkeypatch.setattr(sys.modules["hplm.triton.workarounds.triton_wakeup"], "LOST_AFTER_S", 0.2)
    call(waker)
    until(lambda: len(triton.asked) == SENT)
    until(lambda: waker.oldest_s == math.inf)
    assert waker._unanswered
    may_end.set()


def test_a_call_that_ends_while_a_later_look_is_due_has_its_own_soon(triton: Triton, make: Any) -> None:
    triton.answer = lambda: answer("something else")
    waker = make()
    waker._wakes.due_s = time.monotonic() + 3600.0
    with waker._changed:
        waker._changed.notify_all()
    time.sleep(0.05)
    call(waker)
    until(lambda: triton.asked)


def test_one_that_is_not_answered_keeps_no_other_from_being_sent(triton: Triton, make: Any) -> None:
    is_over = threading.Event()

    def wait() -> Any:
        is_over.wait()
        return answer("Request timeout expired")

    triton.answer = wait
    waker = make()
    try:
        for _ in range(2):
            before = len(triton.asked)
            call(waker)
            until(lambda before=before: len(triton.asked) >= before + SENT)
    finally:
        is_over.set()


def test_it_ends_while_it_waits_and_with_one_that_is_never_answered(
    triton: Triton, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle, waiting = make(), make()
    monkeypatch.setattr(sys.modules["hplm.triton.workarounds.triton_wakeup"], "STOP_S", 0.1)
    is_over = threading.Event()
    triton.answer = lambda: is_over.wait() and answer("Request timeout expired")
    call(waiting)
    until(lambda: triton.asked)
    try:
        for waker in (idle, waiting):
            waker.stop()
            # It may be late, but needs no answer to end.
            waker._thread.join(30)
            assert not waker._thread.is_alive()
    finally:
        is_over.set()
