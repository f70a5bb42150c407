"""Jobs wait in order and workers take leases of them, on both databases."""

from __future__ import annotations

from contextlib import closing

import pytest

from hplm.core import wire
from hplm.errors import LeaseLostError, RegistryUnavailableError, UnknownJobError
from hplm.registry.records import PLAN, UNFINISHED, DomainVersion, Job
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests.unit.hplm.registry.making import NOW_S, publish, publish_branch

LEASE_S = 30.0


def submit(registry: Registry, subject: str, **request: object) -> Job:
    return registry.submit_job(f"{subject.partition(':')[0]}.update", subject, request, NOW_S)


def claim(registry: Registry, after_s: float = 0.0, worker: str = "w") -> Job | None:
    return registry.claim_job(worker, NOW_S + after_s, LEASE_S)


def claimed(registry: Registry, after_s: float = 0.0, worker: str = "w") -> Job:
    job = claim(registry, after_s, worker)
    assert job is not None
    return job


def test_a_submitted_job_waits_and_keeps_its_request(registry: Registry) -> None:
    upload = registry.start_upload(1, "a", NOW_S)
    request = {"tenant": "films", "data": {"train": {"upload": upload.id}}, "settings": {"epochs": 3}}
    job = registry.submit_job("tenant.create", "tenant:films", request, NOW_S)
    assert (job.state, job.request, job.attempts, job.progress) == ("queued", request, 0, 0.0)
    assert registry.job(job.id) == job
    with pytest.raises(UnknownJobError):
        registry.job("other")


def test_clients_follow_a_job_for_as_long_as_the_registry_does() -> None:
    assert wire.JOB_UNFINISHED == UNFINISHED


def test_jobs_are_listed_newest_first_and_by_state(registry: Registry) -> None:
    first, second, third = (submit(registry, f"tenant:{name}") for name in "abc")
    registry.cancel_job(second.id, NOW_S)
    assert [job.id for job in registry.jobs()] == [third.id, second.id, first.id]
    assert [job.id for job in registry.jobs(states=["queued"])] == [third.id, first.id]
    assert [job.id for job in registry.jobs(limit=1)] == [third.id]
    assert registry.jobs(states=[]) == []
    assert registry.count_jobs(NOW_S) == {"queued": 2, "cancelled": 1}
    claimed(registry)
    assert registry.count_jobs(NOW_S + LEASE_S - 1) == {"queued": 1, "running": 1, "cancelled": 1}
    assert registry.count_jobs(NOW_S + LEASE_S + 1) == {"queued": 1, "lost": 1, "cancelled": 1}
    # By the clock alone it would be.
    living = registry.count_jobs(NOW_S + LEASE_S + 1, expired=lambda over: set())
    assert living == {"queued": 1, "running": 1, "cancelled": 1}


def test_a_list_of_jobs_says_of_their_requests_only_whether_they_change_anything(registry: Registry) -> None:
    submit(registry, "tenant:a", settings={"epochs": 3})
    submit(registry, "tenant:a", settings={"epochs": 3}, dry_run=True)
    submit(registry, "tenant:a", settings={"epochs": 3}, dry_run=False)
    assert [job.request for job in registry.jobs()] == [{"dry_run": one} for one in (False, True, False)]


def test_where_nothing_is_free_jobs_are_looked_through_once_so_not_while_others_wait_to_write(
    registry: Registry,
) -> None:
    for _ in range(2):
        submit(registry, "tenant:a")
    claimed(registry)
    looks: list[object] = []

    def expired(over: object) -> set[str]:
        looks.append(over)
        return set()

    assert registry.claim_job("another", NOW_S, LEASE_S, expired=expired) is None
    assert len(looks) == 1


def test_the_oldest_job_is_claimed_first_whatever_the_clock_said(registry: Registry) -> None:
    first = registry.submit_job("k", "tenant:a", {}, NOW_S)
    second = registry.submit_job("k", "tenant:b", {}, NOW_S - 3600)
    assert [claimed(registry).id, claimed(registry).id] == [first.id, second.id]
    assert claim(registry) is None


