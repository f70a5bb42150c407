"""The part of the registry that holds jobs: a queue from which worker processes take leases."""

from __future__ import annotations

import heapq
import json
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, delete, func, insert, or_, select, true, update

from hplm.errors import LeaseLostError, UnknownJobError, WorkerLostError
from hplm.registry.database import RegistryPart
from hplm.registry.records import PLAN, UNFINISHED, Job, JobState
from hplm.registry.schema import domain_versions, domains, jobs, tenant_versions
from hplm.registry.uploads import check_uploads, expire_uploads, uploads_to_drop

MOST_ATTEMPTS = 3
WORKER_LOST = {
    "code": WorkerLostError.code,
    "message": f"the worker process of this job was lost {MOST_ATTEMPTS} times; see its log",
}
COMMAND_LOST = {
    "code": WorkerLostError.code,
    "message": "the command that ran this job was killed or lost the registry, and no worker process can read its files: "
    "run the command again",
}
# Decides which leases have expired, of those that are past by the clock: maps ids of jobs and lease ends to ids of jobs.
Expired = Callable[[Mapping[str, float]], Collection[str]]
# A dry run is short and its client waits, so it is taken this many places before its turn: before all jobs that may wait.
# No job is overtaken by more dry runs than this, however many come.
OVERTAKEN = 10_000
# The key of a cascade job's request with the domain that each level stands on, by base.
DOMAINS = "domains"
# The progress of a job that no process runs.
NOT_BEGUN = {"step": "", "progress": 0.0, "eta_s": None}
_COLUMNS = tuple(jobs.c[field.name] for field in fields(Job))


