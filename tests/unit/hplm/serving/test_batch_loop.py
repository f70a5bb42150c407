"""The batch loop: whatever happens, every request gets exactly one answer."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hplm.errors import (
    CancelledError,
    DeadlineError,
    HplmError,
    InternalError,
    QueueFullError,
    StoppingError,
)
from hplm.models.device import is_device_lost
from hplm.runtime import process
from hplm.runtime.tracing import Tracer
from hplm.scheduling.cost import CostModel
from hplm.scheduling.policies import Fcfs
from hplm.scheduling.policy import Batch, Budget, Policy, Waiting
from hplm.scheduling.queue import RequestQueue, TakeResult
from hplm.serving.batch_loop import BatchLoop, Run
from hplm.serving.pending_requests import ASK_CANCELLED_AFTER_S
from hplm.serving.request import Request
from tests.doubles import Panic
from tests.limits import limited
from tests.submitting import CallbackClient, never
from tests.waiting import until

SOON_S = 60.0
Answers = Iterator[tuple[Sequence[int], Sequence[int | HplmError]]]

ROOT = Path(__file__).parents[4]


class Inbox:
    """The replies: all answers to each item."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._answers: dict[int, list[int | HplmError]] = {}

    def reply_to(self, item: int) -> Callable[[int | HplmError], None]:
        def reply(answer: int | HplmError) -> None:
            with self._changed:
                self._answers.setdefault(item, []).append(answer)
                self._changed.notify_all()

        return reply

    def wait(self, count: int) -> dict[int, int | HplmError]:
        """Return the answers when `count` items have theirs; fail if one has two."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._answers) >= count, SOON_S), f"{len(self._answers)} came"
        time.sleep(0.05)  # a second answer would come now
        assert all(len(found) == 1 for found in self._answers.values())
        return {item: found[0] for item, found in self._answers.items()}

    @property
    def kinds(self) -> Counter[str]:
        with self._changed:
            return Counter(type(found[0]).__name__ for found in self._answers.values())


class Gate:
    """A `run` that doubles its items. Batches wait until `open` is set."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self.batches: list[list[int]] = []

    def run(self, items: list[int], _: Batch) -> Answers:
        self.batches.append(items)
        self.entered.set()
        assert self.open.wait(SOON_S)
        yield range(len(items)), [2 * item for item in items]


def double(items: list[int], _: Batch) -> Answers:
    """Double items, and yield the second half of the answers first."""
    middle = len(items) // 2
    for part in (range(middle, len(items)), range(middle)):
        yield part, [2 * items[i] for i in part]


def loop_of(
    run: Run[int, int],
    *,
    policy: Policy | None = None,
    capacity: int = 100_000,
    batch: int = 8,
    tracer: Tracer | None = None,
    upcoming: Callable[[list[int]], None] | None = None,
    every_s: float = 0.0,
    nice: int = 0,
    crowded_nice: int | None = None,
    is_told_to_stop: Callable[[], bool] = lambda: False,
    is_fatal: Callable[[BaseException], bool] = lambda error: False,
) -> BatchLoop[int, int]:
    queue = RequestQueue(
        policy or Fcfs(),
        Budget(1, batch, batch, batch),
        CostModel.fit([(1, 1, 1e-6)]),
        capacity=capacity,
        weights={},
        starve_after_s=SOON_S,
    )
    tracer = tracer or Tracer(None, "test")
    return BatchLoop(
        *("test", queue, run),
        tracer=tracer,
        upcoming=upcoming,
        is_told_to_stop=is_told_to_stop,
        is_fatal=is_fatal,
        every_s=every_s,
        nice=nice,
        crowded_nice=crowded_nice,
    )


