"""The client of the manager, for domains, tenants, jobs and uploads."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from hplm.errors import BadInputError, InternalError, JobCancelledError, UnknownUploadError
from hplm_client.manage.answers import (
    AccessKey,
    AuditEntry,
    Base,
    Domain,
    DomainDetails,
    Job,
    JobEvent,
    NewKey,
    Plan,
    RevokedKey,
    Tenant,
    TenantDetails,
    Upload,
    parse_answer,
)
from hplm_client.manage.transport import Transport, TritonTransport
from hplm_client.manage.upload import ProgressCallback, send_file
from hplm_client.transport.retry import RETRY_S, with_retries

POLL_EVERY_S = 0.5
# Most records that a server lists in one answer.
PAGE_SIZE = 1000
# A file that a request names: {"upload": id} or {"path": path on the server}.
Source = Mapping[str, str]
# Callers may also name an upload from `list_uploads`.
SourceOrUpload: TypeAlias = "Source | Upload"


class ManageClient:
    """A client that creates, updates and deletes domains and tenants of a running server, over HTTP or gRPC.

    >>> with ManageClient("grpc://127.0.0.1:8001") as manage:  # doctest: +SKIP
    ...     job = manage.create_tenant("acme", train=manage.upload("train.csv"))
    ...     manage.wait(job)
    ...     manage.show_tenant("acme").about["scores"]

    Creations and updates are jobs: the call returns the job's id immediately, and `watch` and `wait` follow the job. A request
    names each file by the return value of `upload` or `on_server`.

    The server removes an upload when its job is done or its data are refused. If the job fails otherwise or is cancelled, a new
    job may name the upload for a day, and `drop_upload` removes it.

    `key` is an operator's key, or a manage key of the tenant that the requests are about, for a server that needs keys. It is
    shown nowhere.

    Use one client in one thread. Addresses and `headers` are as for `Client`. Calls raise the errors of `hplm.errors`.
    """

    def __init__(
        self,
        url: str = "grpc://127.0.0.1:8001",
        *,
        timeout_s: float = 60.0,
        headers: Mapping[str, str] | None = None,
        key: str | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.url = url
        self._transport = transport or TritonTransport(url, timeout_s, headers, key)

    def upload(self, path: str | Path, sent: ProgressCallback = lambda sent_bytes, total_bytes: None) -> Source:
        """Send a file in chunks with a checksum. Calls `sent(bytes sent so far, bytes in all)` after each chunk.

        Raises DataError if the file cannot be read, UploadError if the server refuses it.
        """
        return {"upload": send_file(self.ask, Path(path), sent)}

    def drop_upload(self, source: SourceOrUpload) -> None:
        """Remove an upload from the server: the return value of `upload`, or an entry of `list_uploads`.

        An upload that a job waits for stays. An upload that no longer exists is not an error.
        """
        if upload := _source("upload", source).get("upload"):
            self.ask("upload.drop", upload=upload)

    def list_uploads(self) -> list[Upload]:
        """Return the uploads that are not used up, oldest first. They take room that all uploads share."""
        uploads: list[Upload] = []
        while True:
            try:
                page = self.ask("upload.list", after=uploads[-1].id if uploads else "", limit=PAGE_SIZE)["uploads"]
            except UnknownUploadError:
                # The upload was removed meanwhile. Continue after the one before it.
                uploads.pop()
                continue
            uploads += [parse_answer(Upload, upload) for upload in page]
            if len(page) < PAGE_SIZE:
                # An upload whose job ended between two pages has moved to the front, so that later ones are listed twice.
                return list({upload.id: upload for upload in uploads}.values())

    @staticmethod
    def on_server(path: str) -> Source:
        """Return the name of a file that is on the server already. The server's operator must allow this."""
        return {"path": path}

    def create_tenant(
        self,
        tenant: str,
        *,
        train: SourceOrUpload,
        dev: SourceOrUpload | None = None,
        test: SourceOrUpload | None = None,
        unlabelled: SourceOrUpload | None = None,
        domain: str | None = None,
        base: str | None = None,
        levels: Sequence[str] | None = None,
        accuracy: float | None = None,
        latency_ms: float | None = None,
        deterministic: bool | None = None,
        on_late: str | None = None,
        proof: SourceOrUpload | None = None,
        students: Mapping[str, Any] | None = None,
        task: str | None = None,
        text_column: str | None = None,
        pair_column: str | None = None,
        label_column: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """Fine-tune a new tenant over a domain, by default the base's root. Returns the job's id.

        With `levels`, the names of bases from small to large, the tenant gets a cascade. The small level answers what it is
        sure of, and the larger levels answer the rest. The tenant is promised `accuracy`, a share of right answers that is
        proved on the examples of `proof` or else on a part of dev, and a mean of `latency_ms`. If that cannot be promised, the
        job fails with ContractError, whose message has the nearest offer. Without `accuracy` the fastest combination is taken
        whose accuracy on dev is at most 1 point below the best. `deterministic`: texts above the cut-off are never re-routed.
        `on_late`, `answer` or `refuse`, is for texts that cannot be re-routed in time.

        With `students`, a mapping that may be empty, the tenant gets students over a trunk, as `train_students` makes them.

        A model whose upper layers are all trained on the labelled files labels the `unlabelled` texts, and the tenant learns
        these too. `text_column`, `pair_column` and `label_column` name columns of the files that have unusual names.
        `settings`: epochs, learning_rates, patience, pooling, adapter_width, seed. By default a narrow and a wide adapter are
        trained, and the dev examples choose. Raises AlreadyThereError, DataError and others.
        """
        data = _sources(train=train, dev=dev, test=test, unlabelled=unlabelled, proof=proof)
        columns = _without_none(text=text_column, pair=pair_column, label=label_column) or None
        request = {
            "domain": domain,
            "base": base,
            "levels": None if levels is None else list(levels),
            "target": _target(accuracy, latency_ms, deterministic, on_late) or None,
            "students": students,
            "task": task,
            "settings": settings,
        }
        return self._submit("tenant.create", tenant=tenant, data=data, columns=columns, **request)

    def update_tenant(
        self,
        tenant: str,
        *,
        train: SourceOrUpload,
        dev: SourceOrUpload | None = None,
        test: SourceOrUpload | None = None,
        unlabelled: SourceOrUpload | None = None,
        domain: str | None = None,
        base: str | None = None,
        proof: SourceOrUpload | None = None,
        publish: str | None = None,
        text_column: str | None = None,
        pair_column: str | None = None,
        label_column: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """Fine-tune a tenant's next version on the same labels, by default over its domain. Returns the job's id.

        Name unusual columns as for `create_tenant`; the server does not remember those of the previous version. A version that
        is no better on dev is not published: `published` in the job's result is false, and `why` says the reason. With
        `publish` "anyway" it is published all the same. All levels of a cascade are updated as one, and their accuracy is
        proved again. If they do not prove the target, nothing is published in any case. The students of a tenant are trained
        again, by the options that they were made with.
        """
        data = _sources(train=train, dev=dev, test=test, unlabelled=unlabelled, proof=proof)
        columns = _without_none(text=text_column, pair=pair_column, label=label_column) or None
        request = {"domain": domain, "base": base, "publish": publish, "settings": settings}
        return self._submit("tenant.update", tenant=tenant, data=data, columns=columns, **request)

    def train_students(
        self,
        tenant: str,
        *,
        train: SourceOrUpload,
        dev: SourceOrUpload | None = None,
        test: SourceOrUpload | None = None,
        unlabelled: SourceOrUpload | None = None,
        base: str | None = None,
        form: str | None = None,
        teacher: str | None = None,
        most: int | None = None,
        text_column: str | None = None,
        pair_column: str | None = None,
        label_column: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """Make students of an existing tenant over the trunk `base`, by default the server's only trunk. Returns the job's id.

        At `most` so many shallow students learn together what the teacher says of all texts, also of the `unlabelled`
        ones. `form`: `shared`, adapters in the trunk's layers, or `own`, layers of each student's own. `teacher`: `auto` for
        the tenant's best model on dev, `full` for a full fine-tuning, or the name of a base whose adapter teaches. The versions
        of the tenant over other bases stay. Raises DataError for a task other than classification and regression.
        """
        data = _sources(train=train, dev=dev, test=test, unlabelled=unlabelled)
        columns = _without_none(text=text_column, pair=pair_column, label=label_column) or None
        students = _without_none(form=form, teacher=teacher, most=most)
        request = {"base": base, "students": students, "settings": settings}
        return self._submit("tenant.students", tenant=tenant, data=data, columns=columns, **request)

    def target_tenant(
        self,
        tenant: str,
        *,
        accuracy: float | None = None,
        latency_ms: float | None = None,
        deterministic: bool | None = None,
        on_late: str | None = None,
    ) -> str:
        """Select a tenant's cascade again for another target, without training. Returns the job's id.

        What is None stays as it is. The arguments are those of `create_tenant`; the job fails as its job does.
        """
        return self._submit(
            "tenant.target", tenant=tenant, target=_target(accuracy, latency_ms, deterministic, on_late)
        )

    def plan(self, action: str, *, told: Callable[[JobEvent], None] = lambda event: None, **request: Any) -> Plan:
        """Return the cost of `tenant.create`, `tenant.update`, `tenant.students`, `domain.create` or `domain.update`.

        A worker process makes a dry run: it reads the data, so that errors in them are raised here too. If no worker process
        answers within about ten seconds, the call waits for one and calls `told` with each change.
        """
        if isinstance(data := request.get("data"), Mapping):
            request["data"] = _sources(**data)
        if "corpus" in request:
            request |= _corpus_files(request["corpus"], request.get("dev", ()))
        answer = self.ask(action, **request, dry_run=True)
        if "plan" not in answer:
            answer = self.wait(str(answer["job"]), told).result or {}
        plan = answer.get("plan")
        if not isinstance(plan, dict) or "estimated_s" not in plan:
            raise InternalError("the server's answer to a dry run has no plan")
        return Plan(float(plan["estimated_s"]), plan)

    def delete_tenant(self, tenant: str, *, base: str | None = None) -> None:
        """Delete a tenant for good, or only its versions over `base`; the server stops serving it there within a second.

        A tenant goes with its last base. Raises UnknownTenantError.
        """
        self.ask("tenant.delete", tenant=tenant, base=base)

    def rollback_tenant(self, tenant: str, version: int | None = None) -> int:
        """Go back to another kept version within a second, over all bases of the tenant as one; return the highest number.

        Each base then serves its newest kept version up to `version`; a base without such a version no longer has the tenant.
        By default only the last publication is undone: its base serves the most recently served of its lower versions again.
        Raises UnknownVersionError. Raises ConflictError, which names the job, while an update of the tenant runs.
        """
        return int(self.ask("tenant.rollback", tenant=tenant, version=version)["version"])

    def limit_tenant(
        self,
        tenant: str | None,
        *,
        requests_per_s: float | None = None,
        tokens_per_s: float | None = None,
        concurrent: int | None = None,
        clear: bool = False,
    ) -> dict[str, Any]:
        """Set all limits of a tenant within a second, or with None the default of all tenants. Limits left out are removed.

        Without limits nothing is changed, unless `clear` removes all. Return the limits, with `in_force` those of the default
        where the tenant has none. Raises UnknownTenantError.
        """
        limits = {"requests_per_s": requests_per_s, "tokens_per_s": tokens_per_s, "concurrent": concurrent}
        answer = self.ask("tenant.limit", tenant=tenant, **limits, clear=clear or None)
        return {key: answer[key] for key in ("tenant", "limits", "in_force")}

    def set_least_students(self, tenant: str, least: int) -> None:
        """Answer each text of a tenant by at least `least` of its students within a second, without training.

        A version with fewer students answers by all of them. Raises UnknownTenantError, or BadManageRequestError for a number
        out of range.
        """
        self.ask("tenant.least_students", tenant=tenant, least=least)

    def show_tenant(self, tenant: str, *, base: str | None = None) -> TenantDetails:
        """Return a tenant as it is served over `base`, by default over its default base. Raises UnknownTenantError."""
        return parse_answer(TenantDetails, self.ask("tenant.show", tenant=tenant, base=base)["tenant"])

    def list_tenants(self, prefix: str = "", *, after: str = "", limit: int = 100) -> list[Tenant]:
        """Return at most `limit` tenants, sorted by name, that start with `prefix` and come after the name `after`.

        Each is listed once, as its default base serves it.
        """
        tenants = self.ask("tenant.list", prefix=prefix, after=after, limit=limit)["tenants"]
        return [parse_answer(Tenant, tenant) for tenant in tenants]

    def create_domain(
        self,
        domain: str,
        *,
        corpus: SourceOrUpload,
        dev: Sequence[SourceOrUpload] = (),
        parent: str | None = None,
        base: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """Pretrain a new domain on a corpus, below `parent` or the root. Returns the job's id.

        `dev` are files of labelled examples. The job measures on them and on held-out text whether the domain helps: `verdict`,
        `why` and `advice` in its result. `settings`: tokens, warmup_tokens, learning_rate, top_percent (0 for a domain without
        a table), seed. Raises AlreadyThereError, CorpusTooSmallError, DataError.
        """
        files = _corpus_files(corpus, dev)
        return self._submit("domain.create", domain=domain, **files, parent=parent, base=base, settings=settings)

    def update_domain(
        self,
        domain: str,
        *,
        corpus: SourceOrUpload,
        dev: Sequence[SourceOrUpload] = (),
        base: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """Pretrain a domain's next version. Returns the job's id. Tenants keep the version of the domain that they use.

        The version is compared with the version before, as `create_domain` compares with the parent.
        """
        files = _corpus_files(corpus, dev)
        return self._submit("domain.update", domain=domain, **files, base=base, settings=settings)

    def delete_domain(self, domain: str, *, base: str | None = None) -> None:
        """Delete a domain. Raises UnknownDomainError, or DomainInUseError, which names tenants, domains and jobs over it."""
        self.ask("domain.delete", domain=domain, base=base)

    def show_domain(self, domain: str, *, base: str | None = None) -> DomainDetails:
        """Return a domain. Raises UnknownDomainError."""
        return parse_answer(DomainDetails, self.ask("domain.show", domain=domain, base=base)["domain"])

    def list_domains(self, base: str | None = None) -> list[Domain]:
        """Return the domains of one base, or of all bases."""
        return [parse_answer(Domain, domain) for domain in self.ask("domain.list", base=base)["domains"]]

    def list_bases(self) -> list[Base]:
        """Return the bases that the server serves, the default base first."""
        return [parse_answer(Base, base) for base in self.ask("base.list")["bases"]]

    def show_job(self, job: str) -> Job:
        """Return a job. Raises UnknownJobError."""
        return parse_answer(Job, self.ask("job.show", job=job)["job"])

    def list_jobs(self, states: Iterable[str] | None = None, *, limit: int = 100) -> list[Job]:
        """Return at most `limit` jobs in any of `states`, newest first."""
        answer = self.ask("job.list", states=None if states is None else list(states), limit=limit)
        return [parse_answer(Job, job) for job in answer["jobs"]]

    def cancel_job(self, job: str) -> Job:
        """Cancel a job. A queued job ends immediately, a running job soon, and an ended job stays as it is."""
        return parse_answer(Job, self.ask("job.cancel", job=job)["job"])

    def watch(self, job: str, *, patience_s: float = RETRY_S) -> Iterator[JobEvent]:
        """Yield each change of a job, from its current state to its end. The client asks twice a second.

        The client waits up to `patience_s` for a server that is away, because jobs survive a restart of the server. Raises
        UnknownJobError.
        """
        last: JobEvent | None = None
        while True:
            if (event := with_retries(lambda: self.show_job(job).event, patience_s)) != last:
                last = event
                yield event
            if event.ended:
                return
            time.sleep(POLL_EVERY_S)

    def wait(self, job: str, told: Callable[[JobEvent], None] = lambda event: None) -> JobEvent:
        """Wait until a job is done, and call `told` with each change. Raises the job's error, or JobCancelledError.

        The server serves the new version within a second after the job's end. Until then it may answer with the version before,
        or with UnknownTenantError for a new tenant.
        """
        event = None
        for event in self.watch(job):
            told(event)
        assert event is not None
        if event.failure is not None:
            raise event.failure
        if event.state == "cancelled":
            raise JobCancelledError(f"job {job} was cancelled")
        return event

    def create_key(self, tenant: str, scope: str = "infer", *, expires_in_s: float | None = None) -> NewKey:
        """Create a key of a tenant, which servers accept within a second. Its `text` cannot be had again.

        `scope` is `infer`, or `manage` for a key that also sends manage requests about the tenant. Needs an admin's key.
        """
        answer = self.ask("key.create", tenant=tenant, scope=scope, expires_in_s=expires_in_s)
        return parse_answer(NewKey, answer["key"])

    def create_operator_key(self, role: str, *, expires_in_s: float | None = None) -> NewKey:
        """Create a key of an operator with the role `read`, `manage` or `admin`. Needs an admin's key."""
        return parse_answer(NewKey, self.ask("key.create", operator=role, expires_in_s=expires_in_s)["key"])

    def list_keys(self, tenant: str | None = None) -> list[AccessKey]:
        """Return all keys, or those of a tenant, sorted by their ids. Needs an admin's key."""
        keys: list[AccessKey] = []
        while True:
            after = keys[-1].id if keys else ""
            page = self.ask("key.list", tenant=tenant, after=after, limit=PAGE_SIZE)["keys"]
            keys += [parse_answer(AccessKey, key) for key in page]
            if len(page) < PAGE_SIZE:
                return keys

    def revoke_key(self, key_id: str) -> RevokedKey:
        """Revoke a key by its id; all servers refuse it within a second. Raises UnknownKeyError. Needs an admin's key."""
        return parse_answer(RevokedKey, self.ask("key.revoke", key=key_id)["key"])

    def audit(self, *, key: str | None = None, subject: str | None = None, limit: int = 100) -> list[AuditEntry]:
        """Return at most `limit` entries of the audit log, newest first: of a key's id or a subject such as `tenant:films`."""
        entries: list[AuditEntry] = []
        while len(entries) < limit:
            before = entries[-1].seq if entries else None
            size = min(PAGE_SIZE, limit - len(entries))
            page = self.ask("audit.list", key=key, subject=subject, before=before, limit=size)["entries"]
            entries += [parse_answer(AuditEntry, entry) for entry in page]
            if len(page) < size:
                break
        return entries

    def ask(self, action: str, **request: Any) -> dict[str, Any]:
        """Send any manage request, without keys that are None, and return the server's answer.

        For requests that have no method here. Raises InternalError if the answer cannot be read.
        """
        answer = self._transport.ask(json.dumps(_without_none(action=action, **request)).encode())
        with suppress(ValueError):
            values = json.loads(answer)
            if isinstance(values, dict) and values.get("ok") is True:
                return _JsonObject(values)
        raise InternalError(f"the server's answer to {action} cannot be read: {answer[:100]!r}")

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def __enter__(self) -> ManageClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, action: str, **request: Any) -> str:
        return str(self.ask(action, **request)["job"])


class _JsonObject(dict[str, Any]):
    """A server's answer. A missing key raises InternalError, because it is the server's fault."""

    def __missing__(self, key: str) -> Any:
        raise InternalError(f"the server's answer lacks {key!r}")


def _source(name: str, source: Any) -> Source:
    if isinstance(source, Upload):
        return {"upload": source.id}
    if not isinstance(source, Mapping):
        raise BadInputError(f"{name}: give what `upload` or `on_server` returned, not {source!r:.100}")
    return source


def _sources(**sources: Any) -> dict[str, Source]:
    return {name: _source(name, source) for name, source in sources.items() if source is not None}


def _target(
    accuracy: float | None, latency_ms: float | None, deterministic: bool | None, on_late: str | None
) -> dict[str, Any]:
    return _without_none(accuracy=accuracy, latency_ms=latency_ms, deterministic=deterministic, on_late=on_late)


def _corpus_files(corpus: SourceOrUpload, dev: Sequence[SourceOrUpload]) -> dict[str, Any]:
    """Return the keys of a request that name a domain's files."""
    return {**_sources(corpus=corpus), "dev": [_source("dev", source) for source in dev] or None}


def _without_none(**request: Any) -> dict[str, Any]:
    """Return the keys of a request that have a value."""
    return {key: value for key, value in request.items() if value is not None}