class Jobs(RegistryPart):
    """A queue of jobs: dry runs first, otherwise in order, and one at a time for each subject.

    A worker process holds a job by a lease that it renews. A local job is different: the command that inserts it runs
    it, and no other process ever takes it.
    """

    def submit_job(self, kind: str, subject: str, request: dict[str, Any], now_s: float) -> Job:
        """Queue a job. Its `subject` is `tenant:<name>` or `domain:<base>/<name>`; a dry run's has PLAN before it.

        Raises UnknownUploadError.
        """
        with self._database.writing() as connection:
            check_uploads(connection, request)
            return _insert(connection, kind, subject, request, now_s, state="queued", local=False, attempts=0)

    def start_local_job(
        self,
        kind: str,
        subject: str,
        request: dict[str, Any],
        worker: str,
        now_s: float,
        lease_s: float,
        *,
        expired: Expired = set,
    ) -> Job:
        """Insert a job that `worker` runs already, in one transaction, so that no worker process can take it.

        Jobs of one subject run one by one: if the subject has an unfinished job, return that job and insert nothing.
        Local jobs of the subject whose leases have `expired` are ended first. A dry run waits for no other job.
        """
        with self._database.writing() as connection:
            unfinished = _jobs(connection, jobs.c.subject == subject, jobs.c.state.in_(UNFINISHED))
            lost = expired(_overdue([job for job in unfinished if job.local], now_s, lease_s))
            for job in unfinished:
                if job.id in lost:
                    _end_lost(connection, job, now_s)
                elif not subject.startswith(PLAN):
                    return job
            lease = {"worker": worker, "lease_until_s": now_s + lease_s, "started_s": now_s}
            return _insert(connection, kind, subject, request, now_s, state="running", local=True, attempts=1, **lease)

    def end_lost_local_jobs(self, before_s: float, now_s: float) -> None:
        """End the local jobs whose leases ended before `before_s`: their commands were killed."""
        are_lost = (jobs.c.state == "running", jobs.c.local, jobs.c.lease_until_s < before_s)
        with self._database.reading() as connection:
            if not _jobs(connection, *are_lost):
                return
        with self._database.writing() as connection:
            for job in _jobs(connection, *are_lost):
                _end_lost(connection, job, now_s)

    def job(self, job_id: str) -> Job:
        """Return a job. Raises UnknownJobError."""
        with self._database.reading() as connection:
            return _job(connection, job_id)

    def creating(self, subject: str, base: str | None = None) -> str | None:
        """Return the id of an unfinished job that creates the tenant or domain of this subject; None if there is none.

        With `base`, only a job over that base counts.
        """
        wanted = (
            jobs.c.subject == subject,
            jobs.c.kind.in_(("tenant.create", "domain.create")),
            jobs.c.state.in_(UNFINISHED),
        )
        query = select(jobs.c.id).where(*wanted, jobs.c.cancel_requested.is_(False)).order_by(jobs.c.seq).limit(1)
        if base is not None:
            query = query.where(_is_over(base))
        with self._database.reading() as connection:
            return connection.scalar(query)

    def jobs(self, *, states: Collection[JobState] | None = None, limit: int = 100) -> list[Job]:
        """List jobs, newest first: at most `limit`, only those in `states` if given. Requests hold only `dry_run`."""
        columns = [column for column in _COLUMNS if column.name != "request"]
        dry_run = jobs.c.request["dry_run"].as_boolean().label("request")
        query = select(dry_run, *columns).order_by(jobs.c.seq.desc()).limit(limit)
        with self._database.reading() as connection:
            rows = connection.execute(query.where(jobs.c.state.in_(states)) if states is not None else query)
            return [Job(**{**row._mapping, "request": {"dry_run": bool(row.request)}}) for row in rows]

    def count_jobs(self, now_s: float, *, expired: Expired = set) -> Counter[str]:
        """Count the jobs in each state. A running job whose lease has `expired` counts as `lost`."""
        overdue = select(jobs.c.id, jobs.c.lease_until_s).where(jobs.c.state == "running", jobs.c.lease_until_s < now_s)
        with self._database.reading() as connection:
            by_state = connection.execute(select(jobs.c.state, func.count()).group_by(jobs.c.state))
            counts = Counter({state: count for state, count in by_state})
            lost = len(expired({job: until_s for job, until_s in connection.execute(overdue)}))
        counts.update(running=-lost, lost=lost)
        return +counts

    def claim_job(self, worker: str, now_s: float, lease_s: float, *, expired: Expired = set) -> Job | None:
        """Take the first job that can start, until `now_s + lease_s`; return None if there is none.

        The first is the oldest dry run, else the oldest job, see OVERTAKEN. It is queued, or its lease has `expired`.
        Jobs of one subject run one by one in their order. A tenant's job waits while a job of its domain runs, see
        `base` and `domain` of its request, or DOMAINS.

        A job that lost its worker process for the third time fails, and one that was to be cancelled is cancelled. If
        such a job has published, it is taken once more instead, because it is done. A local job is never taken.

        While jobs run, this opens a write transaction even if no job is free. It raises RegistryUnavailableError when
        running workers could not renew their leases either, so that the caller knows that no lease has expired.
        """
        with self._database.reading() as connection:
            # Idle workers ask often and must not block writers.
            is_idle = _decide(connection, now_s, lease_s, expired) == ([], None)
            running = select(jobs.c.id).where(jobs.c.state == "running").limit(1)
            if is_idle and connection.scalar(running) is None:
                return None
        with self._database.writing() as connection:
            if is_idle:
                # The write lock alone was wanted. Looking again would take long while many wait for it.
                return None
            lost, free = _decide(connection, now_s, lease_s, expired)
            for row in lost:
                _end_lost(connection, _job(connection, row.id), now_s)
            if free is None:
                return None
            lease = {"worker": worker, "lease_until_s": now_s + lease_s, "started_s": now_s}
            _set(connection, free.id, **NOT_BEGUN, **lease, state="running", attempts=free.attempts + 1)
            return _job(connection, free.id)

    def report_job(
        self,
        job_id: str,
        worker: str,
        now_s: float,
        lease_s: float,
        *,
        step: str,
        progress: float,
        eta_s: float | None,
    ) -> bool:
        """Renew the lease and record the progress; return whether the job is to be cancelled. Raises LeaseLostError."""
        with self._database.writing() as connection:
            job = _held_job(connection, job_id, worker)
            _set(connection, job_id, lease_until_s=now_s + lease_s, step=step, progress=progress, eta_s=eta_s)
            return job.cancel_requested

    def finish_job(
        self,
        job_id: str,
        worker: str,
        now_s: float,
        *,
        result: dict[str, Any] | None = None,
        error: dict[str, str] | None = None,
        cancelled: bool = False,
    ) -> None:
        """End a job as done with `result`, failed with `error`, or cancelled. Raises LeaseLostError."""
        state: JobState = "cancelled" if cancelled else "failed" if error is not None else "done"
        with self._database.writing() as connection:
            _held_job(connection, job_id, worker)
            _end(connection, job_id, state, now_s, result=result, error=error)

    def release_job(self, job_id: str, worker: str, now_s: float, *, counted: bool = False) -> bool:
        """Give a job back to the queue; return False if it ended instead. Raises LeaseLostError.

        `counted`: this was one of the job's MOST_ATTEMPTS; otherwise the job is as if it had not begun. A job that was
        to be cancelled ends cancelled. A local job ends in any case: done if it has published, failed if `counted`,
        otherwise cancelled.
        """
        with self._database.writing() as connection:
            job = _held_job(connection, job_id, worker)
            is_cancelled = job.cancel_requested or (job.local and not counted)
            if job.local or (is_cancelled and _published_number(connection, job) is None):
                _end_lost(connection, job, now_s, is_cancelled=is_cancelled)
                return False
            no_lease = {"worker": None, "lease_until_s": None, "started_s": None}
            _set(connection, job_id, **NOT_BEGUN, **no_lease, state="queued", attempts=job.attempts - (not counted))
        return True

    def cancel_job(self, job_id: str, now_s: float) -> Job:
        """Cancel a job: a queued job ends at once, a running job when its process sees it. Raises UnknownJobError.

        A job that has ended stays as it is. A queued job that has published will be done, not cancelled.
        """
        with self._database.writing() as connection:
            job = _job(connection, job_id)
            if job.state == "queued" and _published_number(connection, job) is None:
                _end(connection, job_id, "cancelled", now_s)
            if job.state in UNFINISHED:
                _set(connection, job_id, cancel_requested=True)
            return _job(connection, job_id)

    def forget_jobs(self, before_s: float) -> None:
        """Delete the rows of jobs that ended before `before_s`."""
        with self._database.writing() as connection:
            connection.execute(delete(jobs).where(jobs.c.ended_s < before_s))


