"""Jobs and who does them: cancelled, told about, two at once, with a registry or a disk that is away, full or locked."""

from __future__ import annotations

import errno
import gc
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hplm_builder.domains.masked_lm import PRETRAIN
from hplm_builder.jobs.handlers import load_handlers
from hplm_builder.tenants import tenant_job

from hplm.adapters import tenant as tenants
from hplm.core.text import TextEncoder
from hplm.engine.open_domain import OpenDomain
from hplm.errors import (
    DataError,
    JobCancelledError,
    MissingArtifactError,
    MissingRegistryError,
    RegistryUnavailableError,
)
from hplm.housekeeping import garbage_collection
from hplm.jobs.lease import HUNG, JobTimings
from hplm.jobs.worker_loop import Worker
from hplm.manage.service import ManageService
from hplm.models.base import Base
from hplm.registry.jobs import MOST_ATTEMPTS
from hplm.registry.records import Job
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests.doubles import Panic
from tests.managed import at_work
from tests.unit.hplm.manage.making import (
    QUICK,
    QUICK_DOMAIN,
    ask,
    colours,
    corpus,
    create_tenant,
    failure,
    files_below,
    update,
    upload,
    work,
)
from tests.waiting import until

LONG = {"epochs": 1000, "patience": 1000}


def wait_for(registry: Registry, job: str, state: str, progress: float = 0.0, timeout_s: float = 60.0) -> Job:
    """The job as it is once in `state` with `progress`."""
    deadline_s = time.monotonic() + timeout_s
    while (found := registry.job(job)).state != state or found.progress < progress:
        assert time.monotonic() < deadline_s, found
        time.sleep(0.02)
    return found


def test_a_queued_job_is_cancelled_at_once_and_a_running_one_soon(
    service: ManageService, store: Store, registry: Registry
) -> None:
    data = {"train": {"upload": upload(service, colours(200))}}
    running = ask(service, "tenant.create", tenant="acme", data=data, settings=LONG)["job"]
    queued = create_tenant(service, "other")
    with at_work(store):
        told = wait_for(registry, running, "running", progress=0.001)
        assert told.step in ("features", "fine-tune")
        assert ask(service, "job.cancel", job=queued)["job"]["state"] == "cancelled"
        assert ask(service, "job.cancel", job=running)["job"]["cancel_requested"]
        wait_for(registry, running, "cancelled")
    assert not [path for path in files_below(store) if path.startswith(("tenants/", "jobs/"))]
    # Its file is there for another try.
    job = ask(service, "tenant.create", tenant="acme", data=data, settings=QUICK)["job"]
    work(store)
    assert registry.job(job).state == "done"


def test_a_running_job_tells_how_far_it_is_and_how_long_it_will_take(
    service: ManageService, store: Store, registry: Registry
) -> None:
    data = {"train": {"upload": upload(service, colours(200))}}
    job = ask(service, "tenant.create", tenant="acme", data=data, settings=LONG)["job"]
    with at_work(store):
        first = wait_for(registry, job, "running", progress=0.28)
        later = wait_for(registry, job, "running", progress=first.progress + 0.01)
    assert first.eta_s is not None
    assert later.eta_s is not None
    assert later.eta_s > 0
    # The worker was told to stop: the job is as if it had not been begun.
    given_back = registry.job(job)
    assert (given_back.state, given_back.attempts, given_back.worker) == ("queued", 0, None)


