"""Manage requests in threads: each answered once, slow ones apart from quick ones, bounded."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hplm import errors
from hplm.errors import HplmError
from hplm.manage.access import Caller
from hplm.serving import manage_stage
from hplm.serving.manage_stage import Lane, ManageCall, ManageStage
from hplm.serving.request import Request
from tests.submitting import CallbackClient, never

LANES = (Lane(100, threads=1, capacity=3), Lane(1000, threads=1, capacity=2))
LARGE = b"x" * 101


class Answers:
    """Collects what a stage answers."""

    def __init__(self) -> None:
        self.got: list[bytes | HplmError] = []
        self._came = threading.Condition()

    def __call__(self, answer: bytes | HplmError) -> None:
        with self._came:
            self.got.append(answer)
            self._came.notify()

    def wait(self, count: int) -> list[bytes | HplmError]:
        with self._came:
            assert self._came.wait_for(lambda: len(self.got) >= count, timeout=60)
            return self.got


class Service:
    """Answers with the length of a request; large requests wait until `gate` is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.is_at_gate = threading.Event()
        self.unread: list[tuple[str | None, str]] = []

    def admit(self, key: bytes) -> Caller:
        if key == b"wrong":
            raise errors.ForbiddenError("no")
        return Caller(key.decode())

    def note_unread(self, caller: Caller, error: HplmError) -> None:
        self.unread.append((caller.key_id, error.code))

    def handle(self, raw: bytes, caller: Caller) -> dict[str, Any]:
        if raw == b"who":
            return {"caller": caller.key_id}
        if len(raw) > 100:
            self.is_at_gate.set()
            assert self.gate.wait(60)
        if raw == b"unknown":
            raise errors.UnknownJobError("there is no job 'x'")
        if raw == b"half":
            return {"ok": True, "half": "\ud800"}
        if raw == b"broken":
            raise ZeroDivisionError
        if raw == b"panic":
            raise SystemExit
        return {"ok": True, "length": len(raw)}


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.gate.set()


@pytest.fixture
def stage(service: Service) -> Iterator[ManageStage]:
    made = ManageStage(service.handle, service.admit, service.note_unread, LANES)
    yield made
    service.gate.set()
    made.stop()


def ask(stage: ManageStage, raw: bytes, is_cancelled: Callable[[], bool] = never) -> Answers:
    answers = Answers()
    stage.submit(Request(ManageCall(raw), client=CallbackClient(answers, is_cancelled)))
    return answers


def test_a_request_is_answered_with_json(stage: ManageStage) -> None:
    (answer,) = ask(stage, b"hello").wait(1)
    assert json.loads(answer) == {"ok": True, "length": 5}  # type: ignore[arg-type]


def test_a_quick_request_overtakes_a_slow_one(stage: ManageStage, service: Service) -> None:
    slow = ask(stage, LARGE)
    ask(stage, b"hello").wait(1)
    assert not slow.got
    service.gate.set()
    assert len(slow.wait(1)) == 1


def test_beyond_its_capacity_a_lane_refuses_at_once(stage: ManageStage) -> None:
    for _ in range(LANES[1].capacity):
        ask(stage, LARGE)
    (answer,) = ask(stage, LARGE).got
    assert isinstance(answer, errors.QueueFullError)


def test_whoever_was_answered_finds_room_again(stage: ManageStage, service: Service) -> None:
    service.gate.set()
    for _ in range(50):
        (answer,) = ask(stage, LARGE).wait(1)
        assert isinstance(answer, bytes)


def test_a_request_larger_than_any_lane_is_refused_with_both_sizes(stage: ManageStage) -> None:
    (answer,) = ask(stage, b"x" * 2000).got
    assert isinstance(answer, errors.BadManageRequestError)
    assert "1,000" in str(answer)
    assert "2,000" in str(answer)


def test_an_error_travels_and_an_unexpected_one_tells_nothing(stage: ManageStage) -> None:
    (known,) = ask(stage, b"unknown").wait(1)
    (unknown,) = ask(stage, b"broken").wait(1)
    assert isinstance(known, errors.UnknownJobError)
    assert isinstance(unknown, errors.InternalError)
    assert "ZeroDivision" not in str(unknown)
    # Also an error that is no Exception, as a panic in Rust: more often than there are threads.
    assert all(isinstance(ask(stage, b"panic").wait(1)[0], errors.InternalError) for _ in range(3))