def unfinished_subjects(connection: Connection) -> set[str]:
    """Return the subjects of unfinished jobs."""
    return set(connection.scalars(select(jobs.c.subject).where(jobs.c.state.in_(UNFINISHED))))


def at_work_on(connection: Connection, subject: str) -> str | None:
    """Return the id of a running job that will publish the subject's next version; None if there is none."""
    running = (jobs.c.subject == subject, jobs.c.state == "running", jobs.c.cancel_requested.is_(False))
    at_work = (job.id for job in _jobs(connection, *running) if _published_number(connection, job) is None)
    return next(at_work, None)


def jobs_on_domain(connection: Connection, base: str, name: str) -> list[str]:
    """Return ids and subjects of unfinished jobs whose tenant or domain will stand on a domain.

    If the domain were deleted, these jobs would fail with a conflict, hours later.
    """
    # The database compares the request's keys: many jobs may wait, and decoding a request takes longer.
    keys = {key: jobs.c.request[key].as_string() for key in ("base", "parent", "domain")}
    query = select(jobs.c.id, jobs.c.subject).where(
        jobs.c.state.in_(UNFINISHED),
        jobs.c.cancel_requested.is_(False),
        jobs.c.subject != f"domain:{base}/{name}",
        or_(
            and_(keys["base"] == base, func.coalesce(keys["parent"], keys["domain"]) == name),
            _domain_of_level(base) == name,
        ),
        jobs.c.request["dry_run"].as_boolean().is_not(true()),
    )
    return [f"{row.id} ({row.subject})" for row in connection.execute(query.order_by(jobs.c.seq))]


def domains_in_work(connection: Connection, base: str, besides: str) -> set[str]:
    """Return the domains of a base that running jobs started from, without the job `besides`.

    Such a job stands on the version that was current when it began.
    """
    running = select(jobs.c.request).where(jobs.c.state == "running", jobs.c.id != besides)
    used: set[str] = set()
    for request in connection.scalars(running):
        if request.get("base") == base:
            used |= {request[key] for key in ("domain", "parent") if request.get(key) is not None}
        if base in request.get(DOMAINS, {}):
            used.add(request[DOMAINS][base])
    return used