def test_dry_runs_are_claimed_before_the_jobs_that_wait_in_their_own_order(registry: Registry) -> None:
    names = ("domain:b/law", "tenant:a", "plan:tenant:a", "plan:domain:b/law", "plan:tenant:a", "tenant:b")
    domain, tenant, first, second, behind, last = (submit(registry, subject) for subject in names)
    assert [claimed(registry).id for _ in range(2)] == [first.id, second.id]
    # Of a subject only one at a time, of dry runs too.
    assert claimed(registry).id == domain.id
    registry.finish_job(first.id, "w", NOW_S)
    assert [claimed(registry).id for _ in range(3)] == [behind.id, tenant.id, last.id]
    assert claim(registry) is None


def test_a_stream_of_dry_runs_keeps_no_job_waiting_for_ever(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hplm.registry.jobs.OVERTAKEN", 3)
    job = submit(registry, "tenant:a")
    plans = [submit(registry, f"plan:tenant:{number}").id for number in range(5)]
    assert [claimed(registry).id for _ in range(6)] == [*plans[:3], job.id, *plans[3:]]


def test_a_claimed_job_runs_and_reports(registry: Registry) -> None:
    submit(registry, "tenant:a")
    job = claimed(registry, 5)
    assert (job.state, job.worker, job.started_s, job.attempts) == ("running", "w", NOW_S + 5, 1)
    assert not registry.report_job(job.id, "w", NOW_S + 6, LEASE_S, step="train", progress=0.5, eta_s=12.0)
    found = registry.job(job.id)
    assert (found.step, found.progress, found.eta_s) == ("train", 0.5, 12.0)


@pytest.mark.parametrize(
    ("how", "state"),
    [
        ({"result": {"version": 3}}, "done"),
        ({"error": {"code": "BAD_DATA", "message": "one class"}}, "failed"),
        ({"cancelled": True}, "cancelled"),
    ],
    ids=["done", "failed", "cancelled"],
)
def test_a_job_ends_once_with_what_came_of_it(registry: Registry, how: dict[str, object], state: str) -> None:
    submit(registry, "tenant:a")
    job = claimed(registry)
    registry.finish_job(job.id, "w", NOW_S + 9, **how)  # type: ignore[arg-type]
    found = registry.job(job.id)
    assert (found.state, found.ended_s) == (state, NOW_S + 9)
    assert (found.result, found.error) == (how.get("result"), how.get("error"))
    with pytest.raises(LeaseLostError, match=state):
        registry.finish_job(job.id, "w", NOW_S + 9)
    assert claim(registry, 1000) is None


def test_a_lease_that_ran_out_is_anothers_and_the_first_worker_hears_of_it(registry: Registry) -> None:
    submit(registry, "tenant:a")
    job = claimed(registry, worker="first")
    assert claim(registry, LEASE_S - 1, "second") is None
    again = claimed(registry, LEASE_S, "second")
    assert (again.id, again.worker, again.attempts) == (job.id, "second", 2)
    for late in (
        lambda: registry.report_job(job.id, "first", NOW_S, LEASE_S, step="", progress=0, eta_s=None),
        lambda: registry.finish_job(job.id, "first", NOW_S),
        lambda: registry.release_job(job.id, "first", NOW_S),
    ):
        with pytest.raises(LeaseLostError, match="second runs it"):
            late()
    assert registry.job(job.id) == again


def test_a_lease_that_ran_out_while_the_registry_was_away_can_be_left_to_its_worker(registry: Registry) -> None:
    submit(registry, "tenant:a")
    submit(registry, "tenant:a")
    other = submit(registry, "tenant:b")
    job = claimed(registry, worker="first")
    late_s = NOW_S + 10 * LEASE_S
    # What waits can be taken all the same.
    for expected in (other.id, None):
        found = registry.claim_job("second", late_s, LEASE_S, expired=lambda over: ())
        assert (found.id if found else None) == expected
    registry.report_job(job.id, "first", late_s, LEASE_S, step="", progress=0.5, eta_s=None)
    assert registry.job(job.id).attempts == 1


def test_who_finds_nothing_to_do_waits_for_nobody_who_writes(store: Store, registry: Registry) -> None:
    job = submit(registry, "tenant:a")
    registry.cancel_job(job.id, NOW_S)
    upload = registry.start_upload(1, "a", NOW_S)
    with closing(Registry.open(store)) as other, other._database.writing():
        assert claim(registry) is None
        assert registry.drop_uploads(before_s=NOW_S) == []
    assert registry.uploads() == [upload]


def test_who_would_take_over_hears_that_leases_cannot_be_renewed_now(
    store: Store, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(registry, "tenant:a")
    claimed(registry, worker="first")
    monkeypatch.setattr("hplm.registry.database.BUSY_S", 0.1)
    monkeypatch.setattr("hplm.registry.database.POSTGRES_OPTIONS", "-c lock_timeout=100ms")
    with closing(Registry.open(store)) as other:
        assert other.claim_job("second", NOW_S, LEASE_S) is None
        with registry._database.writing(), pytest.raises(RegistryUnavailableError):
            other.claim_job("second", NOW_S, LEASE_S)


def test_a_report_renews_the_lease(registry: Registry) -> None:
    submit(registry, "tenant:a")
    job = claimed(registry)
    registry.report_job(job.id, "w", NOW_S + 20, LEASE_S, step="", progress=0, eta_s=None)
    assert claim(registry, 40, "other") is None
    assert claimed(registry, 50, "other").id == job.id


def test_a_job_that_loses_three_workers_fails(registry: Registry) -> None:
    job = submit(registry, "tenant:a")
    for attempt in range(3):
        assert claimed(registry, attempt * LEASE_S).attempts == attempt + 1
    assert claim(registry, 3 * LEASE_S) is None
    found = registry.job(job.id)
    assert found.state == "failed"
    assert found.error is not None
    assert found.error["code"] == "WORKER_LOST"


@pytest.mark.parametrize("dropped", [True, False])
def test_uploads_that_go_with_a_job_go_with_one_whose_worker_is_lost_too(registry: Registry, dropped: bool) -> None:
    upload = registry.start_upload(1, "a", NOW_S)
    submit(registry, "tenant:a", data={"train": {"upload": upload.id}}, drop_uploads=dropped)
    for attempt in range(4):
        claim(registry, attempt * (LEASE_S + 1))
    assert registry.jobs()[0].state == "failed"
    assert registry.drop_uploads(before_s=NOW_S - 1) == ([upload.id] if dropped else [])


def test_after_a_job_that_failed_so_the_next_of_its_subject_starts(registry: Registry) -> None:
    submit(registry, "tenant:a")
    second = submit(registry, "tenant:a")
    for attempt in range(3):
        claimed(registry, attempt * LEASE_S)
    assert claimed(registry, 3 * LEASE_S).id == second.id


def test_a_clock_that_jumped_back_holds_no_job_for_long(registry: Registry) -> None:
    submit(registry, "tenant:a")
    job = claimed(registry, 3600, "lost")
    assert claimed(registry, 0, "other").id == job.id


def test_jobs_of_one_subject_run_one_after_another(registry: Registry) -> None:
    first, second, other = (submit(registry, subject) for subject in ("tenant:a", "tenant:a", "tenant:b"))
    assert claimed(registry, worker="x").id == first.id
    assert claimed(registry, worker="y").id == other.id
    assert claim(registry, worker="z") is None
    registry.finish_job(first.id, "x", NOW_S)
    assert claimed(registry, worker="z").id == second.id


def test_a_tenants_job_waits_while_one_of_its_domain_runs(registry: Registry) -> None:
    named = {"base": "b"}
    domain = submit(registry, "domain:b/law")
    assert claimed(registry, worker="x").id == domain.id
    waiting = submit(registry, "tenant:a", domain="law", **named)
    behind = submit(registry, "tenant:a", domain="other", **named)
    free = submit(registry, "tenant:c", domain="other", **named)
    assert claimed(registry, worker="y").id == free.id
    assert claim(registry, worker="y") is None
    registry.finish_job(domain.id, "x", NOW_S)
    assert claimed(registry, worker="y").id == waiting.id
    assert claim(registry, worker="y") is None
    registry.finish_job(waiting.id, "y", NOW_S)
    assert claimed(registry, worker="y").id == behind.id


def test_an_update_that_names_no_domain_waits_for_that_which_its_tenant_was_moved_to(
    registry: Registry, root: DomainVersion
) -> None:
    law = publish_branch(registry, "law", root)
    publish(registry, "a", root)
    domain = submit(registry, "domain:b/law")
    assert claimed(registry, worker="x").id == domain.id
    job = submit(registry, "tenant:a", base="b", domain="general", stays=True)
    other = submit(registry, "tenant:a", base="b", domain="general", stays=False)
    publish(registry, "a", law, expected=1)
    assert claim(registry, worker="y") is None
    registry.rollback_tenant("a", 1, NOW_S)
    assert registry.job(job.id).request["domain"] == "general"
    registry.rollback_tenant("a", 2, NOW_S)
    registry.finish_job(domain.id, "x", NOW_S)
    assert claimed(registry, worker="y").request == {**job.request, "domain": "law"}
    assert registry.job(other.id).request == other.request


def test_a_domain_of_the_same_name_over_another_base_holds_nobody_up(registry: Registry) -> None:
    submit(registry, "domain:b/law")
    claimed(registry)
    job = submit(registry, "tenant:a", domain="law", base="c")
    assert claimed(registry).id == job.id


def test_a_queued_job_is_cancelled_at_once(registry: Registry) -> None:
    job = submit(registry, "tenant:a")
    cancelled = registry.cancel_job(job.id, NOW_S + 1)
    assert (cancelled.state, cancelled.ended_s) == ("cancelled", NOW_S + 1)
    assert claim(registry) is None
    with pytest.raises(UnknownJobError):
        registry.cancel_job("other", NOW_S)


def test_a_running_job_hears_that_it_is_to_be_cancelled(registry: Registry) -> None:
    submit(registry, "tenant:a")
    job = claimed(registry)
    asked = registry.cancel_job(job.id, NOW_S)
    assert (asked.state, asked.cancel_requested) == ("running", True)
    assert registry.report_job(job.id, "w", NOW_S, LEASE_S, step="", progress=0, eta_s=None)


def test_a_job_whose_worker_is_lost_while_it_is_cancelled_is_not_begun_again(registry: Registry) -> None:
    submit(registry, "tenant:a")
    job = claimed(registry)
    registry.cancel_job(job.id, NOW_S)
    assert claim(registry, LEASE_S) is None
    assert registry.job(job.id).state == "cancelled"


@pytest.mark.parametrize("ended", ["cancelled", "failed"])
def test_a_job_that_ends_with_its_worker_does_not_wait_for_its_domain(registry: Registry, ended: str) -> None:
    job = submit(registry, "tenant:a", domain="law", base="b")
    for lost in range(3 if ended == "failed" else 1):
        claimed(registry, after_s=2 * lost * LEASE_S)
    if ended == "cancelled":
        registry.cancel_job(job.id, NOW_S)
    submit(registry, "domain:b/law")
    domain = claimed(registry, after_s=5 * LEASE_S, worker="x")
    for late_s in (8 * LEASE_S, 8.5 * LEASE_S):
        registry.report_job(domain.id, "x", NOW_S + late_s, LEASE_S, step="", progress=0, eta_s=None)
        assert claim(registry, after_s=late_s, worker="y") is None
    assert registry.job(job.id).state == ended


def test_an_ended_job_cannot_be_cancelled(registry: Registry) -> None:
    submit(registry, "tenant:a")
    job = claimed(registry)
    registry.finish_job(job.id, "w", NOW_S, result={})
    assert registry.cancel_job(job.id, NOW_S) == registry.job(job.id)
    assert registry.job(job.id).state == "done"


def test_a_job_given_back_is_queued_as_if_it_had_not_begun(registry: Registry) -> None:
    job = submit(registry, "tenant:a")
    claimed(registry)
    registry.report_job(job.id, "w", NOW_S, LEASE_S, step="train", progress=0.5, eta_s=1.0)
    registry.release_job(job.id, "w", NOW_S)
    assert registry.job(job.id) == job
    assert claimed(registry).attempts == 1
    registry.cancel_job(job.id, NOW_S)
    registry.release_job(job.id, "w", NOW_S)
    assert registry.job(job.id).state == "cancelled"


def start_local(registry: Registry, subject: str, after_s: float = 0.0, worker: str = "command") -> Job:
    kind = f"{subject.partition(':')[0]}.create"
    return registry.start_local_job(kind, subject, {"dry_run": False}, worker, NOW_S + after_s, LEASE_S)


def test_a_local_job_runs_from_the_start_and_no_worker_ever_takes_it(registry: Registry) -> None:
    job = start_local(registry, "tenant:a")
    assert (job.state, job.worker, job.local, job.attempts) == ("running", "command", True, 1)
    behind = submit(registry, "tenant:a")
    assert claim(registry) is None
    # Its command is lost: its job fails, and the next of the tenant begins.
    assert claimed(registry, LEASE_S + 1).id == behind.id
    lost = registry.job(job.id)
    assert lost.error is not None
    assert (lost.state, lost.error["code"]) == ("failed", "WORKER_LOST")
    assert "run the command again" in lost.error["message"]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_lost_local_job_that_has_published_is_done_and_one_that_was_to_be_cancelled_is_cancelled(
    registry: Registry, root: DomainVersion, is_cancelled: bool
) -> None:
    made, other = start_local(registry, "tenant:films"), start_local(registry, "tenant:other")
    registry.publish_tenant("films", root.id, "tenants/films/1", NOW_S, about={"job": made.id}, number=1, expected=None)
    if is_cancelled:
        for job in (made, other):
            registry.cancel_job(job.id, NOW_S)
    assert claim(registry, LEASE_S + 1) is None
    done = registry.job(made.id)
    assert (done.state, done.result, done.error) == ("done", {"version": 1, "published": True}, None)
    assert registry.job(other.id).state == ("cancelled" if is_cancelled else "failed")


def test_a_local_job_begins_only_when_its_subject_has_no_other_job_and_ends_those_that_are_lost(
    registry: Registry,
) -> None:
    first = start_local(registry, "tenant:a", worker="killed")
    assert start_local(registry, "tenant:a", LEASE_S - 1).id == first.id
    second = start_local(registry, "tenant:a", LEASE_S + 1)
    assert (second.worker, registry.job(first.id).state) == ("command", "failed")
    waiting = submit(registry, "tenant:b")
    assert start_local(registry, "tenant:b", 10 * LEASE_S).id == waiting.id
    claimed(registry)
    assert start_local(registry, "tenant:b", 10 * LEASE_S).id == waiting.id
    # A dry run waits for nobody.
    submit(registry, f"{PLAN}tenant:c")
    assert start_local(registry, f"{PLAN}tenant:c").local


@pytest.mark.parametrize(("is_counted", "state"), [(False, "cancelled"), (True, "failed")])
def test_a_local_job_that_is_given_back_ends(registry: Registry, is_counted: bool, state: str) -> None:
    job = start_local(registry, "tenant:a")
    assert not registry.release_job(job.id, "command", NOW_S, counted=is_counted)
    assert registry.job(job.id).state == state
    assert claim(registry) is None
