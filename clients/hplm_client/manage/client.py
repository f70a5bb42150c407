"""Client of the manager: domains, tenants, jobs, uploads."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from hplm.errors import BadInputError, HplmError, InternalError, JobCancelledError, UnknownUploadError
from hplm_client.manage.answers import (
    Domain,
    DomainDetails,
    Job,
    JobEvent,
    Plan,
    Tenant,
    TenantDetails,
    Upload,
    record,
)
from hplm_client.manage.transport import Transport, TritonTransport
from hplm_client.manage.upload import Sent, send_file
from hplm_client.transport.retry import PATIENCE_S, passes, patiently

POLL_EVERY_S = 0.5
PAGE = 1000  # most that a server lists in one answer
# A file to work on: {"upload": id} or {"path": where it lies on the server}.
Source = Mapping[str, str]
# Who lists uploads may give one of those.
GivenSource: TypeAlias = "Source | Upload"


class ManageClient:
    """Creates, updates and deletes domains and tenants of a running server, over HTTP or gRPC.

    >>> with ManageClient("grpc://127.0.0.1:8001") as manage:  # doctest: +SKIP
    ...     job = manage.create_tenant("acme", train=manage.upload("train.csv"))
    ...     manage.wait(job)
    ...     manage.show_tenant("acme").about["scores"]

    What takes long is a job: its id comes back at once, `watch` and `wait` follow it. Every request names its files by what
    `upload` or `on_server` returned. An upload goes when its job is done or its data are refused; after another failure, or
    where the job is cancelled, a new job may name it for a day, or `drop_upload` drops it. One client for one thread; addresses
    and `headers` as of `Client`. Raises the errors of `hplm.errors`.
    """

    def __init__(
        self,
        url: str = "grpc://127.0.0.1:8001",
        *,
        timeout_s: float = 60.0,
        headers: Mapping[str, str] | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.url = url
        self._transport = transport or TritonTransport(url, timeout_s, headers)

    def upload(self, path: str | Path, sent: Sent = lambda sent_bytes, total_bytes: None) -> Source:
        """Send a file in chunks with a checksum; `sent(bytes so far, bytes in all)` is told after each.

        Raises DataError where it cannot be read, UploadError where the server refuses it.
        """
        return {"upload": send_file(self.ask, Path(path), sent)}

    def drop_upload(self, source: GivenSource) -> None:
        """Have the server forget what `upload` sent, or one that `list_uploads` names; what a job waits for stays.

        What is gone already is fine.
        """
        if upload := _source("upload", source).get("upload"):
            self.ask("upload.drop", upload=upload)

    def list_uploads(self) -> list[Upload]:
        """What was uploaded and is not used up, oldest first: it counts against the room for all uploads."""
        found: list[Upload] = []
        while True:
            try:
                page = self.ask("upload.list", after=found[-1].id if found else "", limit=PAGE)["uploads"]
            except UnknownUploadError:
                # It has gone meanwhile: on from the one before.
                found.pop()
                continue
            found += [record(Upload, one) for one in page]
            if len(page) < PAGE:
                # One whose job ended between two pages has moved to the front, and others come again.
                return list({one.id: one for one in found}.values())

    @staticmethod
    def on_server(path: str) -> Source:
        """A file that lies on the server, where its operator allows that."""
        return {"path": path}

    def create_tenant(
        self,
        tenant: str,
        *,
        train: GivenSource,
        dev: GivenSource | None = None,
        test: GivenSource | None = None,
        unlabelled: GivenSource | None = None,
        domain: str | None = None,
        base: str | None = None,
        task: str | None = None,
        text_column: str | None = None,
        pair_column: str | None = None,
        label_column: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """Fine-tune a new tenant over a domain, by default the root; returns the job's id.

        A model that trains all upper layers on the labelled files labels the `unlabelled` texts, which are learned too.
        `text_column`, `pair_column` and `label_column` name columns of the files that have other names than the usual ones.
        `settings`: epochs, learning_rates, patience, pooling, seed. Raises AlreadyThereError, DataError and more.
        """
        files = _files(train, dev, test, unlabelled, text_column, pair_column, label_column)
        return self._job(
            "tenant.create", tenant=tenant, **files, domain=domain, base=base, task=task, settings=settings
        )

    def update_tenant(
        self,
        tenant: str,
        *,
        train: GivenSource,
        dev: GivenSource | None = None,
        test: GivenSource | None = None,
        unlabelled: GivenSource | None = None,
        domain: str | None = None,
        text_column: str | None = None,
        pair_column: str | None = None,
        label_column: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """Fine-tune a tenant's next version on the same labels, by default over its domain; returns the job's id.

        Names of columns are as for `create_tenant`; those of the version before are not remembered. Where that is no better on
        dev nothing is published: `published` of the job's result is false, and `why` says it.
        """
        files = _files(train, dev, test, unlabelled, text_column, pair_column, label_column)
        return self._job("tenant.update", tenant=tenant, **files, domain=domain, settings=settings)

    def plan(self, action: str, *, told: Callable[[JobEvent], None] = lambda event: None, **request: Any) -> Plan:
        """A dry run of `tenant.create`, `tenant.update`, `domain.create` or `domain.update`: what it would cost.

        A worker makes it from the data, so what is wrong with them is found out here too. Where none has within some ten
        seconds it is waited for, `told` of each change.
        """
        if isinstance(data := request.get("data"), Mapping):
            request["data"] = _sources(**data)
        if "corpus" in request:
            request |= _sources(corpus=request["corpus"])
        answer = self.ask(action, **_given(**request), dry_run=True)
        if "plan" not in answer:
            answer = self.wait(str(answer["job"]), told).result or {}
        found = answer.get("plan")
        if not isinstance(found, dict) or "estimated_s" not in found:
            raise InternalError("the server's answer to a dry run has no plan")
        return Plan(float(found["estimated_s"]), found)

    def delete_tenant(self, tenant: str) -> None:
        """Serve a tenant no more, for good, within a second. Raises UnknownTenantError."""
        self.ask("tenant.delete", tenant=tenant)

    def rollback_tenant(self, tenant: str, version: int | None = None) -> int:
        """Serve another kept version within a second, by default of the lower ones the last served; returns its number.

        Raises UnknownVersionError, or ConflictError, which names the job, while an update of the tenant runs.
        """
        return int(self.ask("tenant.rollback", **_given(tenant=tenant, version=version))["version"])

    def show_tenant(self, tenant: str) -> TenantDetails:
        """Raises UnknownTenantError."""
        return record(TenantDetails, self.ask("tenant.show", tenant=tenant)["tenant"])

    def list_tenants(self, prefix: str = "", *, after: str = "", limit: int = 100) -> list[Tenant]:
        """Sorted by name: those that start with `prefix` and come after `after`, at most `limit`."""
        found = self.ask("tenant.list", prefix=prefix, after=after, limit=limit)["tenants"]
        return [record(Tenant, one) for one in found]

    def create_domain(
        self,
        domain: str,
        *,
        corpus: GivenSource,
        parent: str | None = None,
        base: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """Pretrain a branch further on a corpus, below `parent` or the root; returns the job's id.

        `settings`: tokens, warmup_tokens, learning_rate, top_percent, seed. Raises AlreadyThereError, CorpusTooSmallError.
        """
        found = _sources(corpus=corpus)
        return self._job("domain.create", domain=domain, **found, parent=parent, base=base, settings=settings)

    def update_domain(
        self, domain: str, *, corpus: GivenSource, base: str | None = None, settings: Mapping[str, Any] | None = None
    ) -> str:
        """Pretrain a branch's next version; returns the job's id. Tenants stay on the version they are on."""
        return self._job("domain.update", domain=domain, **_sources(corpus=corpus), base=base, settings=settings)

    def delete_domain(self, domain: str, *, base: str | None = None) -> None:
        """Raises DomainInUseError, which names the tenants, domains and jobs that stand on it, or UnknownDomainError."""
        self.ask("domain.delete", **_given(domain=domain, base=base))

    def show_domain(self, domain: str, *, base: str | None = None) -> DomainDetails:
        """Raises UnknownDomainError."""
        return record(DomainDetails, self.ask("domain.show", **_given(domain=domain, base=base))["domain"])

    def list_domains(self, base: str | None = None) -> list[Domain]:
        """Of one base or of all."""
        return [record(Domain, one) for one in self.ask("domain.list", **_given(base=base))["domains"]]

    def show_job(self, job: str) -> Job:
        """Raises UnknownJobError."""
        return record(Job, self.ask("job.show", job=job)["job"])

    def list_jobs(self, states: Iterable[str] | None = None, *, limit: int = 100) -> list[Job]:
        """The newest first."""
        wanted = None if states is None else list(states)
        return [record(Job, one) for one in self.ask("job.list", **_given(states=wanted), limit=limit)["jobs"]]

    def cancel_job(self, job: str) -> Job:
        """A waiting job ends at once, a running one soon; one that has ended stays as it is."""
        return record(Job, self.ask("job.cancel", job=job)["job"])

    def watch(self, job: str, *, patience_s: float = PATIENCE_S) -> Iterator[JobEvent]:
        """Every change of a job, from its state now to its end, which is the last.

        On a `grpc://` address the server streams them as they happen. On an `http://` address, over which Triton cannot
        stream, the job is looked up every half second. A server that is away for up to `patience_s` is waited for: jobs
        survive its restart. Raises UnknownJobError.
        """
        told: JobEvent | None = None
        while told is None or not told.ended:
            try:
                for event in self._events(job):
                    if event != told:
                        told = event
                        yield event
                    if event.ended:
                        return
            except HplmError as error:
                if not passes(error):
                    raise
            # Looked up at least once between two streams: one that keeps breaking hides nothing.
            if (event := patiently(lambda: self.show_job(job).event, patience_s)) != told:
                told = event
                yield event
            time.sleep(POLL_EVERY_S)

    def wait(self, job: str, told: Callable[[JobEvent], None] = lambda event: None) -> JobEvent:
        """Until a job has ended well, `told` of each change. Raises the error it failed with, or JobCancelledError.

        What it made is mostly served by then, at the latest within a second: a server that is slow to look may answer
        UnknownTenantError, or with the version before, for so long.
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

    def ask(self, action: str, **request: Any) -> dict[str, Any]:
        """Any manage request as the server takes it; its answer. For what has no method here."""
        return _read(self._transport.ask(json.dumps({"action": action, **request}).encode()), action)

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def __enter__(self) -> ManageClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _job(self, action: str, **request: Any) -> str:
        return str(self.ask(action, **_given(**request))["job"])

    def _events(self, job: str) -> Iterator[JobEvent]:
        if not self._transport.streams:
            while True:
                yield self.show_job(job).event
                time.sleep(POLL_EVERY_S)
        for raw in self._transport.events(json.dumps({"action": "job.watch", "job": job}).encode()):
            yield record(JobEvent, json.loads(raw))