def cancel_all(connection: Connection, subject: str, now_s: float, *, base: str | None = None) -> set[str]:
    """Cancel the unfinished jobs of a deleted subject, because an update would fail with a conflict hours later.

    With `base`, only the jobs over that base. Returns the uploads to drop with the jobs that ended.
    """
    over_base = () if base is None else (_is_over(base),)
    return _cancel(connection, now_s, jobs.c.subject == subject, *over_base)


def cancel_all_over(connection: Connection, base: str, now_s: float) -> set[str]:
    """Cancel the unfinished jobs over a deleted base as `cancel_all` does."""
    return _cancel(connection, now_s, _is_over(base))


def _is_over(base: str) -> ColumnElement[bool]:
    """Return the condition that a job's request names the base, or a level over it."""
    return or_(jobs.c.request["base"].as_string() == base, _domain_of_level(base).is_not(None))


def _domain_of_level(base: str) -> ColumnElement[str]:
    """Return the domain on which a cascade job's level over the base stands; null for other jobs."""
    return jobs.c.request[(DOMAINS, base)].as_string()


def _cancel(connection: Connection, now_s: float, *which: ColumnElement[bool]) -> set[str]:
    """Cancel the unfinished jobs that meet the conditions; return the uploads to drop with the jobs that ended."""
    dropped: set[str] = set()
    for job in _jobs(connection, *which, jobs.c.state.in_(UNFINISHED)):
        if job.state == "running":
            _set(connection, job.id, cancel_requested=True)
        else:
            _end(connection, job.id, "cancelled", now_s)
            dropped |= uploads_to_drop(job.request)
    return dropped


def move_queued_updates(connection: Connection, subject: str, domain_version_id: int) -> None:
    """Move a tenant's queued updates that name no domain to the domain that the tenant stands on now over the same base.

    They then wait for jobs of that domain, and retention keeps the domain's versions for them.
    """
    of_version = select(domains.c.base, domains.c.name).join(domain_versions)
    base, name = connection.execute(of_version.where(domain_versions.c.id == domain_version_id)).one()
    stays = (_is_over(base), jobs.c.request["stays"].as_boolean().is_(true()))
    for job in _jobs(connection, jobs.c.subject == subject, jobs.c.state == "queued", *stays):
        moved = {**job.request}
        if job.request["base"] == base:
            moved["domain"] = name
        if DOMAINS in job.request:
            moved[DOMAINS] = {**job.request[DOMAINS], base: name}
        _set(connection, job.id, request=moved)


def _insert(
    connection: Connection, kind: str, subject: str, request: dict[str, Any], now_s: float, **values: Any
) -> Job:
    job_id = uuid.uuid4().hex
    given = {"id": job_id, "kind": kind, "subject": subject, "request": request, "created_s": now_s}
    connection.execute(insert(jobs).values(**given, **NOT_BEGUN, cancel_requested=False, **values))
    return _job(connection, job_id)


def _set(connection: Connection, job_id: str, **values: Any) -> None:
    connection.execute(update(jobs).where(jobs.c.id == job_id).values(**values))


def _jobs(connection: Connection, *which: ColumnElement[bool]) -> list[Job]:
    """Return the jobs that meet the conditions, in the order of their submission."""
    rows = connection.execute(select(*_COLUMNS).where(*which).order_by(jobs.c.seq))
    return [Job(**row._mapping) for row in rows]


def _job(connection: Connection, job_id: str) -> Job:
    for job in _jobs(connection, jobs.c.id == job_id):
        return job
    raise UnknownJobError(f"there is no job {job_id!r}")


def _held_job(connection: Connection, job_id: str, worker: str) -> Job:
    job = _job(connection, job_id)
    if job.state != "running" or job.worker != worker:
        now = f"{job.worker} runs it" if job.state == "running" else f"it is {job.state}"
        raise LeaseLostError(f"{worker} holds job {job_id} no more, {now}: stop, publish nothing")
    return job


def _overdue(running: Iterable[Job | Row[Any]], now_s: float, lease_s: float) -> dict[str, float]:
    """Return the ends of the leases that are past by the clock, by job.

    A lease that ends later than any lease could was given before the clock jumped back.
    """
    ends = {job.id: job.lease_until_s for job in running if job.lease_until_s is not None}
    return {job_id: until_s for job_id, until_s in ends.items() if not now_s < until_s <= now_s + 2 * lease_s}