def test_two_workers_do_two_jobs_at_once_and_one_after_the_other_for_one_tenant(
    service: ManageService, store: Store, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = tenant_job.train_tenant

    def train_tenant(base: Base, lookup: OpenDomain, name: str, *given: Any, **options: Any) -> tenants.Tenant:
        data, settings, *others = given
        # Two at once in one process draw from the same random numbers: without, an update always learns the same.
        return really(base, lookup, name, data, replace(settings, dropout=0.0), *others, **options)

    monkeypatch.setattr(tenant_job, "train_tenant", train_tenant)
    jobs = [create_tenant(service, name) for name in ("a", "b", "c", "d")]
    work(store)
    updates = [update(service, "a", colours(is_swapped=is_swapped)) for is_swapped in (True, False, True)]
    with at_work(store, "w0"), at_work(store, "w1"):
        jobs += updates + [update(service, name, colours(is_swapped=True)) for name in ("b", "c", "d")]
        for job in jobs:
            wait_for(registry, job, "done")
    assert [registry.tenant(name).current.number for name in ("a", "b", "c", "d")] == [4, 2, 2, 2]
    ended = [registry.job(job).ended_s for job in updates]
    assert ended == sorted(ended, key=lambda at: at or 0.0)
    verdict = garbage_collection.verify(store, registry, time.time())
    assert not verdict.problems
    assert not verdict.loose


def test_a_worker_whose_store_is_not_mounted_takes_no_job(
    service: ManageService, store: Store, registry: Registry, tmp_path: Path
) -> None:
    job = create_tenant(service)
    (tmp_path / "mount").mkdir()
    away = Store(tmp_path / "mount", f"sqlite:///{store.root}/registry.sqlite")
    with pytest.raises(MissingArtifactError, match="or the store is not mounted"):
        work(away)
    with at_work(away):
        time.sleep(1)
    assert registry.job(job).state == "queued"
    assert len(registry.uploads()) == 1
    work(store)
    assert registry.job(job).state == "done"


def test_a_worker_whose_store_goes_away_takes_no_more_jobs(
    service: ManageService, store: Store, registry: Registry, tmp_path: Path
) -> None:
    with at_work(store):
        (store.root / "bases").rename(tmp_path / "bases")
        time.sleep(1)
        job = create_tenant(service)
        time.sleep(1)
        assert registry.job(job).state == "queued"
        (tmp_path / "bases").rename(store.root / "bases")
        wait_for(registry, job, "done")


def test_an_upload_that_the_worker_cannot_read_is_not_the_senders_fault_and_stays(
    service: ManageService, store: Store, registry: Registry
) -> None:
    job = create_tenant(service)
    (file,) = (store.root / "uploads").glob("*/train.csv")
    content = file.read_bytes()
    file.unlink()
    file.symlink_to(file.name)
    work(store)
    failure(registry, job, "STORE_UNAVAILABLE")
    file.unlink()
    file.write_bytes(content)
    data = {"train": {"upload": file.parent.name}}
    again = ask(service, "tenant.create", tenant="acme", data=data, settings=QUICK)["job"]
    work(store)
    assert registry.job(again).state == "done"


def test_what_a_job_made_is_removed_where_it_cannot_be_published(
    service: ManageService, store: Store, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_tenant(service, "acme")
    work(store)
    job = update(service, "acme", colours(is_swapped=True))
    first, really = registry.tenant("acme").current, tenant_job.train_tenant

    def train_tenant(*given: Any, **options: Any) -> tenants.Tenant:
        # As `hplm build tenant` does, which makes no job.
        number = registry.next_number("acme")
        registry.publish_tenant(
            "acme", first.domain_version_id, first.path, time.time(), about={}, number=number, expected=first.number
        )
        return really(*given, **options)

    monkeypatch.setattr(tenant_job, "train_tenant", train_tenant)
    work(store)
    failure(registry, job, "CONFLICT")
    assert {Path(path).parent.as_posix() for path in files_below(store) if path.startswith("tenants/")} == {first.path}


def test_a_worker_waits_for_a_registry_that_is_away(service: ManageService, store: Store, registry: Registry) -> None:
    job = create_tenant(service, "acme")
    service.close()
    registry.close()
    place, away = store.root / "registry.sqlite", store.root / "away.sqlite"
    place.rename(away)
    with at_work(store):
        time.sleep(0.3)
        assert not place.exists()
        away.rename(place)
        wait_for(registry, job, "done")


def test_a_registry_that_is_locked_for_seconds_costs_no_job(
    service: ManageService, store: Store, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of those who open it from here on.
    monkeypatch.setattr("hplm.registry.database.BUSY_S", 1.0)
    data = {"train": {"upload": upload(service, colours(200))}}
    settings = {"epochs": 150, "patience": 150}
    job = ask(service, "tenant.create", tenant="acme", data=data, settings=settings)["job"]
    with at_work(store):
        wait_for(registry, job, "running", progress=0.1)
        with closing(sqlite3.connect(store.root / "registry.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            time.sleep(2.5)
            other.execute("ROLLBACK")
        assert wait_for(registry, job, "done").attempts == 1


@pytest.mark.parametrize("epochs", [10, 1000], ids=["ends-meanwhile", "goes-on"])
def test_a_registry_that_is_locked_for_longer_than_a_lease_costs_a_job_neither_its_worker_nor_an_attempt(
    service: ManageService, store: Store, registry: Registry, monkeypatch: pytest.MonkeyPatch, epochs: int
) -> None:
    monkeypatch.setattr("hplm.registry.database.BUSY_S", 0.2)
    data = {"train": {"upload": upload(service, colours(200))}}
    settings = {"epochs": epochs, "patience": epochs}
    job = ask(service, "tenant.create", tenant="acme", data=data, settings=settings)["job"]
    timings = JobTimings(lease_s=3.0, renew_every_s=0.2, report_every_s=0.1)
    with at_work(store, "w0", timings=timings), at_work(store, "w1", timings=timings):
        before = wait_for(registry, job, "running", progress=0.01)
        with closing(sqlite3.connect(store.root / "registry.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            time.sleep(6.0)
            other.execute("ROLLBACK")
        if epochs == 10:
            after = wait_for(registry, job, "done")
        else:
            # Further than a job that was begun again would be.
            after = wait_for(registry, job, "running", progress=before.progress + 0.001)
        assert (after.attempts, after.worker, after.started_s) == (1, before.worker, before.started_s)


@pytest.mark.parametrize("ahead_s", [100.0, -100.0])
def test_a_worker_whose_clock_is_off_leaves_the_living_their_jobs_and_takes_the_deads(
    service: ManageService, store: Store, registry: Registry, ahead_s: float
) -> None:
    data = {"train": {"upload": upload(service, colours(200))}}
    living = ask(service, "tenant.create", tenant="acme", data=data, settings=LONG)["job"]
    timings = JobTimings(lease_s=1.0, renew_every_s=0.2, report_every_s=0.1, watch_s=6.0)
    with at_work(store, "w0", timings=timings):
        wait_for(registry, living, "running", progress=0.001)
        dead = create_tenant(service, "dead")
        assert registry.claim_job("killed", time.time(), timings.lease_s, expired=lambda over: set())
        with at_work(store, "w1", timings=timings, clock=lambda: time.time() + ahead_s):
            # Its lease is watched as long as the living one's.
            wait_for(registry, dead, "done")
            time.sleep(1.0)
        shown = registry.job(living)
    assert (shown.state, shown.worker, shown.attempts) == ("running", "w0", 1)
    assert (registry.job(dead).worker, registry.job(dead).attempts) == ("w1", 2)


def test_a_worker_that_must_leave_in_the_middle_of_a_step_gives_its_job_back(
    service: ManageService, store: Store, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"train": {"upload": upload(service, colours(200))}}
    job = ask(service, "tenant.create", tenant="acme", data=data, settings=LONG)["job"]
    worker = Worker(store, "w", load_handlers)
    thread = threading.Thread(target=worker.run, kwargs={"until_idle": True})
    thread.start()
    wait_for(registry, job, "running", progress=0.001)
    # Here the process would be gone. This one finds out that the job is no longer its own, leaves it, and takes no other.
    monkeypatch.setattr(Registry, "claim_job", lambda *_, **__: None)
    worker.give_back()
    assert registry.job(job).state == "queued"
    ask(service, "job.cancel", job=job)
    thread.join()
    assert registry.job(job).state == "cancelled"
    assert not [path for path in files_below(store) if path.startswith("tenants/")]


def test_a_worker_that_is_to_end_when_idle_does_not_wait_for_a_registry_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingRegistryError):
        Worker(Store(tmp_path), "w", load_handlers).run(until_idle=True)


def test_a_registry_that_is_away_is_asked_ever_more_seldom_but_not_for_having_been_away_long_ago(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, pauses = [0.0], []
    worked_s = iter([0.0, 0.0, 0.0, 3600.0, 0.0, 3600.0])
    worker = Worker(store, "w", load_handlers)

    def take_jobs(registry: Registry, until_idle: bool) -> None:
        now_s[0] += next(worked_s)
        raise RegistryUnavailableError("restarted")

    def pause(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 6:
            worker.stop.set()

    monkeypatch.setattr("hplm.jobs.worker_loop.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(worker, "_cleaning", lambda registry: nullcontext())
    monkeypatch.setattr(worker, "_take_jobs", take_jobs)
    monkeypatch.setattr(worker.stop, "wait", pause)
    worker.run()
    assert pauses == [1.0, 2.0, 4.0, 1.0, 2.0, 1.0]


def test_what_is_no_exception_fails_its_job_and_not_the_worker(
    service: ManageService, store: Store, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = TextEncoder.encode

    def encode(self: TextEncoder, texts: Sequence[Any]) -> Any:
        if any("panic" in text for text in texts if isinstance(text, str)):
            raise Panic
        return really(self, texts)

    monkeypatch.setattr(TextEncoder, "encode", encode)
    bad = create_tenant(service, "bad", colours(50, labels=["red", "panic"]))
    good = create_tenant(service, "good")
    Worker(store, "w", load_handlers).run(until_idle=True)
    failed = registry.job(bad)
    assert failed.error is not None
    assert (failed.state, failed.error["code"], failed.attempts) == ("failed", "INTERNAL", 1)
    assert registry.job(good).state == "done"


@pytest.mark.parametrize("ends", ["as data that cannot be learned", "cancelled", "as a disk that fails"])
def test_a_job_that_fails_lets_go_of_what_it_had_in_memory(
    service: ManageService, store: Store, registry: Registry, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    job, had = create_tenant(service, "acme"), []

    def train(*_: Any, **__: Any) -> None:
        features = np.ones(10)
        had.append(weakref.ref(features))
        try:
            raise OSError(errno.EIO, "failed")
        except OSError as failed:
            if "disk" in ends:
                raise
            raise (DataError if "data" in ends else JobCancelledError)(str(features)) from failed

    monkeypatch.setattr(tenant_job, "train_tenant", train)
    gc.disable()
    try:
        Worker(store, "w", load_handlers, timings=JobTimings(lease_s=0.2, renew_every_s=0.1, report_every_s=0.1)).run(
            until_idle=True
        )
        assert registry.job(job).state == ("cancelled" if ends == "cancelled" else "failed")
        assert had
        assert all(one() is None for one in had)
    finally:
        gc.enable()


def keeps_then_saves(monkeypatch: pytest.MonkeyPatch, kept: Path, errors: Iterable[Exception]) -> list[bool]:
    """Let jobs write `kept` and fail with each of `errors`, then save; whether it was there is told each time."""
    found, really, left = [], tenants.save, iter(errors)

    def save(*args: Any) -> None:
        found.append(kept.exists())
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.touch()
        if (error := next(left, None)) is not None:
            raise error
        really(*args)

    monkeypatch.setattr(tenants, "save", save)
    return found


@pytest.mark.parametrize(("refusals", "why"), [(1, errno.ENOSPC), (1, errno.EROFS), (MOST_ATTEMPTS, errno.ENOSPC)])
def test_a_disk_that_takes_nothing_for_a_while_costs_a_job_nothing_that_it_has_kept(
    service: ManageService,
    store: Store,
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    refusals: int,
    why: int,
) -> None:
    job = create_tenant(service, "acme", colours(60))
    kept = store.scratch(job) / "kept.pt"
    found = keeps_then_saves(monkeypatch, kept, [OSError(why, os.strerror(why)) for _ in range(refusals)])
    Worker(store, "w", load_handlers, timings=JobTimings(lease_s=0.5, renew_every_s=0.1, report_every_s=0.1)).run(
        until_idle=True
    )
    ended = registry.job(job)
    if refusals < MOST_ATTEMPTS:
        assert (ended.state, found) == ("done", [False, True])
    else:
        assert ended.error is not None
        assert (ended.state, ended.error["code"], found) == ("failed", "STORE_UNAVAILABLE", [False, True, True])
    assert not kept.parent.exists()


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_job_whose_device_fails_goes_on_from_what_it_kept_in_another_worker_where_that_is_lost(
    service: ManageService, store: Store, registry: Registry, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    job = create_tenant(service, "acme", colours(60))
    lost, full = RuntimeError("CUDA error: an illegal address"), torch.OutOfMemoryError("CUDA out of memory")
    found = keeps_then_saves(monkeypatch, store.scratch(job) / "kept.pt", [lost if is_lost else full])

    def synchronize(device: object) -> None:
        raise RuntimeError("CUDA error: an illegal address")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    timings = JobTimings(lease_s=0.5, renew_every_s=0.1, report_every_s=0.1)
    if is_lost:
        with pytest.raises(SystemExit) as ended:
            Worker(store, "w", load_handlers, timings=timings).run(until_idle=True)
        assert (ended.value.code, registry.job(job).state) == (HUNG, "queued")
    Worker(store, "x", load_handlers, timings=timings).run(until_idle=True)
    assert (registry.job(job).state, registry.job(job).attempts, found) == ("done", 2, [False, True])


def test_what_a_job_kept_to_go_on_from_goes_when_it_has_ended(
    service: ManageService, store: Store, registry: Registry
) -> None:
    source = {"upload": upload(service, corpus(), "c.txt")}
    many = {**QUICK_DOMAIN, "tokens": 10_000_000}
    job = ask(service, "domain.create", domain="law", corpus=source, settings=many)["job"]
    with at_work(store):
        until(lambda: registry.job(job).step == PRETRAIN, 60)
    assert registry.job(job).state == "queued"
    garbage_collection.collect(store, registry, time.time() + 1000)
    assert any(store.scratch(job).iterdir())
    ask(service, "job.cancel", job=job)
    garbage_collection.collect(store, registry, time.time() + 1000)
    assert not store.scratch(job).exists()
