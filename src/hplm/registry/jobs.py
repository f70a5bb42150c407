"""The registry's part about jobs: a queue that workers take leases from."""

from __future__ import annotations

import heapq
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, select, true, update

from hplm.errors import LeaseLostError, UnknownJobError, WorkerLostError
from hplm.registry.database import RegistryPart
from hplm.registry.records import PLAN, UNFINISHED, Job, JobState
from hplm.registry.schema import domain_versions, domains, jobs, tenant_versions
from hplm.registry.uploads import check_there, dropped_with, leave_uploads

MOST_ATTEMPTS = 3
LOST = {"code": WorkerLostError.code, "message": f"the worker was lost {MOST_ATTEMPTS} times while at it; see its log"}
# Which of the leases that have run out by the clock, each the end of it by job, are taken to have done so.
Lapsed = Callable[[Mapping[str, float]], Collection[str]]
# The place in the queue of a dry run, which is short and waited for, is so many before its own: before all that may wait. And
# no job is overtaken by more dry runs than that, however many come.
OVERTAKEN = 10_000
# How far one is that nobody is at.
UNBEGUN = {"step": "", "progress": 0.0, "eta_s": None}
_FIELDS = tuple(Job.__dataclass_fields__)


class Jobs(RegistryPart):
    """Jobs wait in order, dry runs before the others, one at a time a subject; a worker holds one by a lease that it renews."""

    def submit_job(self, kind: str, subject: str, request: dict[str, Any], now_s: float) -> Job:
        """Queue a job. Its `subject` is `tenant:<name>` or `domain:<base>/<name>`, of a dry run after PLAN.

        Raises UnknownUploadError.
        """
        job_id = uuid.uuid4().hex
        with self._database.writing() as connection:
            check_there(connection, request)
            connection.execute(
                insert(jobs).values(
                    id=job_id,
                    kind=kind,
                    subject=subject,
                    request=request,
                    state="queued",
                    step="",
                    progress=0.0,
                    created_s=now_s,
                    cancel_requested=False,
                    attempts=0,
                )
            )
            return _job(_row(connection, job_id))

    def job(self, job_id: str) -> Job:
        """Raises UnknownJobError."""
        with self._database.reading() as connection:
            return _job(_row(connection, job_id))

    def creating(self, subject: str) -> str | None:
        """The id of a job that is to create the tenant or domain of this subject; None where there is none."""
        wanted = (
            jobs.c.subject == subject,
            jobs.c.kind.in_(("tenant.create", "domain.create")),
            jobs.c.state.in_(UNFINISHED),
        )
        query = select(jobs.c.id).where(*wanted, jobs.c.cancel_requested.is_(False)).order_by(jobs.c.seq).limit(1)
        with self._database.reading() as connection:
            return connection.execute(query).scalar()

    def jobs(self, *, states: Collection[JobState] | None = None, limit: int = 100) -> list[Job]:
        """The newest first, those in `states` where given, at most `limit`. Of their requests only `dry_run`."""
        columns = [jobs.c[name] for name in _FIELDS if name != "request"]
        dry_run = jobs.c.request["dry_run"].as_boolean().label("dry_run")
        query = select(*columns, dry_run).order_by(jobs.c.seq.desc()).limit(limit)
        with self._database.reading() as connection:
            found = connection.execute(query.where(jobs.c.state.in_(states)) if states is not None else query)
            return [_job(row, request={"dry_run": bool(row.dry_run)}) for row in found]

    def count_jobs(self, now_s: float, *, lapsed: Lapsed = set) -> Counter[str]:
        """How many there are in each state; `lost` of those that run whose worker's lease is over, by `lapsed` too."""
        over = select(jobs.c.id, jobs.c.lease_until_s).where(jobs.c.state == "running", jobs.c.lease_until_s < now_s)
        with self._database.reading() as connection:
            by_state = connection.execute(select(jobs.c.state, func.count()).group_by(jobs.c.state))
            found = Counter({state: count for state, count in by_state})
            lost = len(lapsed({job: until_s for job, until_s in connection.execute(over)}))
        found.update(running=-lost, lost=lost)
        return +found

    def claim_job(self, worker: str, now_s: float, lease_s: float, *, lapsed: Lapsed = set) -> Job | None:
        """Take the first job that can start, until `now_s + lease_s`; None where there is none.

        That is the oldest dry run, else the oldest job, see OVERTAKEN. It is queued, or its worker's lease ran out, by
        `lapsed` too; the others are good. Jobs of one subject go one by one in their order, and a tenant's job waits while
        one of its domain runs (`base` and `domain` of its request). One that lost its worker for the third time fails; one
        that was to be cancelled when it lost it is cancelled. Either is taken once more where it has published, for it is
        done.

        While jobs run it needs the registry for writing, also where none is free: it raises RegistryUnavailableError
        where their workers cannot renew their leases either, so that the caller knows when none has `lapsed`.
        """
        with self._database.reading() as connection:
            # Idle workers ask often, and need not stop those who write.
            is_idle = _decided(connection, now_s, lease_s, lapsed) == ([], None)
            if is_idle and not _are_any_running(connection):
                return None
        with self._database.writing() as connection:
            if is_idle:
                # That it could be locked for writing is all that was asked: with many that wait for one, to look takes long.
                return None
            lost, free = _decided(connection, now_s, lease_s, lapsed)
            for row in lost:
                if row.cancel_requested:
                    _end(connection, row.id, "cancelled", now_s)
                else:
                    _end(connection, row.id, "failed", now_s, error=LOST)
                leave_uploads(connection, dropped_with(_row(connection, row.id).request))
            if free is None:
                return None
            connection.execute(
                update(jobs)
                .where(jobs.c.id == free.id)
                .values(
                    **UNBEGUN,
                    state="running",
                    worker=worker,
                    lease_until_s=now_s + lease_s,
                    started_s=now_s,
                    attempts=free.attempts + 1,
                )
            )
            return _job(_row(connection, free.id))

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
        """Renew the lease and say how far the job is; True where it is to be cancelled. Raises LeaseLostError."""
        with self._database.writing() as connection:
            row = _held_row(connection, job_id, worker)
            connection.execute(
                update(jobs)
                .where(jobs.c.id == job_id)
                .values(lease_until_s=now_s + lease_s, step=step, progress=progress, eta_s=eta_s)
            )
            return bool(row.cancel_requested)

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
            _held_row(connection, job_id, worker)
            _end(connection, job_id, state, now_s, result=result, error=error)

    def release_job(self, job_id: str, worker: str, now_s: float, *, counted: bool = False) -> bool:
        """Give a job back to the queue; False where it was to be cancelled and has ended so. Raises LeaseLostError.

        As if it had not been begun, for the worker stops; `counted` as one of its MOST_ATTEMPTS.
        """
        with self._database.writing() as connection:
            row = _held_row(connection, job_id, worker)
            if row.cancel_requested and not _has_published(connection, row):
                _end(connection, job_id, "cancelled", now_s)
                leave_uploads(connection, dropped_with(row.request))
                return False
            connection.execute(
                update(jobs)
                .where(jobs.c.id == job_id)
                .values(
                    **UNBEGUN,
                    state="queued",
                    worker=None,
                    lease_until_s=None,
                    started_s=None,
                    attempts=row.attempts - (not counted),
                )
            )
        return True

    def cancel_job(self, job_id: str, now_s: float) -> Job:
        """A queued job ends at once, a running one when its worker hears of it; one that has ended stays as it is.

        One that has published is done, whatever became of its worker.

        Raises UnknownJobError.
        """
        with self._database.writing() as connection:
            row = _row(connection, job_id)
            if row.state == "queued" and not _has_published(connection, row):
                _end(connection, job_id, "cancelled", now_s)
            if row.state in UNFINISHED:
                connection.execute(update(jobs).where(jobs.c.id == job_id).values(cancel_requested=True))
            return _job(_row(connection, job_id))

    def forget_jobs(self, before_s: float) -> None:
        """Drop the rows of jobs that ended before `before_s`."""
        with self._database.writing() as connection:
            connection.execute(delete(jobs).where(jobs.c.ended_s < before_s))