def _decide(
    connection: Connection, now_s: float, lease_s: float, expired: Expired
) -> tuple[list[Row[Any]], Row[Any] | None]:
    """Return the jobs that end because their process was lost, and the first job that can start."""
    # Not the whole rows: many jobs may wait. One state at a time, because the index then gives their order.
    columns = (jobs.c.seq, jobs.c.id, jobs.c.subject, jobs.c.state, jobs.c.attempts, jobs.c.local)
    of_lease = (jobs.c.lease_until_s, jobs.c.cancel_requested)
    of_request = (jobs.c.request[key].as_string().label(key) for key in ("base", "domain", DOMAINS))
    query = select(*columns, *of_lease, *of_request).order_by(jobs.c.seq)
    begun = sorted(connection.execute(query.where(jobs.c.state == "running")).all(), key=_turn)
    free = expired(_overdue(begun, now_s, lease_s))
    running = {row.subject for row in begun if row.id not in free}
    lost: list[Row[Any]] = []
    queued, is_plan = query.where(jobs.c.state == "queued"), jobs.c.subject.startswith(PLAN)
    batches = {"yield_per": 100}
    with (
        connection.execute(queued.where(is_plan), execution_options=batches) as plans,
        connection.execute(queued.where(~is_plan), execution_options=batches) as others,
    ):
        for row in heapq.merge(begun, plans, others, key=_turn):
            if row.id in free:
                if row.local:
                    lost.append(row)
                    continue
                if _published_number(connection, row) is not None:
                    return lost, row
                if row.cancel_requested or row.attempts >= MOST_ATTEMPTS:
                    lost.append(row)
                    continue
            if row.subject not in running and not _waits_for_domain(row, running):
                return lost, row
            # Younger jobs of the same subject wait behind this one.
            running.add(row.subject)
    return lost, None


def _turn(row: Row[Any]) -> int:
    """Return the job's place in the queue; the lowest is taken first."""
    return int(row.seq) - OVERTAKEN * row.subject.startswith(PLAN)


def _published_number(connection: Connection, job: Job | Row[Any]) -> int | None:
    """Return the number of the version that a job has published; None if it has not.

    A job that has published only has to be recorded as done.
    """
    kind, _, name = job.subject.partition(":")
    if kind == "tenant":
        v = tenant_versions.c
        query = select(v.number).where(v.tenant == name)
    elif kind == "domain":
        v = domain_versions.c
        base, _, name = name.partition("/")
        query = select(v.number).join(domains).where(domains.c.base == base, domains.c.name == name)
    else:
        return None
    mine = query.where(v.retired_s.is_(None), v.about["job"].as_string() == job.id)
    return connection.scalar(mine.order_by(v.number.desc()).limit(1))


def _waits_for_domain(row: Row[Any], running: set[str]) -> bool:
    """Return whether a tenant's job must wait for a running job of its domain."""
    if not row.subject.startswith("tenant:") or row.domain is None:
        return False
    used = json.loads(row.domains) if row.domains else {row.base: row.domain}
    return any(f"domain:{base}/{domain}" in running for base, domain in used.items())


def _end_lost(connection: Connection, job: Job, now_s: float, *, is_cancelled: bool | None = None) -> None:
    """End a job that its process left: done if it has published, else cancelled if that was asked for, else failed."""
    number = _published_number(connection, job)
    if number is not None:
        _end(connection, job.id, "done", now_s, result={"version": number, "published": True})
    elif job.cancel_requested if is_cancelled is None else is_cancelled:
        _end(connection, job.id, "cancelled", now_s)
    else:
        _end(connection, job.id, "failed", now_s, error=COMMAND_LOST if job.local else WORKER_LOST)
    expire_uploads(connection, uploads_to_drop(job.request))


def _end(
    connection: Connection,
    job_id: str,
    state: JobState,
    now_s: float,
    *,
    result: dict[str, Any] | None = None,
    error: dict[str, str] | None = None,
) -> None:
    values = {"state": state, "ended_s": now_s, "lease_until_s": None, "eta_s": None, "result": result, "error": error}
    if state == "done":
        values["progress"] = 1.0
    _set(connection, job_id, **values)