def test_nothing_is_done_for_a_client_that_has_gone(stage: ManageStage) -> None:
    (answer,) = ask(stage, b"hello", lambda: True).wait(1)
    assert isinstance(answer, errors.CancelledError)


def test_stopping_answers_what_waits_and_what_comes_later(
    stage: ManageStage, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manage_stage, "STOP_S", 60.0)
    running = ask(stage, LARGE)
    # A request that no thread has begun is refused, and on a busy machine a thread may begin late.
    assert service.is_at_gate.wait(60)
    threading.Timer(0.1, service.gate.set).start()
    stage.stop()
    assert isinstance(running.wait(1)[0], bytes)
    (answer,) = ask(stage, b"hello").wait(1)
    assert isinstance(answer, errors.StoppingError)


def test_stopping_waits_for_nothing_that_hangs_and_answers_it_once(
    stage: ManageStage, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manage_stage, "STOP_S", 0.1)
    running, behind, other = ask(stage, LARGE), ask(stage, LARGE), ask(stage, b"hello")
    assert isinstance(other.wait(1)[0], bytes)
    assert service.is_at_gate.wait(60)
    stage.stop()
    assert [type(one.wait(1)[0]) for one in (running, behind)] == [errors.StoppingError] * 2
    service.gate.set()
    for thread in [thread for thread in threading.enumerate() if thread.name == "manage"]:
        thread.join(60)
    assert [len(one.got) for one in (running, behind)] == [1, 1]


def test_answers_are_counted_by_outcome(stage: ManageStage) -> None:
    ask(stage, b"hello").wait(1)
    ask(stage, b"unknown").wait(1)
    assert stage.counts == {"ok": 1, "unknown_job": 1}
    for _ in range(100):
        if not stage.waiting:
            return
        time.sleep(0.01)
    raise AssertionError


def test_text_that_is_no_utf8_travels_in_an_answer(service: Service) -> None:
    stage, answers = ManageStage(service.handle, service.admit, service.note_unread, LANES), Answers()
    stage.submit(Request(ManageCall(b"half"), client=CallbackClient(answers)))
    (answer,) = answers.wait(1)
    assert isinstance(answer, bytes)
    assert json.loads(answer) == {"ok": True, "half": "\ud800"}
    stage.stop()


def test_an_answer_that_cannot_be_sent_is_counted(stage: ManageStage) -> None:
    def deaf(answer: bytes | HplmError) -> None:
        raise RuntimeError("no room")

    stage.submit(Request(ManageCall(b"abc"), client=CallbackClient(deaf)))
    ask(stage, b"abc").wait(1)
    assert stage.counts["failed_answers"] == 1


def test_a_request_without_a_valid_key_is_refused_before_its_size_is_looked_at(stage: ManageStage) -> None:
    answers = Answers()
    stage.submit(Request(ManageCall(b" " * (LANES[-1].most_bytes + 1), b"wrong"), client=CallbackClient(answers)))
    (answer,) = answers.got
    assert isinstance(answer, errors.ForbiddenError)
    assert stage.counts == {"forbidden": 1}


def test_the_caller_of_a_request_is_the_holder_of_its_key(stage: ManageStage) -> None:
    answers = Answers()
    stage.submit(Request(ManageCall(b"who", b"abc"), client=CallbackClient(answers)))
    assert answers.wait(1) == [b'{"caller": "abc"}']


def test_the_stage_runs_until_it_is_stopped(stage: ManageStage) -> None:
    assert stage.is_running
    stage.stop()
    assert not stage.is_running


def test_a_request_that_is_refused_with_a_valid_key_before_it_is_read_is_noted(
    stage: ManageStage, service: Service
) -> None:
    for raw in (b"x" * 2000, *[LARGE] * (LANES[1].capacity + 1)):
        stage.submit(Request(ManageCall(raw, b"k"), client=CallbackClient(Answers(), never)))
    assert service.unread == [("k", "BAD_MANAGE_REQUEST"), ("k", "QUEUE_FULL")]
    service.gate.set()
    stage.stop()
    stage.submit(Request(ManageCall(b"late", b"k"), client=CallbackClient(Answers(), never)))
    assert service.unread[-1] == ("k", "STOPPING")
    service.unread.clear()
    stage.submit(Request(ManageCall(b"late", b"wrong"), client=CallbackClient(Answers(), never)))
    assert not service.unread