def submit(
    loop: BatchLoop[int, int],
    inbox: Inbox,
    item: int,
    *,
    tenant: str = "a",
    within_s: float = 100.0,
    waited_s: float = 0.0,
    is_cancelled: Callable[[], bool] = never,
    is_over: Callable[[], bool] = never,
) -> None:
    now = time.monotonic() - waited_s
    client = CallbackClient(inbox.reply_to(item), is_cancelled, is_over)
    try:
        loop.submit(Request(item, client=client), tenant=tenant, tokens=1, arrived_s=now, deadline_s=now + within_s)
    except HplmError as error:
        # The stage counts a request that is refused at once. The inbox gets one answer to each item.
        client.reply(loop.count_refused(error))


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()


def test_every_request_of_many_threads_is_answered_exactly_once_with_its_own_answer(inbox: Inbox) -> None:
    loop = loop_of(double, upcoming=lambda items: None)
    loop.start()

    def send(start: int) -> None:
        for item in range(start, start + 400):
            submit(loop, inbox, item, tenant=f"t{item % 7}")

    senders = [threading.Thread(target=send, args=(400 * i,)) for i in range(8)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert inbox.wait(3200) == {item: 2 * item for item in range(3200)}
    loop.stop()
    assert loop.counts["ok"] == loop.counts["tokens"] == 3200
    assert loop.waiting == 0


def test_a_request_that_is_over_is_not_computed_and_takes_no_room_in_a_batch(inbox: Inbox) -> None:
    ran: list[list[int]] = []

    def run(items: list[int], batch: Batch) -> Answers:
        ran.append(items)
        yield from double(items, batch)

    loop = loop_of(run, batch=4)
    for item in range(12):
        submit(loop, inbox, item, is_over=partial({1, 2, 4, 5, 6, 7}.__contains__, item))
    loop.start()
    found = inbox.wait(12)
    loop.stop()
    assert ran == [[0, 3, 8, 9], [10, 11]], "other requests have their room"
    assert [type(found[item]) for item in (1, 2, 4, 5, 6, 7)] == [CancelledError] * 6
    assert [found[item] for item in (0, 3, 8, 9, 10, 11)] == [0, 6, 16, 18, 20, 22]
    assert (loop.counts["ok"], loop.counts["tokens"], loop.counts["cancelled"]) == (6, 6, 6)
    assert loop.counts["batches"] == 2


@pytest.mark.parametrize("fault", ["raises", "ends-early", "too-few-answers"])
def test_a_batch_that_fails_midway_keeps_its_answers_and_the_rest_gets_internal(inbox: Inbox, fault: str) -> None:
    def run(items: list[int], batch: Batch) -> Answers:
        if items == [100]:
            yield from double(items, batch)
            return
        yield [0, 1], [2 * items[0], 2 * items[1]]
        if fault == "raises":
            raise ZeroDivisionError
        if fault == "too-few-answers":
            yield [2, 3], [2 * items[2]]

    loop = loop_of(run, batch=4)
    for item in range(4):
        submit(loop, inbox, item)
    loop.start()
    found = inbox.wait(4)
    answered = 3 if fault == "too-few-answers" else 2
    assert [found[item] for item in range(answered)] == [0, 2, 4][:answered]
    assert [type(found[item]) for item in range(answered, 4)] == [InternalError] * (4 - answered)
    submit(loop, inbox, 100)
    assert inbox.wait(5)[100] == 200
    loop.stop()


def test_stop_answers_what_waits_lets_the_batch_end_and_refuses_newcomers(inbox: Inbox, gate: Gate) -> None:
    loop = loop_of(gate.run, batch=2)
    for item in range(50):
        submit(loop, inbox, item)
    loop.start()
    assert gate.entered.wait(SOON_S)
    stopping = threading.Thread(target=loop.stop)
    stopping.start()
    inbox.wait(48)
    gate.open.set()
    stopping.join(SOON_S)
    submit(loop, inbox, 50)
    found = inbox.wait(51)
    assert [found[0], found[1]] == [0, 2]
    assert all(isinstance(found[item], StoppingError) for item in range(2, 51))


def test_a_batch_that_outlasts_stop_is_still_answered(inbox: Inbox, gate: Gate) -> None:
    loop = loop_of(gate.run)
    submit(loop, inbox, 1)
    loop.start()
    assert gate.entered.wait(SOON_S)
    loop.stop(timeout_s=0.1)
    gate.open.set()
    assert inbox.wait(1) == {1: 2}


def test_a_batch_loop_stopped_while_many_threads_send_answers_them_all(inbox: Inbox) -> None:
    loop = loop_of(double)
    loop.start()

    def send(start: int) -> None:
        for item in range(start, start + 300):
            submit(loop, inbox, item)

    senders = [threading.Thread(target=send, args=(300 * i,)) for i in range(4)]
    for sender in senders:
        sender.start()
    time.sleep(0.01)
    loop.stop()
    for sender in senders:
        sender.join()
    inbox.wait(1200)
    assert set(inbox.kinds) <= {"int", "StoppingError"}


def test_a_batch_loop_that_is_told_to_stop_refuses_what_waits_and_what_comes_and_answers_what_runs(
    inbox: Inbox,
) -> None:
    gate, told = Gate(), threading.Event()
    loop = loop_of(gate.run, batch=2, is_told_to_stop=told.is_set)
    for item in range(2):
        submit(loop, inbox, item)
    loop.start()
    assert gate.entered.wait(SOON_S)
    for item in range(2, 5):
        submit(loop, inbox, item)
    told.set()
    assert {type(answer) for answer in inbox.wait(3).values()} == {StoppingError}
    submit(loop, inbox, 5)
    gate.open.set()
    found = inbox.wait(6)
    assert {item: found[item] for item in (0, 1)} == {0: 0, 1: 2}
    assert isinstance(found[5], StoppingError)
    loop.stop()
    assert loop.counts["stopping"] == 4


@pytest.fixture
def other() -> Iterator[int]:
    """The number of a process that started later than this process."""
    with subprocess.Popen(["sleep", "600"]) as started:
        yield started.pid
        started.kill()


def test_a_note_that_the_server_is_about_to_end_is_believed_from_our_own_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    monkeypatch.setattr(process, "SHARED_MEMORY", tmp_path)
    server = os.getpid()
    assert not process.is_told_to_stop(server)
    # A link in its place is not followed.
    process.stopping_file(server).symlink_to(tmp_path / "elsewhere")
    process.tell_to_stop(server)
    assert not (tmp_path / "elsewhere").exists()
    # Whatever the clock says.
    os.utime(process.stopping_file(server), (0, 0), follow_symlinks=False)
    assert process.is_told_to_stop(server)
    assert not process.is_told_to_stop(other)
    # A launcher that was killed has left the note of an earlier process with the same number.
    process.stopping_file(server).rename(process.stopping_file(other))
    assert not process.is_told_to_stop(other)
    process.stopping_file(server).touch()
    assert not process.is_told_to_stop(server)
    process.tell_to_stop(server)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not process.is_told_to_stop(server)


def test_a_reply_that_raises_harms_no_other_request(inbox: Inbox) -> None:
    def raising(_: int | HplmError) -> None:
        raise BrokenPipeError

    loop = loop_of(double)
    now = time.monotonic()
    for item in range(10):
        reply = raising if item % 2 else inbox.reply_to(item)
        loop.submit(
            Request(item, client=CallbackClient(reply)), tenant="a", tokens=1, arrived_s=now, deadline_s=now + 100
        )
    loop.start()
    assert inbox.wait(5) == {item: 2 * item for item in range(0, 10, 2)}
    loop.stop()
    assert loop.counts["failed_answers"] == 5


def test_what_a_full_queue_refuses_gets_queue_full_at_once(inbox: Inbox) -> None:
    loop = loop_of(double, capacity=3)
    for item in range(5):
        submit(loop, inbox, item)
    found = inbox.wait(2)  # nothing computes yet
    assert {item: type(answer) for item, answer in found.items()} == {3: QueueFullError, 4: QueueFullError}
    loop.start()
    assert len(inbox.wait(5)) == 5
    loop.stop()
    assert loop.counts["queue_full"] == 2


def test_a_deadline_that_is_past_is_refused_at_once_and_one_that_passes_while_waiting_without_computing(
    inbox: Inbox, gate: Gate
) -> None:
    loop = loop_of(gate.run, batch=1)
    submit(loop, inbox, 0)
    loop.start()
    assert gate.entered.wait(SOON_S)
    submit(loop, inbox, 1, within_s=1e-6, waited_s=0.01)
    submit(loop, inbox, 2, within_s=0.05)
    assert isinstance(inbox.wait(1)[1], DeadlineError)
    time.sleep(0.1)
    gate.open.set()
    found = inbox.wait(3)
    assert found[0] == 0
    assert isinstance(found[2], DeadlineError)
    loop.stop()
    assert gate.batches == [[0]]


def test_a_request_whose_client_has_gone_while_it_waited_is_not_computed(inbox: Inbox, gate: Gate) -> None:
    loop = loop_of(gate.run)
    loop.start()
    submit(loop, inbox, 2)
    gate.entered.wait()
    waited_s = 2 * ASK_CANCELLED_AFTER_S
    submit(loop, inbox, 0, waited_s=waited_s, is_cancelled=lambda: True)
    submit(loop, inbox, 1, waited_s=waited_s)
    assert isinstance(inbox.wait(1)[0], CancelledError)
    gate.open.set()
    assert inbox.wait(3)[1] == 2
    loop.stop()
    assert gate.batches == [[2], [1]]


def test_a_client_that_cannot_be_asked_whether_it_has_gone_is_answered(inbox: Inbox) -> None:
    def raising() -> bool:
        raise RuntimeError

    loop = loop_of(double)
    for item in range(4):
        submit(loop, inbox, item, waited_s=2 * ASK_CANCELLED_AFTER_S, is_cancelled=raising)
    loop.start()
    assert inbox.wait(4) == {item: 2 * item for item in range(4)}
    loop.stop()


class FailsOnce(RequestQueue):
    """A queue that fails once, after it has taken a request out: a mistake of ours."""

    failed = False

    def take(self, now_s: float) -> TakeResult:
        if self.failed:
            return super().take(now_s)
        self.failed = True
        self.cancel(self.oldest(1)[0].id)
        raise ZeroDivisionError


def test_if_no_batch_can_be_chosen_all_requests_are_refused_and_the_stage_continues(inbox: Inbox) -> None:
    queue = FailsOnce(
        Fcfs(), Budget(1, 8, 8, 8), CostModel.fit([(1, 1, 1e-6)]), capacity=9, weights={}, starve_after_s=SOON_S
    )
    loop = BatchLoop("test", queue, double, tracer=Tracer(None, "test"))
    for item in range(3):
        submit(loop, inbox, item)
    loop.start()
    assert all(isinstance(answer, InternalError) for answer in inbox.wait(3).values())
    submit(loop, inbox, 3)
    assert inbox.wait(4)[3] == 6
    loop.stop()


def _raising(error: BaseException) -> Callable[[Any], Any]:
    def choose(waiting: Any) -> Any:
        raise error

    return choose


def _empty(waiting: Any) -> Any:
    waiting.clear()
    return Batch(())


FAULTS: dict[str, Callable[[Any], Any]] = {
    "raises": _raising(KeyError("a")),
    "exits": _raising(SystemExit(1)),
    "is-interrupted": _raising(KeyboardInterrupt()),
    "is-cancelled": _raising(asyncio.CancelledError()),
    "none": lambda waiting: None,
    "nothing": lambda waiting: Batch(()),
    "rows-of-nothing": lambda waiting: Batch(None),  # type: ignore[arg-type]
    "one-that-does-not-wait": lambda waiting: Batch(((Waiting(10**9, "a", 1, 0.0, 1e9),),)),
    "one-twice": lambda waiting: Batch(((waiting[0], waiting[0]),)),
    "too-many-rows": lambda waiting: Batch(((waiting[0],),) * 100),
    "too-much": lambda waiting: Batch((tuple(waiting) * 100,)),
    "odd-slots": lambda waiting: Batch(((waiting[0],),), slot_tokens="many"),  # type: ignore[arg-type]
    "takes-it-out": lambda waiting: Batch(((waiting.pop(),),)),
    "empties": _empty,
}


@dataclass(frozen=True)
class Broken:
    """A third party's policy with one of FAULTS."""

    fault: Callable[[Any], Any]

    def select(self, waiting: Sequence[Waiting], now_s: float, budget: Budget) -> Batch:
        chosen: Batch = self.fault(waiting)
        return chosen


@pytest.mark.parametrize("tenants", [1, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_policy_that_raises_or_returns_nonsense_is_counted_and_everything_answered(
    inbox: Inbox, fault: str, tenants: int, caplog: pytest.LogCaptureFixture
) -> None:
    loop = loop_of(double, policy=Broken(FAULTS[fault]), batch=2, upcoming=lambda items: None)
    for item in range(32):
        submit(loop, inbox, item, tenant=f"t{item % tenants}")
    loop.start()
    assert inbox.wait(32) == {item: 2 * item for item in range(32)}
    loop.stop()
    assert loop.counts["policy_failures"] == loop.counts["batches"] == 16
    # Not once for each batch: in days the log would fill the disk.
    assert 1 <= caplog.text.count("first come, first served") <= 3


@pytest.mark.parametrize("fails", [False, True])
def test_what_comes_next_is_announced_while_a_batch_computes(inbox: Inbox, gate: Gate, fails: bool) -> None:
    announced: list[list[int]] = []
    heard = threading.Event()

    def upcoming(items: list[int]) -> None:
        announced.append(items)
        heard.set()
        if fails:
            raise OSError

    loop = loop_of(gate.run, batch=2, upcoming=upcoming)
    for item in range(6):
        submit(loop, inbox, item)
    loop.start()
    assert heard.wait(SOON_S)
    assert announced[0] == [2, 3]
    gate.open.set()
    assert inbox.wait(6) == {item: 2 * item for item in range(6)}
    loop.stop()
    assert bool(loop.counts["failed_prefetches"]) == fails


def test_spans_of_all_threads_are_whole_lines_and_a_closed_tracer_takes_no_more(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    tracer = Tracer(path, "upper")
    is_closed = threading.Event()

    def write(number: int) -> None:
        while not is_closed.is_set():
            with tracer.span("batch", number=number):
                pass

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: path.stat().st_size > 0)
    tracer.close()  # while they write
    is_closed.set()
    for thread in threads:
        thread.join()
    spans = [json.loads(line) for line in path.read_text().splitlines()]
    assert spans
    assert {span["process"] for span in spans} == {"upper"}
    assert all(span["duration_us"] >= 0 for span in spans)
    tracer.close()  # twice does no harm


def test_where_spans_cannot_be_written_what_they_time_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.jsonl"
    tracer = Tracer(path, "upper")
    with tracer.span("batch"):
        pass
    with limited(resource.RLIMIT_FSIZE, path.stat().st_size):
        for _ in range(3):
            with tracer.span("batch"):
                pass
        tracer.close()
    assert len(path.read_text().splitlines()) == 1
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(f"{path} gets no further spans: ")


def test_a_batch_and_its_answers_are_traced_in_order(inbox: Inbox, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    tracer = Tracer(path, "upper")
    loop = loop_of(double, tracer=tracer)
    for item in range(3):
        submit(loop, inbox, item)
    loop.start()
    inbox.wait(3)
    loop.stop()
    tracer.close()
    spans = [json.loads(line) for line in path.read_text().splitlines()]
    assert Counter(span["name"] for span in spans) == {"batch": 1, "answer": 3}
    batch = next(span for span in spans if span["name"] == "batch")
    assert batch["about"] == {"requests": 3, "tokens": 3}
    assert all(span["start_us"] >= batch["start_us"] for span in spans)


def test_without_a_path_nothing_is_traced(tmp_path: Path) -> None:
    tracer = Tracer(None, "upper")
    with tracer.span("batch"):
        pass
    tracer.close()
    assert not list(tmp_path.iterdir())


# Enough requests at once that `BatchPacing` expects more.
MANY = 20


def test_requests_soon_after_a_batch_of_many_go_together(inbox: Inbox, gate: Gate) -> None:
    gate.open.set()
    loop = loop_of(gate.run, every_s=8.0, batch=MANY)
    for item in range(MANY):
        submit(loop, inbox, item)
    loop.start()
    inbox.wait(MANY)
    for item in range(MANY, MANY + 5):
        submit(loop, inbox, item)
    inbox.wait(MANY + 5)
    loop.stop()
    assert gate.batches == [list(range(MANY)), list(range(MANY, MANY + 5))]


def test_after_a_batch_of_few_requests_none_waits_for_others(inbox: Inbox, gate: Gate) -> None:
    gate.open.set()
    loop = loop_of(gate.run, every_s=1000.0)
    for item in (0, 1):
        submit(loop, inbox, item)
    loop.start()
    for item in (2, 3):
        inbox.wait(item)
        submit(loop, inbox, item)
    inbox.wait(4)
    loop.stop()
    assert gate.batches == [[0, 1], [2], [3]]


def test_requests_that_come_one_by_one_wait_for_no_others(inbox: Inbox, gate: Gate) -> None:
    gate.open.set()
    loop = loop_of(gate.run, every_s=1000.0)
    loop.start()
    for item in range(3):
        submit(loop, inbox, item)
        inbox.wait(item + 1)
    loop.stop()
    assert gate.batches == [[0], [1], [2]]


def test_stopping_does_not_wait_for_the_next_batch(inbox: Inbox, gate: Gate) -> None:
    gate.open.set()
    loop = loop_of(gate.run, every_s=1000.0, batch=MANY)
    before = set(threading.enumerate())
    for item in range(MANY):
        submit(loop, inbox, item)
    loop.start()
    inbox.wait(MANY)
    submit(loop, inbox, MANY)
    loop.stop()
    assert isinstance(inbox.wait(MANY + 1)[MANY], StoppingError)
    assert gate.batches == [list(range(MANY))]
    assert set(threading.enumerate()) <= before


def niceness(items: list[int], _: Batch) -> Answers:
    yield range(len(items)), [os.getpriority(os.PRIO_PROCESS, threading.get_native_id())] * len(items)


def test_the_computing_thread_alone_has_another_priority(inbox: Inbox) -> None:
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    of_answering: list[int] = []
    land = inbox.reply_to(0)

    def reply(answer: int | HplmError) -> None:
        of_answering.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        land(answer)

    loop = loop_of(niceness, nice=min(19, before + 3))
    loop.start()
    now = time.monotonic()
    loop.submit(Request(0, client=CallbackClient(reply)), tenant="a", tokens=1, arrived_s=now, deadline_s=now + SOON_S)
    assert inbox.wait(1) == {0: min(19, before + 3)}
    loop.stop()
    assert of_answering == [before]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_while_more_than_two_batches_wait_the_computing_thread_has_a_third_priority(inbox: Inbox) -> None:
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    crowded, usual = min(19, before + 1), min(19, before + 3)
    loop = loop_of(niceness, batch=8, nice=usual, crowded_nice=crowded)
    for number in range(25):
        submit(loop, inbox, number)
    loop.start()
    found = inbox.wait(25)
    loop.stop()
    # 25 and 17 requests waited at the first two batches, then 9 and 1.
    assert [found[number] for number in range(25)] == [crowded] * 16 + [usual] * 9


def test_a_priority_that_is_refused_is_logged_and_everything_is_answered(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(which: int, who: int, priority: int) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "setpriority", refuse)
    loop = loop_of(double, nice=-20, crowded_nice=-5)
    for number in range(25):
        submit(loop, inbox, number)
    loop.start()
    assert len(inbox.wait(25)) == 25
    loop.stop()
    assert caplog.text.count("--cap-add SYS_NICE`, under systemd `AmbientCapabilities=CAP_SYS_NICE`") == 1


def test_an_error_that_is_no_exception_ends_a_batch_and_not_the_stage(inbox: Inbox) -> None:
    def run(items: list[int], batch: Batch) -> Answers:
        if 1 in items:
            raise Panic
        return double(items, batch)

    loop = loop_of(run)
    loop.start()
    for item in (1, 2):
        submit(loop, inbox, item)
        inbox.wait(item)
    found = inbox.wait(2)
    assert isinstance(found[1], InternalError)
    assert found[2] == 4
    loop.stop()


def test_a_batch_that_failed_in_part_teaches_nothing_about_what_batches_cost(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(items: list[int], _: Batch) -> Answers:
        yield range(len(items)), [InternalError("failed") if item == 1 else 2 * item for item in items]

    loop = loop_of(run)
    seen: list[float] = []
    done = loop._queue.done
    monkeypatch.setattr(loop._queue, "done", lambda seconds: (seen.append(seconds), done(seconds)))
    loop.start()
    for item in (1, 2):
        submit(loop, inbox, item)
        inbox.wait(item)
    loop.stop()
    assert seen[0] == 0
    assert seen[1] > 0


def test_a_process_that_can_compute_nothing_more_answers_and_ends() -> None:
    program = """
import os, time
from tests.unit.hplm.serving.test_batch_loop import *

def run(items, batch):
    while items == [2] and not loop.waiting:  # another comes meanwhile
        time.sleep(0.01)
    raise RuntimeError("CUDA error: an illegal memory access was encountered" if items == [2] else "another")

loop = loop_of(run, is_fatal=lambda error: "CUDA" in str(error), batch=1)
loop.start()
for item in (1, 2, 3):
    answered = threading.Event()

    def reply(answer, item=item, answered=answered):
        os.write(1, f"{item} {type(answer).__name__}\\n".encode())  # whole lines, whichever thread answers
        answered.set()

    now_s = time.monotonic()
    loop.submit(Request(item, client=CallbackClient(reply)), tenant="a", tokens=1, arrived_s=now_s, deadline_s=now_s + 100)
    if item != 2:
        answered.wait()
time.sleep(30)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert sorted(done.stdout.split("\n")) == ["", "1 InternalError", "2 InternalError", "3 StoppingError"]
    assert done.returncode == 1
    assert "this process ends" in done.stderr


@pytest.mark.parametrize(
    ("error", "then", "is_lost"),
    [
        (RuntimeError("CUDA error: illegal address"), RuntimeError("CUDA error: illegal address"), True),
        (RuntimeError("CUDA error: invalid configuration argument"), None, False),
        (RuntimeError("CUDA error: out of memory"), RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: out of memory"), torch.OutOfMemoryError("CUDA out of memory"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: illegal address"), False),
        (RuntimeError("shape mismatch"), RuntimeError("no CUDA"), False),
    ],
)
def test_only_what_every_later_call_meets_too_is_a_lost_device(
    error: Exception, then: Exception | None, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def synchronize(device: object) -> None:
        if then is not None:
            raise then

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: None)
    assert is_device_lost(error) is is_lost
