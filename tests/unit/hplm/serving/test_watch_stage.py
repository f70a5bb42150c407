"""Watches of jobs: each change is sent once, the end of the job ends the watch, and no watch stays open for long."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from hplm import errors
from hplm.errors import BadManageRequestError, HplmError
from hplm.manage.access import ANYONE, Caller
from hplm.manage.requests import OfJob, parse_request
from hplm.manage.rights import WATCH
from hplm.serving import watch_stage
from hplm.serving.manage_stage import ManageCall
from hplm.serving.request import Client, Request
from hplm.serving.watch_stage import WATCH_S, WatchStage

REQUEST = b'{"action": "job.watch", "job": "j1"}'


class Jobs:
    """A stand-in for the service: one job, whose state a test sets, or an error."""

    def __init__(self) -> None:
        self.job: dict[str, Any] = dict.fromkeys(("step", "eta_s", "error", "result"))
        self.job |= {"state": "queued", "progress": 0.0, "subject": "tenant:acme"}
        self.error: HplmError | None = None
        self.unread: list[tuple[Caller, str]] = []
        self.asked = 0

    def admit(self, key: bytes) -> Caller:
        if key == b"wrong":
            raise errors.ForbiddenError("no")
        return Caller(key.decode(), "manage", key.decode()) if key else ANYONE

    def note_unread(self, caller: Caller, error: HplmError) -> None:
        self.unread.append((caller, error.code))

    def watched(self, raw: bytes, caller: Caller) -> str:
        _, request = parse_request(raw, {WATCH: OfJob})
        assert isinstance(request, OfJob)
        return request.job

    def job_state(self, job: str) -> dict[str, Any]:
        assert job == "j1"
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.job


class SlowJobs(Jobs):
    """Jobs whose states are read only when a test lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.looking, self.go_on = threading.Event(), threading.Event()

    def job_state(self, job: str) -> dict[str, Any]:
        self.looking.set()
        assert self.go_on.wait(60)
        return super().job_state(job)


class Watching(Client[bytes]):
    """A client that keeps its events and errors."""

    def __init__(self, stage: WatchStage, raw: bytes = REQUEST, key: bytes = b"") -> None:
        self.events: list[dict[str, Any]] = []
        self.errors: list[HplmError] = []
        self.lasts: list[bool] = []
        self.ended = threading.Event()
        stage.submit(Request(ManageCall(raw, key), client=self))

    def reply(self, answer: bytes | HplmError, *, is_last: bool = True) -> None:
        self.lasts.append(is_last)
        if isinstance(answer, HplmError):
            self.errors.append(answer)
        else:
            self.events.append(json.loads(answer))
        if is_last:
            self.ended.set()


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


@pytest.fixture
def stage(jobs: Jobs) -> WatchStage:
    return WatchStage(jobs, most_watchers=100)


def test_a_watcher_is_told_the_state_then_each_change_then_the_end(jobs: Jobs, stage: WatchStage) -> None:
    client = Watching(stage)
    for turn, change in enumerate(
        ({}, {}, {"state": "running", "step": "train"}, {}, {"progress": 0.5, "eta_s": 2.0}, {"state": "cancelled"})
    ):
        jobs.job |= change
        stage.look(turn / 10)
    assert [event["state"] for event in client.events] == ["queued", "running", "running", "cancelled"]
    assert client.lasts == [False, False, False, True]
    assert client.events[2] == {
        "state": "running",
        "step": "train",
        "progress": 0.5,
        "eta_s": 2.0,
        "error": None,
        "result": None,
    }
    assert stage.waiting == 0


def test_many_watchers_of_a_job_cost_one_look(jobs: Jobs, stage: WatchStage) -> None:
    clients = [Watching(stage) for _ in range(50)]
    stage.look(0.0)
    assert jobs.asked == 1
    assert all(len(client.events) == 1 for client in clients)


def test_a_latecomer_is_told_the_state_at_once(jobs: Jobs, stage: WatchStage) -> None:
    Watching(stage)
    stage.look(0.0)
    late = Watching(stage)
    stage.look(0.1)
    assert [event["state"] for event in late.events] == ["queued"]


def test_a_watch_is_closed_in_time_with_the_state_of_then(jobs: Jobs, stage: WatchStage) -> None:
    client, registry_is_busy = Watching(stage), errors.RegistryUnavailableError("locked")
    stage.look(10.0)
    stage.look(9.9 + WATCH_S)
    assert client.lasts == [False]
    jobs.error = registry_is_busy
    stage.look(10.0 + WATCH_S)
    assert client.lasts == [False, True]
    assert [event["state"] for event in client.events] == ["queued", "queued"]
    assert stage.waiting == 0