class _Answer(dict[str, Any]):
    """What the server said; asking it for what it lacks is the server's fault."""

    def __missing__(self, key: str) -> Any:
        raise InternalError(f"the server's answer lacks {key!r}")


def _read(raw: bytes, action: str) -> _Answer:
    try:
        answer = json.loads(raw)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or answer.get("ok") is not True:
        raise InternalError(f"the server's answer to {action} cannot be read: {raw[:100]!r}")
    return _Answer(answer)


def _source(name: str, given: Any) -> Source:
    if isinstance(given, Upload):
        return {"upload": given.id}
    if not isinstance(given, Mapping):
        raise BadInputError(f"{name}: give what `upload` or `on_server` returned, not {given!r:.100}")
    return given


def _sources(**given: Any) -> dict[str, Source]:
    return {name: _source(name, one) for name, one in given.items() if one is not None}


def _files(
    train: GivenSource,
    dev: GivenSource | None,
    test: GivenSource | None,
    unlabelled: GivenSource | None,
    text_column: str | None,
    pair_column: str | None,
    label_column: str | None,
) -> dict[str, Any]:
    """Return the keys of a request that say what a tenant learns from."""
    columns = _given(text=text_column, pair=pair_column, label=label_column)
    data = _sources(train=train, dev=dev, test=test, unlabelled=unlabelled)
    return {"data": data, "columns": columns or None}


def _given(**request: Any) -> dict[str, Any]:
    """Without what the caller left out."""
    return {key: value for key, value in request.items() if value is not None}
