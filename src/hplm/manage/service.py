"""Answers manage requests from the registry, and queues trainings as jobs for a worker process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar

from hplm.access.key_ring import KeyRing
from hplm.access.proof import Prover
from hplm.core.settings import REDUCTION_FACTOR, ManagedBase, ManagerSettings
from hplm.core.wire import CORPUS_ENDINGS, DATA_ENDINGS, UPLOAD_ENDINGS
from hplm.errors import (
    AlreadyThereError,
    BadManageRequestError,
    CorpusTooSmallError,
    DataError,
    DomainInUseError,
    HplmError,
    QueueFullError,
    RegistryError,
    UnknownDomainError,
    UnknownTenantError,
    check_ending,
    from_stored,
)
from hplm.manage import cascades, keys, requests, students, views
from hplm.manage.access import ANYONE, Caller, ManageAccess, check_bases, check_job
from hplm.manage.audit_log import AuditLog
from hplm.manage.file_survey import survey
from hplm.manage.job_inputs import locate, pinned
from hplm.manage.request_parts import Source, given
from hplm.manage.requests import parse_request
from hplm.manage.uploads import Uploads
from hplm.metering.recent_counts import DAY, HOUR, read_recent
from hplm.registry.records import PLAN, UNFINISHED, Job, TenantVersion
from hplm.registry.registry import Registry
from hplm.registry.uploads import uploads_to_drop
from hplm.runtime.crash_points import crash_point
from hplm.store.layout import Store

Answer = dict[str, Any]
# Longest wait for a dry run, which is a short job: most clients get its result in the first answer.
DRY_RUN_WAIT_S = 10.0
DRY_RUN_LOOK_S = 0.1
# Most queued jobs, dry runs included: a worker process runs one at a time and reads the queue to find the next.
MOST_QUEUED = 10_000
# Longest wait of `close` for a request that is opening the registry.
CLOSE_S = 1.0


class ManageService:
    """The manager of a store, safe to use from several threads. It opens the registry at the first request."""

    def __init__(
        self,
        store: Store,
        read_settings: Callable[[], ManagerSettings],
        clock: Callable[[], float] = time.time,
        *,
        dry_run_wait_s: float = DRY_RUN_WAIT_S,
        is_told_to_stop: Callable[[], bool] = lambda: False,
        survey_bases: Callable[[Registry], list[dict[str, Any]]] = lambda registry: [],
        ring: KeyRing | None = None,
        prover: Prover | None = None,
    ) -> None:
        """`read_settings` returns the settings as they are now, because bases are added and deleted while the manager runs.

        If `is_told_to_stop` returns True, waits for dry runs end: Triton would wait for their answers before it stops.
        `survey_bases` describes the bases that the server's repository serves. With a `ring` each request needs a key; the
        service starts and closes the ring. `prover` checks the proofs of `hplm serve` itself.
        """
        self._store, self._read_settings, self._clock, self._dry_run_wait_s = (
            store,
            read_settings,
            clock,
            dry_run_wait_s,
        )
        self._is_told_to_stop, self._survey_bases = is_told_to_stop, survey_bases
        self._opening = threading.Lock()
        self._opened: Registry | None = None
        self._waiting = threading.Semaphore()
        self._access = ManageAccess(ring, AuditLog(lambda: self._registry, clock), prover)
        self._access.start()

    def admit(self, key: bytes) -> Caller:
        """Return the caller of a request with the key, before the request is read. Raises ForbiddenError."""
        return self._access.admit(key)

    def handle(self, raw: bytes, caller: Caller = ANYONE) -> Answer:
        """Answer one request of an admitted caller, given as JSON, with a JSON object. Raises HplmError to refuse it."""
        with self._access.noting(caller) as note:
            action, request = parse_request(raw, self.REQUESTS)
            self._access.check(caller, note, action, request)
            check_bases(caller, request, lambda base: self._is_on(caller, base))
            if isinstance(request, requests.OfJob):
                check_job(caller, lambda: self._registry.job(request.job).subject)
            return {"ok": True, **self.ACTIONS[action][1](self, request)}

    def note_unread(self, caller: Caller, error: HplmError) -> None:
        """Note in the audit log a request of an admitted caller that was refused before it was read."""
        self._access.note_unread(caller, error)

    def close(self) -> None:
        """Close the registry, unless a request hangs while opening it."""
        self._access.close()
        if self._opening.acquire(timeout=CLOSE_S):
            try:
                if self._opened is not None:
                    self._opened.close()
                    self._opened = None
            finally:
                self._opening.release()

    @property
    def _registry(self) -> Registry:
        """The registry, opened when first needed: a server starts even if the registry is away."""
        with self._opening:
            if self._opened is None:
                self._opened = Registry.open(self._store)
            return self._opened

    @property
    def _settings(self) -> ManagerSettings:
        return self._read_settings()

    @property
    def _uploads(self) -> Uploads:
        return Uploads(self._store, self._registry)

    def _is_on(self, caller: Caller, base: str) -> bool:
        """Return whether the tenant of a key has a version over a base."""
        assert caller.tenant is not None
        return self._registry.find_tenant(caller.tenant, base) is not None

    def _base(self, named: str | None) -> tuple[str, ManagedBase]:
        """Return the base that a request names, by default the default base, and its settings.

        Raises BadManageRequestError for a base that this server does not serve: its job would need settings of its own.
        """
        settings = self._settings
        base = named or settings.base
        if (managed := settings.managed.get(base)) is None:
            raise BadManageRequestError(
                f"this server does not serve base {base!r}: `hplm base list` names those that it serves"
            )
        return base, managed

    def _fine_tune(self, request: requests.FineTune, *, kind: str) -> Answer:
        self._check_room()
        name = request.tenant
        students.check_request(request, kind)
        cascade = None
        replaced: dict[str, TenantVersion] = {}
        if kind == "tenant.update":
            if request.base is not None:
                self._base(request.base)
            with self._naming_its_job(f"tenant:{name}"):
                record = self._registry.tenant(name, request.base)
                cascade = cascades.check_update(request, self._registry.cascade_of(name))
            named = [record.base] if cascade is None else list(cascade.levels)
            records = [self._registry.tenant(name, base) for base in named]
            domains = {record.base: request.domain or record.domain for record in records}
            replaced = {record.base: record.current for record in records}
        elif kind == "tenant.students":
            base, managed = self._base(students.choose_trunk(self._store, self._settings, request.base))
            with self._naming_its_job(f"tenant:{name}"):
                self._registry.tenant(name)
            cascades.check_students(name, base, self._registry.cascade_of(name))
            if (found := self._registry.find_tenant(name, base)) is not None:
                replaced[base] = found.current
            domains = {base: request.domain or (managed.domain if found is None else found.domain)}
        else:
            cascades.check_create(request)
            domains = {}
            of_one_base = [request.base]
            if request.students is not None and request.levels is None:
                of_one_base = [students.choose_trunk(self._store, self._settings, request.base)]
            for level in request.levels or of_one_base:
                base, managed = self._base(level)
                is_there = self._registry.find_tenant(name, base) is not None
                self._check_new("tenant", name, f"tenant:{name}", is_there=is_there, base=base)
                domains[base] = request.domain or managed.domain
        served = {base: self._base(base)[1] for base in domains}
        for base, domain in domains.items():
            if request.settings.adapter_width == "wide" and served[base].reduction_factor >= REDUCTION_FACTOR:
                raise BadManageRequestError(
                    f"the adapter slots of base {base!r} hold no wide adapter (reduction_factor "
                    f"{served[base].reduction_factor}): ask for a narrow one, or export the models with "
                    "`hplm build export --models MODELS --keep-settings --name NAME --reduction-factor 4`"
                )
            self._check_domain(base, domain, is_waited_for=not request.dry_run)
        files: dict[str, Source] = given(request.data)
        self._check_files(files.values(), DATA_ENDINGS, self._settings.max_data_bytes, drop=files.values())
        details = {
            "tenant": name,
            # On its domain at the time the job begins.
            "stays": bool(replaced) and request.domain is None,
            "task": request.task,
            "data": {part: pinned(source, self._settings) for part, source in files.items()},
            "columns": request.columns.named,
            "most_data_bytes": self._settings.max_data_bytes,
        }
        if request.levels is not None or cascade is not None:
            details |= cascades.of_levels(domains, served, request.target, cascade)
        details |= self._of_students(request, kind, replaced, list(domains), is_cascade="levels" in details)
        base, domain = list(domains.items())[-1]
        return self._submit(kind, f"tenant:{name}", base, served[base], domain, details, request)

    def _of_students(
        self,
        request: requests.FineTune,
        kind: str,
        replaced: Mapping[str, TenantVersion],
        bases: Collection[str],
        *,
        is_cascade: bool,
    ) -> Answer:
        """Return the part of a job's request that is about students, empty for a job without students.

        The levels of a cascade that stand over trunks have students.
        """
        with_students = [version for version in replaced.values() if students.has_students(version)]
        wanted = bool(with_students) or request.students is not None or kind == "tenant.students"
        if is_cascade:
            trunks = students.trunks_of(self._store, bases)
            if request.students is not None and not trunks:
                raise BadManageRequestError("`students` are for levels over trunks, and none of the levels is a trunk")
            if not trunks:
                return {}
            return {"students": students.options_of(request, next(iter(with_students), None))}
        if not wanted:
            return {}
        if kind == "tenant.update" and not with_students:
            raise BadManageRequestError(
                f"tenant {request.tenant!r} has no students over {next(iter(replaced))!r}: "
                "`tenant.students` (`hplm tenant students`) makes them"
            )
        students.check_one_rate(request)
        options = students.options_of(request, next(iter(with_students), None))
        return students.of_students(options, self._store, self._settings)

    def _retarget(self, request: requests.Retarget) -> Answer:
        """Queue a job that selects and proves again from what the levels answered on dev when they were trained."""
        self._check_room()
        name = request.tenant
        with self._naming_its_job(f"tenant:{name}"):
            cascade = cascades.check_in_force(name, self._registry.cascade_of(name))
        domains = {base: self._registry.tenant(name, base).domain for base in cascade.levels}
        served = {base: self._base(base)[1] for base in domains}
        details = {"tenant": name, **cascades.of_levels(domains, served, request.target, cascade)}
        base, domain = list(domains.items())[-1]
        return self._submit("tenant.target", f"tenant:{name}", base, served[base], domain, details)

    def _pretrain(self, request: requests.Pretrain, *, kind: str) -> Answer:
        self._check_room()
        name = request.domain
        base, managed = self._base(request.base)
        if kind == "domain.update":
            with self._naming_its_job(f"domain:{base}/{name}"):
                known = self._registry.domain(base, name).parent
            if known is None:
                raise BadManageRequestError(
                    f"{name!r} is the root of its tree: `hplm build plot --base {base} --plot {name}` makes it"
                )
            if request.parent not in (None, known):
                raise BadManageRequestError(f"domain {name!r} is below {known!r}, which an update cannot change")
            parent = known
        else:
            is_there = self._registry.find_domain(base, name) is not None
            self._check_new("domain", name, f"domain:{base}/{name}", is_there=is_there, base=base)
            parent = request.parent or self._root(base, managed)
        self._check_domain(base, parent)
        root = self._registry.lineage(self._registry.current_domain(base, parent).id)[-1]
        if self._store.is_whole_root(root.path):
            raise BadManageRequestError(
                f"base {base!r} is whole: all its layers are computed, so it has no lower layers that a domain could change; "
                "name a base that was converted without --whole"
            )
        if request.settings.top_percent == 0 and managed.miss == "backoff":
            raise BadManageRequestError(
                "this server answers misses by back-off, and a domain with top_percent 0 has no table to back off from: give "
                "top_percent above 0, or export the server's models with --miss compute"
            )
        sources = [request.corpus, *request.dev]
        self._check_files(request.dev, DATA_ENDINGS, self._settings.max_data_bytes, drop=sources)
        size_bytes = self._check_files([request.corpus], CORPUS_ENDINGS, self._settings.max_upload_bytes, drop=sources)
        if size_bytes < (least := self._settings.min_corpus_tokens):
            self._drop(sources)
            # A token has at least one byte. The job counts the tokens.
            raise CorpusTooSmallError(
                f"the corpus has {size_bytes:,} bytes, so no more tokens; a domain needs {least:,} tokens: "
                f"send at least {least - size_bytes:,} more"
            )
        details = {
            "parent": parent,
            "corpus": pinned(request.corpus, self._settings),
            "dev": [pinned(source, self._settings) for source in request.dev],
            "most_data_bytes": self._settings.max_data_bytes,
            "min_corpus_tokens": self._settings.min_corpus_tokens,
            "most_corpus_bytes": self._settings.max_upload_bytes,
        }
        return self._submit(kind, f"domain:{base}/{name}", base, managed, name, details, request)

    def _check_room(self) -> None:
        """Raise QueueFullError if too many jobs wait."""
        if (waiting := self._registry.count_jobs(self._clock())["queued"]) >= MOST_QUEUED:
            raise QueueFullError(f"{waiting:,} jobs wait already; ask again when some are done (`hplm job list`)")

    def _check_new(self, what: str, name: str, subject: str, *, is_there: bool, base: str) -> None:
        """Raise AlreadyThereError if the tenant or domain exists over the base, or a job is creating it there."""
        update = f"{what}.update (`hplm {what} update`) makes its next version"
        if is_there:
            raise AlreadyThereError(f"{what} {name!r} exists already: {update}")
        if (job := self._registry.creating(subject, base)) is not None:
            raise AlreadyThereError(f"job {job} creates {what} {name!r} already: when it is done, {update}")

    def _check_domain(self, base: str, name: str, *, is_waited_for: bool = False) -> None:
        """Check that a domain exists, or with `is_waited_for` that a job makes it. Raises UnknownDomainError.

        A tenant's job begins after the job of its domain.
        """
        subject = f"domain:{base}/{name}"
        if is_waited_for and self._registry.find_domain(base, name) is None and self._registry.creating(subject):
            return
        with self._naming_its_job(subject):
            self._registry.domain(base, name)

    @contextmanager
    def _naming_its_job(self, subject: str) -> Iterator[None]:
        """Let the error for an unknown tenant or domain name the job that makes it."""
        try:
            yield
        except (UnknownTenantError, UnknownDomainError) as error:
            if (job := self._registry.creating(subject)) is None:
                raise
            raise type(error)(
                f"{error} yet: job {job} makes it; ask again when the job is done, or cancel it (`hplm job cancel {job}`)"
            ) from None

    def _root(self, base: str, managed: ManagedBase) -> str:
        """Return the parent of a domain that names none: the base's root. Raises UnknownDomainError if there is none."""
        # The models may be exported over a branch; its lineage ends at the root.
        return self._registry.lineage(self._registry.current_domain(base, managed.domain).id)[-1].domain

    def _check_files(
        self, sources: Collection[Source], endings: tuple[str, ...], most_bytes: int, *, drop: Collection[Source]
    ) -> int:
        """Return the bytes of text in files. If a file cannot be used, drop the uploads in `drop`, as a failed job does.

        Raises DataError and what `locate` raises.
        """
        try:
            paths = [locate(pinned(source, self._settings), self._uploads) for source in sources]
            return sum(survey(path, endings, most_bytes) for path in paths)
        except DataError:
            self._drop(drop)
            raise

    def _drop(self, sources: Collection[Source]) -> None:
        """Drop uploads that can never be used, except those that another job waits for."""
        self._uploads.drop([source.upload for source in sources if source.upload is not None])

    def _submit(
        self,
        kind: str,
        subject: str,
        base: str,
        managed: ManagedBase,
        domain: str,
        details: dict[str, Any],
        request: requests.FineTune | requests.Pretrain | None = None,
    ) -> Answer:
        """Queue a job whose request holds all settings: settings that change later apply to later jobs.

        `request` is that of a training.
        """
        is_dry_run = request is not None and request.dry_run
        common = {
            "base": base,
            "domain": domain,
            "settings": {} if request is None else given(request.settings),
            "keep_versions": self._settings.keep_versions,
            "miss": managed.miss,
            "reduction_factor": managed.reduction_factor,
            "dry_run": is_dry_run,
            "drop_uploads": request is not None and request.drop_uploads,
        }
        # A dry run changes nothing, so it does not wait for its subject's jobs.
        subject = f"{PLAN}{subject}" if is_dry_run else subject
        job = self._registry.submit_job(kind, subject, {**common, **details}, self._clock())
        crash_point("job.submitted")
        return self._planned(job) if is_dry_run else {"job": job.id}

    def _planned(self, job: Job) -> Answer:
        """Return the plan if a worker makes it soon, else only the job. Raises the error that the job failed with."""
        deadline_s = time.monotonic() + self._dry_run_wait_s
        # One dry run is waited for at a time, so that other requests find a free thread.
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
        with self._naming_its_job(f"tenant:{request.tenant}"):
            uploads = self._registry.delete_tenant(request.tenant, self._clock(), base=request.base)
        crash_point("delete.after")
        self._drop_uploads(uploads)
        return {"tenant": request.tenant}

    def _delete_domain(self, request: requests.OfDomain) -> Answer:
        base, managed = self._base(request.base)
        with self._naming_its_job(f"domain:{base}/{request.domain}"):
            parent = self._registry.domain(base, request.domain).parent
        if parent is None:
            raise BadManageRequestError(f"{request.domain!r} is the root of its tree, on which all other domains stand")
        if request.domain == managed.domain:
            # The look-up stage finds its root by this domain, and would fail to load.
            raise DomainInUseError(
                f"domain {request.domain!r} cannot be deleted: this server's models were exported over it; export them over "
                "another domain first (`hplm build export --models MODELS --keep-settings --name NAME --plot PLOT`)"
            )
        crash_point("delete.before")
        uploads = self._registry.delete_domain(base, request.domain, self._clock())
        crash_point("delete.after")
        self._drop_uploads(uploads)
        return {"domain": request.domain, "base": base}

    def _roll_back(self, request: requests.RollBackTenant) -> Answer:
        crash_point("rollback.before")
        with self._naming_its_job(f"tenant:{request.tenant}"):
            served = self._registry.rollback_tenant(request.tenant, request.version, self._clock())
        crash_point("rollback.after")
        numbers = {base: version.number for base, version in served.items()}
        return {"tenant": request.tenant, "version": max(numbers.values()), "bases": numbers}

    def _set_least_students(self, request: requests.LeastStudents) -> Answer:
        with self._naming_its_job(f"tenant:{request.tenant}"):
            self._registry.set_least_students(request.tenant, request.least)
        return {"tenant": request.tenant, "least_students": request.least}

    def _show_tenant(self, request: requests.OfTenant) -> Answer:
        with self._naming_its_job(f"tenant:{request.tenant}"):
            record = self._registry.tenant(request.tenant, request.base)
            cascade = self._registry.cascade_of(request.tenant)
        versions = [
            {**views.version(version), "base": version.base}
            for version in self._registry.tenant_versions(request.tenant)
        ]
        shown = {**views.tenant(record), "about": record.current.about, "versions": versions}
        with suppress(OSError):
            recent = read_recent(self._store.root, self._store.registry, request.tenant)
            shown["recent"] = {"hour": recent[HOUR]._asdict(), "day": recent[DAY]._asdict()}
        if cascade is not None:
            last = list(cascade.levels)[-1] if cascade.plan is None else cascade.plan.levels[-1].base
            found = self._registry.find_tenant(request.tenant, last)
            shown["cascade"] = views.cascade(cascade, {} if found is None else found.current.about)
        return {"tenant": shown}

    def _list_tenants(self, request: requests.ListTenants) -> Answer:
        records = self._registry.tenants(prefix=request.prefix, after=request.after, limit=request.limit)
        return {"tenants": [views.tenant(record) for record in records]}

    def _show_domain(self, request: requests.OfDomain) -> Answer:
        base, _ = self._base(request.base)
        with self._naming_its_job(f"domain:{base}/{request.domain}"):
            record = self._registry.domain(base, request.domain)
        versions = self._registry.domain_versions(base, request.domain)
        shown = [views.version(version) for version in versions]
        return {"domain": {**views.domain(record), "about": record.current.about, "versions": shown}}

    def _list_domains(self, request: requests.ListDomains) -> Answer:
        base = None if request.base is None else self._base(request.base)[0]
        return {"domains": [views.domain(record) for record in self._registry.domains(base)]}

    def _list_bases(self, request: requests.ListBases) -> Answer:
        return {"bases": self._survey_bases(self._registry)}

    def _show_job(self, request: requests.OfJob) -> Answer:
        return {"job": views.job(self._registry.job(request.job))}

    def _list_jobs(self, request: requests.ListJobs) -> Answer:
        return {"jobs": [views.job(job) for job in self._registry.jobs(states=request.states, limit=request.limit)]}

    def _cancel_job(self, request: requests.OfJob) -> Answer:
        job = self._registry.cancel_job(request.job, self._clock())
        if job.state not in UNFINISHED:
            # If the job still runs, its process drops the uploads.
            self._drop_uploads(uploads_to_drop(job.request))
        return {"job": views.job(job)}

    def _drop_uploads(self, uploads: Collection[str]) -> None:
        # The request itself has succeeded, so an error is ignored: the uploads expire in a day.
        with suppress(RegistryError):
            self._uploads.drop(uploads)

    def _start_upload(self, request: requests.StartUpload) -> Answer:
        check_ending(request.name, UPLOAD_ENDINGS)
        upload = self._uploads.start(request, self._settings, self._clock())
        return {"upload": upload.id, "chunk_bytes": self._settings.upload_chunk_bytes}

    def _receive_chunk(self, request: requests.UploadChunk) -> Answer:
        return {"received": self._uploads.receive(request, self._settings.upload_chunk_bytes)}

    def _finish_upload(self, request: requests.OfUpload) -> Answer:
        return {"upload": self._uploads.finish(request.upload).id}

    def _list_uploads(self, request: requests.ListUploads) -> Answer:
        uploads = self._registry.uploads(after=request.after, limit=request.limit)
        used = self._registry.uploads_in_use([upload.id for upload in uploads])
        shown = [views.upload(upload, self._uploads.name(upload), used.get(upload.id, [])) for upload in uploads]
        return {"uploads": shown}

    def _drop_upload(self, request: requests.OfUpload) -> Answer:
        """Drop an upload, unless an unfinished job names it."""
        self._uploads.drop([request.upload])
        return {"upload": request.upload}

    def _create_key(self, request: requests.CreateKey) -> Answer:
        return self._after_key_change(keys.create(request, self._registry, self._clock()))

    def _list_keys(self, request: requests.ListKeys) -> Answer:
        return keys.listing(request, self._registry)

    def _revoke_key(self, request: requests.OfKey) -> Answer:
        return self._after_key_change(keys.revoke(request, self._registry, self._clock()))

    def _after_key_change(self, answer: Answer) -> Answer:
        # The change is made, so an error is ignored: the next poll hears of it.
        with suppress(RegistryError):
            self._access.refresh()
        return answer

    def _limit_tenant(self, request: requests.LimitTenant) -> Answer:
        return keys.limit(request, self._registry)

    def _list_audit(self, request: requests.ListAudit) -> Answer:
        return keys.audit(request, self._registry)

    # For each action, the class of its requests and the method that answers them.
    ACTIONS: ClassVar[dict[str, tuple[type[requests.ManageRequest], Callable[[ManageService, Any], Answer]]]] = {
        "tenant.create": (requests.FineTune, partial(_fine_tune, kind="tenant.create")),
        "tenant.update": (requests.FineTune, partial(_fine_tune, kind="tenant.update")),
        "tenant.students": (requests.FineTune, partial(_fine_tune, kind="tenant.students")),
        "tenant.target": (requests.Retarget, _retarget),
        "tenant.delete": (requests.OfTenant, _delete_tenant),
        "tenant.rollback": (requests.RollBackTenant, _roll_back),
        "tenant.least_students": (requests.LeastStudents, _set_least_students),
        "tenant.limit": (requests.LimitTenant, _limit_tenant),
        "tenant.show": (requests.OfTenant, _show_tenant),
        "tenant.list": (requests.ListTenants, _list_tenants),
        "domain.create": (requests.Pretrain, partial(_pretrain, kind="domain.create")),
        "domain.update": (requests.Pretrain, partial(_pretrain, kind="domain.update")),
        "domain.delete": (requests.OfDomain, _delete_domain),
        "domain.show": (requests.OfDomain, _show_domain),
        "domain.list": (requests.ListDomains, _list_domains),
        "base.list": (requests.ListBases, _list_bases),
        "job.show": (requests.OfJob, _show_job),
        "job.list": (requests.ListJobs, _list_jobs),
        "job.cancel": (requests.OfJob, _cancel_job),
        "upload.start": (requests.StartUpload, _start_upload),
        "upload.chunk": (requests.UploadChunk, _receive_chunk),
        "upload.finish": (requests.OfUpload, _finish_upload),
        "upload.list": (requests.ListUploads, _list_uploads),
        "upload.drop": (requests.OfUpload, _drop_upload),
        "key.create": (requests.CreateKey, _create_key),
        "key.list": (requests.ListKeys, _list_keys),
        "key.revoke": (requests.OfKey, _revoke_key),
        "audit.list": (requests.ListAudit, _list_audit),
    }
    REQUESTS: ClassVar = {action: kind for action, (kind, _) in ACTIONS.items()}
