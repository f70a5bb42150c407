"""A stage asks itself for nothing after a call that no other follows, where Triton bounds what waits."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from tests.waiting import until

BOUNDED = {"dynamic_batching": {"default_queue_policy": {"max_queue_size": 9}}}


class Triton:
    """Stands in for the module that only Triton's stubs have; `exec` of a request calls `answer`."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answer: Callable[[], Any] = lambda: SimpleNamespace(has_error=lambda: False)
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
    names = [f"hplm.triton.{name}" for name in ("translate", "waking")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    # From the package it would be the one that another test has left there.
    importlib.import_module("hplm.triton.translate")
    yield triton
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def make(triton: Triton) -> Iterator[Callable[..., Any]]:
    made = []

    def make(config: dict[str, Any] = BOUNDED) -> Any:
        args = {"model_name": "stage", "model_version": "3", "model_config": json.dumps(config)}
        made.append(importlib.import_module("hplm.triton.waking").Waker(args, {"TENANT": np.zeros((1, 1))}))
        return made[-1]

    yield make
    for waker in made:
        waker.stop()


def client() -> Any:
    return SimpleNamespace(request_id=lambda: "a client's")


def test_after_a_call_that_no_other_follows_the_model_is_asked_for_nothing(triton: Triton, make: Any) -> None:
    waker = make()
    assert waker.began([client(), client()]) == 2
    assert not triton.asked
    waker.ended(of_many=False)
    until(lambda: triton.asked)
    asked = triton.asked[0]
    assert (asked["model_name"], asked["model_version"], len(asked["inputs"])) == ("stage", 3, 1)
    # The stage knows it again.
    own = SimpleNamespace(request_id=lambda: asked["request_id"])
    assert waker.began([own, client()]) == 1
    assert waker.began([own]) == 0
    assert waker.counts["wakes"] >= 1
    assert waker.counts["failed_wakes"] == 0


def test_nothing_is_sent_while_a_call_lasts_nor_where_triton_takes_any_number(triton: Triton, make: Any) -> None:
    lasting, unbounded = make(), make({"dynamic_batching": {}})
    for waker in (lasting, unbounded):
        waker.began([client()])
        waker.ended(of_many=False)
        waker.began([client()])
    unbounded.ended(of_many=False)
    control = make()
    control.began([client()])
    control.ended(of_many=False)
    until(lambda: control.counts["wakes"] == 4)
    assert not lasting.counts["wakes"]
    assert not unbounded.counts["wakes"]


@pytest.mark.parametrize("how", ["raises", "answers"])
def test_what_fails_is_counted_and_said_once(triton: Triton, make: Any, how: str) -> None:
    def refuse() -> Any:
        if how == "raises":
            raise RuntimeError("no room")
        return SimpleNamespace(has_error=lambda: True, error=lambda: SimpleNamespace(message=lambda: "no room"))

    triton.answer = refuse
    waker = make()
    waker.began([client()])
    waker.ended(of_many=False)
    until(lambda: waker.counts["failed_wakes"] == 4)
    until(lambda: triton.log_info.called)
    triton.log_info.assert_called_once()
    assert "no room" in triton.log_info.call_args.args[0]


def test_one_that_is_not_answered_keeps_no_other_from_being_sent(triton: Triton, make: Any) -> None:
    is_over = threading.Event()

    def answer() -> Any:
        is_over.wait()
        return SimpleNamespace(has_error=lambda: False)

    triton.answer = answer
    waker = make()
    try:
        for _ in range(2):
            waker.began([client()])
            waker.ended(of_many=False)
            before = len(triton.asked)
            until(lambda before=before: len(triton.asked) > before)
    finally:
        is_over.set()