def unfinished_subjects(connection: Connection) -> set[str]:
    """What jobs run or wait for."""
    return set(connection.execute(select(jobs.c.subject).where(jobs.c.state.in_(UNFINISHED))).scalars())


def at_work_on(connection: Connection, subject: str) -> str | None:
    """The id of a job that runs and will publish what goes on from the subject as it is now; None where there is none."""
    running = select(jobs).where(
        jobs.c.subject == subject, jobs.c.state == "running", jobs.c.cancel_requested.is_(False)
    )
    return next((row.id for row in connection.execute(running) if not _has_published(connection, row)), None)


def jobs_on_domain(connection: Connection, base: str, name: str) -> list[str]:
    """Ids of unfinished jobs, and what they make, which stands on a domain; they would end in a conflict, hours later."""
    # In the database: many may wait, and a request takes longer to decode than to look into.
    asked = {key: jobs.c.request[key].as_string() for key in ("base", "parent", "domain")}
    query = select(jobs.c.id, jobs.c.subject).where(
        jobs.c.state.in_(UNFINISHED),
        jobs.c.cancel_requested.is_(False),
        jobs.c.subject != f"domain:{base}/{name}",
        asked["base"] == base,
        func.coalesce(asked["parent"], asked["domain"]) == name,
        jobs.c.request["dry_run"].as_boolean().is_not(true()),
    )
    return [f"{row.id} ({row.subject})" for row in connection.execute(query.order_by(jobs.c.seq))]