def test_what_is_far_too_long_is_noted_and_not_read(stage: WatchStage, jobs: Jobs) -> None:
    client = Watching(stage, b"[" * 2000)
    assert [type(error) for error in client.errors] == [BadManageRequestError]
    assert "1,024 bytes at most" in str(client.errors[0])
    assert jobs.unread == [(ANYONE, "BAD_MANAGE_REQUEST")]
    assert client.lasts == [True]


def test_an_unknown_job_is_one_error(jobs: Jobs, stage: WatchStage) -> None:
    jobs.error = errors.UnknownJobError("there is no job 'j1'")
    client = Watching(stage)
    stage.look(0.0)
    assert client.errors == [jobs.error]
    assert client.lasts == [True]
    assert stage.waiting == 0


def test_a_registry_busy_for_a_moment_ends_nobodys_watch(jobs: Jobs, stage: WatchStage) -> None:
    client = Watching(stage)
    stage.look(0.0)
    jobs.error = errors.RegistryUnavailableError("locked")
    stage.look(0.1)
    jobs.error, jobs.job = None, {**jobs.job, "state": "running"}
    stage.look(0.2)
    assert [event["state"] for event in client.events] == ["queued", "running"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{",
        b'{"action": "job.show", "job": "j1"}',
        b'{"action": "job.watch"}',
        b'{"action": "job.watch", "job": 1}',
    ],
)
def test_a_bad_request_is_refused_at_once(stage: WatchStage, raw: bytes) -> None:
    client = Watching(stage, raw)
    assert isinstance(client.errors[0], errors.BadManageRequestError)
    assert client.lasts == [True]


def test_one_watcher_too_many_is_refused_at_once(stage: WatchStage) -> None:
    clients = [Watching(stage) for _ in range(101)]
    assert isinstance(clients[-1].errors[0], errors.QueueFullError)
    assert stage.waiting == 100


def test_a_started_stage_looks_by_itself_and_stopping_tells_who_watches(jobs: Jobs, stage: WatchStage) -> None:
    stage.start()
    first, second = Watching(stage), Watching(stage)
    jobs.job["state"] = "failed"
    assert first.ended.wait(60)
    assert second.ended.wait(60)
    jobs.job["state"] = "running"
    third = Watching(stage)
    stage.stop()
    assert isinstance(third.errors[-1], errors.StoppingError)
    assert isinstance(Watching(stage).errors[0], errors.StoppingError)
    assert stage.counts["stopping"] == 2


def test_a_stage_that_is_stopped_while_the_last_watch_ends_does_stop() -> None:
    jobs = SlowJobs()
    jobs.job["state"] = "done"
    stage = WatchStage(jobs)
    stage.start()
    client = Watching(stage)
    assert jobs.looking.wait(60)
    stopping = threading.Thread(target=stage.stop)
    stopping.start()
    # `stop` sets this before it waits for the thread that reads the jobs.
    while not stage._stopping:
        pass
    jobs.go_on.set()
    stopping.join(60)
    assert not stopping.is_alive()
    assert client.ended.wait(60)


def test_a_look_that_hangs_does_not_keep_a_stage_from_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_stage, "STOP_S", 0.1)
    jobs = SlowJobs()
    stage = WatchStage(jobs)
    stage.start()
    client = Watching(stage)
    assert jobs.looking.wait(60)
    stopping = threading.Thread(target=stage.stop, daemon=True)
    stopping.start()
    stopping.join(60)
    has_stopped = not stopping.is_alive()
    # A late read must send nothing.
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    jobs.go_on.set()
    stage._thread.join(60)
    assert has_stopped
    assert not raised
    assert [type(error) for error in client.errors] == [errors.StoppingError]
    assert client.lasts == [True]


def test_a_watch_without_a_valid_key_is_refused(stage: WatchStage) -> None:
    assert isinstance(Watching(stage, key=b"wrong").errors[0], errors.ForbiddenError)


def test_a_tenants_key_watches_jobs_of_its_own_tenant_alone(jobs: Jobs, stage: WatchStage) -> None:
    own, other = Watching(stage, key=b"acme"), Watching(stage, key=b"news")
    stage.look(0.0)
    assert [event["state"] for event in own.events] == ["queued"]
    assert other.events == []
    assert isinstance(other.errors[0], errors.ForbiddenError)


def test_a_tenants_key_is_told_the_same_of_a_job_that_does_not_exist(jobs: Jobs, stage: WatchStage) -> None:
    jobs.error = errors.UnknownJobError("there is no job 'j1'")
    tenant, operator = Watching(stage, key=b"acme"), Watching(stage)
    stage.look(0.0)
    assert isinstance(tenant.errors[0], errors.ForbiddenError)
    assert isinstance(operator.errors[0], errors.UnknownJobError)


def test_the_stage_runs_from_its_start_to_its_stop(stage: WatchStage) -> None:
    assert not stage.is_running
    stage.start()
    assert stage.is_running
    stage.stop()
    assert not stage.is_running
