"""What a running job tells of itself, and how it keeps its lease."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hplm.errors import LeaseLostError, RegistryUnavailableError
from hplm.jobs import lease
from hplm.jobs.lease import HUNG, JobLease, JobTimings
from hplm.registry.records import Job
from hplm.registry.registry import Registry
from tests.doubles import ManualClock
from tests.waiting import until

TIMINGS = JobTimings(lease_s=0.2, renew_every_s=0.05, report_every_s=0.01, hang_s=0.3)


@pytest.fixture
def job(registry: Registry) -> Job:
    registry.submit_job("tenant.create", "tenant:acme", {}, time.time())
    job = registry.claim_job("w", time.time(), 60.0)
    assert job is not None
    return job


def lease_of(registry: Registry, job: Job) -> JobLease:
    return JobLease(registry, job, "w", threading.Event(), TIMINGS, time.time)


def test_a_job_that_goes_on_where_it_was_killed_does_not_take_the_leap_for_speed(registry: Registry, job: Job) -> None:
    with lease_of(registry, job) as held:
        held.report("read the corpus", 0.0)
        time.sleep(0.2)
        # Most of it was done by whoever was killed.
        held.report("further pretrain", 0.8)
        held.renew()
        assert registry.job(job.id).eta_s is None
        time.sleep(0.3)
        held.report("further pretrain", 0.85)
        held.renew()
        eta_s = registry.job(job.id).eta_s
    assert eta_s is not None
    # A twentieth took 0.3 s, three are left.
    assert eta_s > 0.85


def test_a_job_that_cannot_renew_its_lease_ends_whatever_is_the_matter(
    registry: Registry, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> bool:
        raise ValueError("a mistake of ours")

    with lease_of(registry, job) as held:
        monkeypatch.setattr(registry, "report_job", broken)

        def ended() -> bool:
            try:
                held.report("train", 0.5)
            except LeaseLostError:
                return True
            return False

        until(ended)


def test_a_job_that_hangs_where_it_is_to_end_takes_its_worker_with_it(
    registry: Registry, job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = threading.Event()
    monkeypatch.setattr(lease.os, "_exit", lambda status: left.set() if status == HUNG else None)
    with lease_of(registry, job) as held:
        held.report("features", 0.5)
        assert not left.wait(2 * TIMINGS.hang_s)
        begun_s = time.monotonic()
        registry.cancel_job(job.id, time.time())
        assert left.wait(60)
        assert time.monotonic() - begun_s > TIMINGS.hang_s
    assert "hangs in step 'features'" in caplog.text
    # Not only once another worker has seen the lease run out, which may be at something else for hours.
    assert registry.job(job.id).state == "cancelled"


def test_a_job_that_is_to_end_and_waits_for_the_registry_does_not_hang(
    registry: Registry, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = threading.Event()
    monkeypatch.setattr(lease.os, "_exit", lambda status: left.set())
    clock = ManualClock(now_s=100.0)
    monkeypatch.setattr(lease, "time", SimpleNamespace(monotonic=clock))

    def away() -> str:
        clock.now_s += TIMINGS.hang_s / 3
        if clock.now_s < until_s:
            raise RegistryUnavailableError("it is away")
        return "there"

    monkeypatch.setattr(lease, "RETRY_S", 2 * TIMINGS.report_every_s)
    with JobLease(registry, job, "w", threading.Event(), replace(TIMINGS, lease_s=60.0), time.time) as held:
        registry.cancel_job(job.id, time.time())
        clock.now_s += 2 * TIMINGS.renew_every_s
        until(lambda: held._end is not None)
        until_s = clock.now_s + 4 * TIMINGS.hang_s
        assert held.retry(away) == "there"
    assert not left.is_set()


def test_a_registry_that_is_away_is_in_the_log_once(
    registry: Registry, job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[object] = []

    def away(*given: object, **_: object) -> bool:
        asked.append(given)
        raise RegistryUnavailableError("it is away")

    monkeypatch.setattr(registry, "report_job", away)
    with lease_of(registry, job):
        until(lambda: len(asked) > 5)
    assert caplog.text.count("it is away") == 1
