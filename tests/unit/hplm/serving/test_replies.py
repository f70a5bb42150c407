"""Answers leave from threads of their own, and no answer waits behind errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hplm.errors import HplmError, QueueFullError
from hplm.runtime.tracing import Tracer
from hplm.serving.replies import MOST_ERRORS_WAITING, Answers
from tests.submitting import CallbackClient
from tests.waiting import until

SOON_S = 60.0
Reply = Callable[[int | HplmError], None]


class SlowClients:
    """Clients whose replies wait until `listens` is set. `by` holds the names of the threads that sent them."""

    def __init__(self) -> None:
        self.is_asked = threading.Semaphore(0)
        self.listens = threading.Event()
        self.by: list[str] = []

    def reply(self, _: int | HplmError) -> None:
        self.is_asked.release()
        assert self.listens.wait(SOON_S)
        self.by.append(threading.current_thread().name)


@pytest.fixture
def slow() -> Iterator[SlowClients]:
    made = SlowClients()
    yield made
    made.listens.set()


@pytest.fixture
def answers() -> Iterator[Answers]:
    made = Answers("test", Tracer(None, "test"))
    yield made
    made.stop(time.monotonic() + SOON_S)


def full() -> QueueFullError:
    return QueueFullError("full")


def test_an_answer_waits_for_no_error_and_refusing_waits_for_no_client(answers: Answers, slow: SlowClients) -> None:
    for _ in range(MOST_ERRORS_WAITING // 2):
        answers.refuse(CallbackClient(slow.reply), full())
        answers.give(CallbackClient(slow.reply), full())
    came: list[int | HplmError] = []
    heard = threading.Event()
    answers.give(CallbackClient(lambda answer: (came.append(answer), heard.set())[1]), 7)
    assert heard.wait(SOON_S)
    assert came == [7]
    assert not slow.by


def test_answers_that_cannot_be_sent_are_counted_and_logged_once(
    answers: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(answer: object) -> None:
        raise RuntimeError("no shared memory")

    for _ in range(100):
        answers.give(CallbackClient(fail), 7)
    until(lambda: answers.counts.read()["failed_answers"] == 100)
    assert caplog.text.count("an answer could not be sent") == 1
    assert "no shared memory" in caplog.text


def test_if_many_errors_wait_the_thread_that_refuses_sends_its_error(answers: Answers, slow: SlowClients) -> None:
    own = threading.current_thread().name
    for _ in range(2):
        # Both threads that send errors are busy: later errors wait.
        answers.refuse(CallbackClient(slow.reply), full())
        assert slow.is_asked.acquire(timeout=SOON_S)
    while answers.errors_waiting < MOST_ERRORS_WAITING:
        answers.refuse(CallbackClient(slow.reply), full())
    came: list[str] = []
    answers.refuse(CallbackClient(lambda _: came.append(threading.current_thread().name)), full())
    assert came == [own]
    # An error that `give` sends is posted all the same: the computing thread sends nothing itself.
    answers.give(CallbackClient(lambda _: came.append(threading.current_thread().name)), full())
    assert came == [own]
    slow.listens.set()
    answers.stop(time.monotonic() + SOON_S)
    assert len(came) == 2
    assert own not in {*slow.by, came[1]}
    assert answers.counts.read() == {"queue_full": len(slow.by) + 2}


def test_after_the_end_the_thread_that_answers_sends(answers: Answers) -> None:
    came: list[int | HplmError] = []
    answers.stop(time.monotonic() + SOON_S)
    answers.give(CallbackClient(came.append), 7)
    answers.refuse(CallbackClient(came.append), full())
    assert came[0] == 7
    assert isinstance(came[1], QueueFullError)


def test_an_error_that_cannot_be_sent_is_counted_and_raises_nothing(answers: Answers) -> None:
    def gone(_: int | HplmError) -> None:
        raise OSError("no room")

    answers.refuse(CallbackClient(gone), full())
    answers.stop(time.monotonic() + SOON_S)
    assert answers.counts.read() == {"queue_full": 1, "failed_answers": 1}
