"""The manager: answers manage requests from the registry, and queues what takes longer as jobs for a worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar

from hplm.core.settings import ManagerSettings
from hplm.core.wire import CORPUS_ENDINGS, DATA_ENDINGS, UPLOAD_ENDINGS
from hplm.errors import (
    AlreadyThereError,
    BadManageRequestError,
    CorpusTooSmallError,
    DataError,
    DomainInUseError,
    QueueFullError,
    RegistryError,
    UnknownDomainError,
    UnknownTenantError,
    check_ending,
    from_stored,
)
from hplm.manage import requests, views
from hplm.manage.file_survey import survey
from hplm.manage.job_inputs import locate, pinned
from hplm.manage.request_parts import Source, given
from hplm.manage.requests import parse_request
from hplm.manage.uploads import Uploads
from hplm.registry.records import PLAN, UNFINISHED, Job
from hplm.registry.registry import Registry
from hplm.registry.uploads import dropped_with
from hplm.runtime.crash_points import crash_point
from hplm.store.layout import Store

Answer = dict[str, Any]
# A dry run is a short job; who asks for one mostly gets its result at once.
DRY_RUN_WAIT_S = 10.0
DRY_RUN_LOOK_S = 0.1
# Jobs that wait, dry runs too: a worker does one at a time, and every look for the next one reads them.
MOST_QUEUED = 10_000
# For a request that is just opening the registry.
CLOSE_S = 1.0


class ManageService:
    """Safe to use from several threads. Holds nothing but the registry, opened at the first request."""

    def __init__(
        self,
        store: Store,
        settings: ManagerSettings,
        clock: Callable[[], float] = time.time,
        *,
        dry_run_wait_s: float = DRY_RUN_WAIT_S,
        is_told_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """A dry run is waited for no longer where `is_told_to_stop` says so: Triton would wait for its answer."""
        self._store, self._settings, self._clock, self._dry_run_wait_s = store, settings, clock, dry_run_wait_s
        self._is_told_to_stop = is_told_to_stop
        self._opening = threading.Lock()
        self._opened: Registry | None = None
        self._waiting = threading.Semaphore()

    def handle(self, raw: bytes) -> Answer:
        """Answer one request, JSON in, a JSON object out. Raises HplmError where it is refused."""
        action, request = parse_request(raw, self.REQUESTS)
        return {"ok": True, **self.ACTIONS[action][1](self, request)}

    def close(self) -> None:
        """Let go of the registry, unless a request is opening one that hangs."""
        if self._opening.acquire(timeout=CLOSE_S):
            try:
                if self._opened is not None:
                    self._opened.close()
                    self._opened = None
            finally:
                self._opening.release()

    @property
    def _registry(self) -> Registry:
        """Opened when first needed, and tried again until it can be: a server starts without it."""
        with self._opening:
            if self._opened is None:
                self._opened = Registry.open(self._store)
            return self._opened

    @property
    def _uploads(self) -> Uploads:
        return Uploads(self._store, self._registry)

    def _fine_tune(self, request: requests.FineTune, *, kind: str) -> Answer:
        self._check_room()
        name = request.tenant
        base, domain = request.base or self._settings.base, request.domain or self._settings.domain
        if kind == "tenant.update":
            with self._telling_of_job(f"tenant:{name}"):
                record = self._registry.tenant(name)
            if request.base not in (None, record.base):
                raise BadManageRequestError(
                    f"tenant {name!r} is over base {record.base!r}, which an update cannot change"
                )
            base, domain = record.base, request.domain or record.domain
        else:
            self._check_new("tenant", name, f"tenant:{name}", is_there=self._registry.find_tenant(name) is not None)
        if base != self._settings.base:
            # The job would train it with this manager's `miss` and `reduction_factor`, which that base's server may not share.
            raise BadManageRequestError(
                f"this server serves base {self._settings.base!r}: "
                f"for a tenant of base {base!r} ask the manager of the server that serves that one"
            )
        self._check_domain(base, domain, is_waited_for=not request.dry_run)
        files = request.data.named()
        self._look_at(files.values(), DATA_ENDINGS, self._settings.max_data_bytes)
        details = {
            "tenant": name,
            "stays": kind == "tenant.update" and request.domain is None,  # on whatever domain it is then
            "task": request.task,
            "data": {part: pinned(source, self._settings) for part, source in files.items()},
            "columns": request.columns.named,
            "most_data_bytes": self._settings.max_data_bytes,
        }
        return self._submit(kind, f"tenant:{name}", request, base, domain, details)

    def _pretrain(self, request: requests.Pretrain, *, kind: str) -> Answer:
        self._check_room()
        name = request.domain
        base = request.base or self._settings.base
        if kind == "domain.update":
            with self._telling_of_job(f"domain:{base}/{name}"):
                known = self._registry.domain(base, name).parent
            if known is None:
                raise BadManageRequestError(f"{name!r} is the root of its tree: `hplm build plot` makes it")
            if request.parent not in (None, known):
                raise BadManageRequestError(f"domain {name!r} is below {known!r}, which an update cannot change")
            parent = known
        else:
            is_there = self._registry.find_domain(base, name) is not None
            self._check_new("domain", name, f"domain:{base}/{name}", is_there=is_there)
            parent = request.parent or self._root(base)
        self._check_domain(base, parent)
        seen = self._look_at([request.corpus], CORPUS_ENDINGS, self._settings.max_upload_bytes)
        if seen < (least := self._settings.min_corpus_tokens):
            self._forget([request.corpus])
            # A token has a byte at least: how many there are is counted by the job.
            raise CorpusTooSmallError(
                f"the corpus has {seen:,} bytes, so no more tokens; a domain needs {least:,}: at least {least - seen:,} more"
            )
        details = {
            "parent": parent,
            "corpus": pinned(request.corpus, self._settings),
            "min_corpus_tokens": self._settings.min_corpus_tokens,
            "most_corpus_bytes": self._settings.max_upload_bytes,
        }
        return self._submit(kind, f"domain:{base}/{name}", request, base, name, details)

    def _check_room(self) -> None:
        """Raises QueueFullError where too many jobs wait."""
        if (waiting := self._registry.count_jobs(self._clock())["queued"]) >= MOST_QUEUED:
            raise QueueFullError(f"{waiting:,} jobs wait already; ask again when some are done (`hplm job list`)")

    def _check_new(self, what: str, name: str, subject: str, *, is_there: bool) -> None:
        """Raises AlreadyThereError, also where a job is to create it."""
        update = f"{what}.update (`hplm {what} update`) makes its next version"
        if is_there:
            raise AlreadyThereError(f"{what} {name!r} exists already: {update}")
        if (job := self._registry.creating(subject)) is not None:
            raise AlreadyThereError(f"job {job} creates {what} {name!r} already: when it is done, {update}")

    def _check_domain(self, base: str, name: str, *, is_waited_for: bool = False) -> None:
        """That a domain is there, or, where that `is_waited_for`, is being made: a tenant's job begins after its domain's.

        Raises UnknownDomainError.
        """
        subject = f"domain:{base}/{name}"
        if is_waited_for and self._registry.find_domain(base, name) is None and self._registry.creating(subject):
            return
        with self._telling_of_job(subject):
            self._registry.domain(base, name)

    @contextmanager
    def _telling_of_job(self, subject: str) -> Iterator[None]:
        """Where a tenant or domain is not there yet, say which job makes it."""
        try:
            yield
        except (UnknownTenantError, UnknownDomainError) as error:
            if (job := self._registry.creating(subject)) is None:
                raise
            raise type(error)(
                f"{error} yet: job {job} makes it; ask again when that is done, or cancel it (`hplm job cancel {job}`)"
            ) from None

    def _root(self, base: str) -> str:
        """What a domain stands on that names no parent. Raises UnknownDomainError, or BadManageRequestError of several."""
        if base == self._settings.base:
            # Models may be exported over a branch, for tenants that stand on it.
            return self._registry.lineage(self._registry.current_domain(base, self._settings.domain).id)[-1].domain
        roots = [one.name for one in self._registry.domains(base) if one.parent is None]
        if not roots:
            raise UnknownDomainError(
                f"base {base!r} has no root domain, or there is no such base; domain.list names all"
            )
        if len(roots) > 1:
            raise BadManageRequestError(f"base {base!r} has several roots, {', '.join(roots)}: give one as `parent`")
        return roots[0]

    def _look_at(self, sources: Collection[Source], endings: tuple[str, ...], most_bytes: int) -> int:
        """Bytes of text in files; where one cannot be used all uploads are dropped, as of a job that fails.

        Raises DataError and what `locate` raises.
        """
        try:
            paths = [locate(pinned(source, self._settings), self._uploads) for source in sources]
            return sum(survey(path, endings, most_bytes) for path in paths)
        except DataError:
            self._forget(sources)
            raise

    def _forget(self, sources: Collection[Source]) -> None:
        """Drop uploads that can serve nobody, but for those that another job waits for."""
        self._uploads.consume([source.upload for source in sources if source.upload is not None])

    def _submit(
        self,
        kind: str,
        subject: str,
        request: requests.FineTune | requests.Pretrain,
        base: str,
        domain: str,
        details: dict[str, Any],
    ) -> Answer:
        """Queue a job that says all it needs: settings that change later are for later jobs."""
        common = {
            "base": base,
            "domain": domain,
            "settings": given(request.settings),
            "keep_versions": self._settings.keep_versions,
            "miss": self._settings.miss,
            "reduction_factor": self._settings.reduction_factor,
            "dry_run": request.dry_run,
            "drop_uploads": request.drop_uploads,
        }
        # A dry run changes nothing: it need not wait for its subject's jobs.
        subject = f"{PLAN}{subject}" if request.dry_run else subject
        job = self._registry.submit_job(kind, subject, {**common, **details}, self._clock())
        crash_point("job.submitted")
        return self._planned(job) if request.dry_run else {"job": job.id}

    def _planned(self, job: Job) -> Answer:
        """The plan, where a worker makes it soon; else the job whose result it will be. Raises what the job failed with."""
        deadline_s = time.monotonic() + self._dry_run_wait_s
        # One at a time, so that others' requests find a thread.
        if self._waiting.acquire(blocking=False):
            try:
                while job.state in UNFINISHED and time.monotonic() < deadline_s and not self._is_told_to_stop():
                    time.sleep(DRY_RUN_LOOK_S)
                    job = self._registry.job(job.id)
            finally:
                self._waiting.release()
        if job.error is not None:
            raise from_stored(job.error)
        return {"job": job.id, **(job.result or {})}

    def _delete_tenant(self, request: requests.OfTenant) -> Answer:
        crash_point("delete.before")
        with self._telling_of_job(f"tenant:{request.tenant}"):
            uploads = self._registry.delete_tenant(request.tenant, self._clock())
        crash_point("delete.after")
        self._consume(uploads)
        return {"tenant": request.tenant}

    def _delete_domain(self, request: requests.OfDomain) -> Answer:
        base = request.base or self._settings.base
        with self._telling_of_job(f"domain:{base}/{request.domain}"):
            parent = self._registry.domain(base, request.domain).parent
        if parent is None:
            raise BadManageRequestError(f"{request.domain!r} is the root of its tree, all else stands on it")
        if (base, request.domain) == (self._settings.base, self._settings.domain):
            # The look-up stage finds its root by it, and would not load again.
            raise DomainInUseError(
                f"domain {request.domain!r} cannot be deleted: this server's models were exported over it; export them over "
                "another first (`hplm build export --keep-settings --plot NAME`)"
            )
        crash_point("delete.before")
        uploads = self._registry.delete_domain(base, request.domain, self._clock())
        crash_point("delete.after")
        self._consume(uploads)
        return {"domain": request.domain, "base": base}

    def _roll_back(self, request: requests.RollBackTenant) -> Answer:
        crash_point("rollback.before")
        with self._telling_of_job(f"tenant:{request.tenant}"):
            version = self._registry.rollback_tenant(request.tenant, request.version)
        crash_point("rollback.after")
        return {"tenant": request.tenant, "version": version.number}

    def _show_tenant(self, request: requests.OfTenant) -> Answer:
        with self._telling_of_job(f"tenant:{request.tenant}"):
            record = self._registry.tenant(request.tenant)
        versions = [views.version(one) for one in self._registry.tenant_versions(request.tenant)]
        return {"tenant": {**views.tenant(record), "about": record.current.about, "versions": versions}}

    def _list_tenants(self, request: requests.ListTenants) -> Answer:
        found = self._registry.tenants(prefix=request.prefix, after=request.after, limit=request.limit)
        return {"tenants": [views.tenant(record) for record in found]}

    def _show_domain(self, request: requests.OfDomain) -> Answer:
        base = request.base or self._settings.base
        with self._telling_of_job(f"domain:{base}/{request.domain}"):
            record = self._registry.domain(base, request.domain)
        versions = self._registry.domain_versions(base, request.domain)
        about = next((one.about for one in versions if one.number == record.current), {})
        return {
            "domain": {**views.domain(record), "about": about, "versions": [views.version(one) for one in versions]}
        }

    def _list_domains(self, request: requests.ListDomains) -> Answer:
        return {"domains": [views.domain(record) for record in self._registry.domains(request.base)]}

    def _show_job(self, request: requests.OfJob) -> Answer:
        return {"job": views.job(self._registry.job(request.job))}

    def _list_jobs(self, request: requests.ListJobs) -> Answer:
        return {"jobs": [views.job(job) for job in self._registry.jobs(states=request.states, limit=request.limit)]}

    def _cancel_job(self, request: requests.OfJob) -> Answer:
        job = self._registry.cancel_job(request.job, self._clock())
        if job.state not in UNFINISHED:
            # Else its worker does so.
            self._consume(dropped_with(job.request))
        return {"job": views.job(job)}

    def _consume(self, uploads: Collection[str]) -> None:
        # What the request was about is done; they would go by themselves in a day.
        with suppress(RegistryError):
            if uploads:
                self._uploads.consume(uploads)

    def _start_upload(self, request: requests.StartUpload) -> Answer:
        check_ending(request.name, UPLOAD_ENDINGS)
        upload = self._uploads.start(request, self._settings, self._clock())
        return {"upload": upload.id, "chunk_bytes": self._settings.upload_chunk_bytes}

    def _receive_chunk(self, request: requests.UploadChunk) -> Answer:
        return {"received": self._uploads.receive(request, self._settings.upload_chunk_bytes)}

    def _finish_upload(self, request: requests.OfUpload) -> Answer:
        return {"upload": self._uploads.finish(request.upload).id}

    def _list_uploads(self, request: requests.ListUploads) -> Answer:
        found = self._registry.uploads(after=request.after, limit=request.limit)
        used = self._registry.uploads_in_use([one.id for one in found])
        return {"uploads": [views.upload(one, self._uploads.name(one), used.get(one.id, [])) for one in found]}

    def _drop_upload(self, request: requests.OfUpload) -> Answer:
        """Stays where an unfinished job names it."""
        self._uploads.consume([request.upload])
        return {"upload": request.upload}

    # What a request of each action holds, and who answers it.
    ACTIONS: ClassVar[dict[str, tuple[type[requests.ManageRequest], Callable[[ManageService, Any], Answer]]]] = {
        "tenant.create": (requests.FineTune, partial(_fine_tune, kind="tenant.create")),
        "tenant.update": (requests.FineTune, partial(_fine_tune, kind="tenant.update")),
        "tenant.delete": (requests.OfTenant, _delete_tenant),
        "tenant.rollback": (requests.RollBackTenant, _roll_back),
        "tenant.show": (requests.OfTenant, _show_tenant),
        "tenant.list": (requests.ListTenants, _list_tenants),
        "domain.create": (requests.Pretrain, partial(_pretrain, kind="domain.create")),
        "domain.update": (requests.Pretrain, partial(_pretrain, kind="domain.update")),
        "domain.delete": (requests.OfDomain, _delete_domain),
        "domain.show": (requests.OfDomain, _show_domain),
        "domain.list": (requests.ListDomains, _list_domains),
        "job.show": (requests.OfJob, _show_job),
        "job.list": (requests.ListJobs, _list_jobs),
        "job.cancel": (requests.OfJob, _cancel_job),
        "upload.start": (requests.StartUpload, _start_upload),
        "upload.chunk": (requests.UploadChunk, _receive_chunk),
        "upload.finish": (requests.OfUpload, _finish_upload),
        "upload.list": (requests.ListUploads, _list_uploads),
        "upload.drop": (requests.OfUpload, _drop_upload),
    }
    REQUESTS: ClassVar = {action: kind for action, (kind, _) in ACTIONS.items()}