def domains_in_work(connection: Connection, base: str, besides: str) -> set[str]:
    """Domains of a base that running jobs have started from, whatever version was current then; without the job `besides`."""
    running = select(jobs.c.request).where(jobs.c.state == "running", jobs.c.id != besides)
    requests = [one for one in connection.execute(running).scalars() if one.get("base") == base]
    return {name for one in requests for name in (one.get("domain"), one.get("parent")) if name is not None}


def cancel_all(connection: Connection, subject: str, now_s: float) -> set[str]:
    """What is still to be done with a subject that is gone; else an update would end in a conflict, hours later.

    Returns the uploads that go with what ended.
    """
    waiting = connection.execute(
        select(jobs.c.id, jobs.c.request).where(jobs.c.subject == subject, jobs.c.state == "queued")
    )
    ended = waiting.all()
    for row in ended:
        _end(connection, row.id, "cancelled", now_s)
    running = update(jobs).where(jobs.c.subject == subject, jobs.c.state == "running")
    connection.execute(running.values(cancel_requested=True))
    return {upload_id for row in ended for upload_id in dropped_with(row.request)}


def let_follow(connection: Connection, subject: str, domain_version_id: int) -> None:
    """A tenant is on that now: waiting updates that name no domain stay there, wait for its jobs, and keep what they use."""
    of_version = select(domains.c.name).join(domain_versions, domain_versions.c.domain_id == domains.c.id)
    name = connection.execute(of_version.where(domain_versions.c.id == domain_version_id)).scalar_one()
    waiting = select(jobs.c.id, jobs.c.request).where(
        jobs.c.subject == subject, jobs.c.state == "queued", jobs.c.request["stays"].as_boolean().is_(true())
    )
    for row in connection.execute(waiting).all():
        connection.execute(update(jobs).where(jobs.c.id == row.id).values(request={**row.request, "domain": name}))


def _row(connection: Connection, job_id: str) -> Row[Any]:
    row = connection.execute(select(jobs).where(jobs.c.id == job_id)).first()
    if row is None:
        raise UnknownJobError(f"there is no job {job_id!r}")
    return row


def _job(row: Any, **also: Any) -> Job:
    return Job(**{name: row._mapping[name] for name in _FIELDS if name not in also}, **also)


def _held_row(connection: Connection, job_id: str, worker: str) -> Row[Any]:
    row = _row(connection, job_id)
    if row.state != "running" or row.worker != worker:
        now = f"with {row.worker}" if row.state == "running" else row.state
        raise LeaseLostError(f"job {job_id} is no longer {worker}'s, it is {now}: stop, publish nothing")
    return row


def _are_any_running(connection: Connection) -> bool:
    return connection.execute(select(jobs.c.id).where(jobs.c.state == "running").limit(1)).first() is not None


def _decided(
    connection: Connection, now_s: float, lease_s: float, lapsed: Lapsed
) -> tuple[list[Row[Any]], Row[Any] | None]:
    """Jobs that end because they lost their workers, and the first that can start."""
    # Not the whole rows: many may wait. A state at a time, for so the index has them in their order.
    columns = (jobs.c.seq, jobs.c.id, jobs.c.subject, jobs.c.state, jobs.c.attempts)
    of_lease = (jobs.c.lease_until_s, jobs.c.cancel_requested)
    of_request = (jobs.c.request[key].as_string().label(key) for key in ("base", "domain"))
    query = select(*columns, *of_lease, *of_request).order_by(jobs.c.seq)
    begun = sorted(connection.execute(query.where(jobs.c.state == "running")).all(), key=_turn)
    # One that ends later than any lease could was given before the clock jumped back.
    over = {row.id: row.lease_until_s for row in begun if not now_s < row.lease_until_s <= now_s + 2 * lease_s}
    free = lapsed(over)
    running = {row.subject for row in begun if row.id not in free}
    lost: list[Row[Any]] = []
    queued, is_plan = query.where(jobs.c.state == "queued"), jobs.c.subject.startswith(PLAN)
    some = {"yield_per": 100}
    with (
        connection.execute(queued.where(is_plan), execution_options=some) as plans,
        connection.execute(queued.where(~is_plan), execution_options=some) as others,
    ):
        for row in heapq.merge(begun, plans, others, key=_turn):
            if row.id in free:
                if _has_published(connection, row):
                    return lost, row
                if row.cancel_requested or row.attempts >= MOST_ATTEMPTS:
                    lost.append(row)
                    continue
            if row.subject not in running and not _waits_for_domain(row, running):
                return lost, row
            # Younger jobs of its subject wait behind it.
            running.add(row.subject)
    return lost, None


def _turn(row: Row[Any]) -> int:
    """What jobs are taken by, the lowest first."""
    return int(row.seq) - OVERTAKEN * row.subject.startswith(PLAN)


def _has_published(connection: Connection, row: Row[Any]) -> bool:
    """Whether what the job was to make is there: all that was left to do was to say so."""
    kind, _, name = row.subject.partition(":")
    if kind == "tenant":
        query = select(tenant_versions.c.about).where(
            tenant_versions.c.tenant == name, tenant_versions.c.retired_s.is_(None)
        )
    elif kind == "domain":
        base, _, name = name.partition("/")
        query = (
            select(domain_versions.c.about)
            .join(domains, domains.c.id == domain_versions.c.domain_id)
            .where(domains.c.base == base, domains.c.name == name, domain_versions.c.retired_s.is_(None))
        )
    else:
        return False
    return any(about.get("job") == row.id for about in connection.execute(query).scalars())


def _waits_for_domain(row: Row[Any], running: set[str]) -> bool:
    if not row.subject.startswith("tenant:") or row.domain is None:
        return False
    if row.base is not None:
        return f"domain:{row.base}/{row.domain}" in running
    return any(subject.startswith("domain:") and subject.endswith(f"/{row.domain}") for subject in running)


def _end(
    connection: Connection,
    job_id: str,
    state: JobState,
    now_s: float,
    *,
    result: dict[str, Any] | None = None,
    error: dict[str, str] | None = None,
) -> None:
    ended = {"state": state, "ended_s": now_s, "lease_until_s": None, "eta_s": None, "result": result, "error": error}
    if state == "done":
        ended["progress"] = 1.0
    connection.execute(update(jobs).where(jobs.c.id == job_id).values(**ended))
