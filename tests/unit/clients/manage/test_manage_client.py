"""The manage client with the real service and registry in this process."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hplm_client import JobEvent, ManageClient
from hplm_client.manage import upload as manage_upload
from hplm_client.manage.answers import Upload
from hplm_client.manage.client import PAGE_SIZE
from hplm_client.manage.upload import name_on_server
from sqlalchemy import insert

from hplm import errors
from hplm.core.settings import ManagerSettings
from hplm.errors import HplmError, UnreachableError, from_wire
from hplm.manage.access import ANYONE, Caller
from hplm.manage.service import ManageService
from hplm.registry import schema
from hplm.registry.registry import Registry
from hplm.registry.uploads import expire_uploads
from hplm.serving.manage_stage import AdmittedCall, Handle, answered
from hplm.store.layout import Store

LEASE_S = 30.0
ROWS = "text,label\n" + "".join(f"text {i},{'yes' if i % 2 else 'no'}\n" for i in range(40))


@dataclass
class InProcess:
    """A transport to a service in this process. Errors travel as text, as over Triton. `faults` are raised first."""

    handle: Handle
    faults: list[HplmError] = field(default_factory=list)
    asked: list[bytes] = field(default_factory=list)

    def ask(self, request: bytes) -> bytes:
        if self.faults:
            raise self.faults.pop(0)
        self.asked.append(request)
        return self._arrived(answered(self.handle, AdmittedCall(request, ANYONE)))

    def close(self) -> None:
        pass

    def _arrived(self, answer: bytes | HplmError) -> bytes:
        if isinstance(answer, HplmError):
            arrived = from_wire(answer.wire())
            assert arrived is not None
            raise arrived
        return answer


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store whose registry has a base and its root."""
    made = Store(tmp_path / "store")
    made.root.mkdir()
    with closing(Registry.open(made, create=True)) as registry:
        registry.publish_base("tiny", "print", "bases/tiny", 1.0)
        registry.publish_domain("tiny", "general", "plots/general", 1.0, parent_id=None, about={}, expected=None)
    return made


@pytest.fixture
def registry(store: Store) -> Iterator[Registry]:
    with closing(Registry.open(store)) as opened:
        yield opened


@pytest.fixture
def transport(store: Store) -> Iterator[InProcess]:
    settings = ManagerSettings("", "tiny", "general", upload_chunk_bytes=100)
    with closing(ManageService(store, lambda: settings)) as service:
        yield InProcess(service.handle)


@pytest.fixture
def manage(transport: InProcess) -> Iterator[ManageClient]:
    with ManageClient(transport=transport) as client:
        yield client


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text(ROWS)
    return path


def publish(registry: Registry, name: str, count: int = 1) -> None:
    """Publish versions of a tenant, as a worker process does."""
    for number in range(1, count + 1):
        registry.publish_tenant(
            name,
            registry.domain_versions("tiny", "general")[0].id,
            f"tenants/{name}/{number}",
            float(number),
            about={"scores": {"dev_accuracy": number / 10}, "texts": number},
            number=number,
            expected=number - 1 or None,
        )


def test_a_file_is_uploaded_in_chunks_and_arrives_whole(manage: ManageClient, store: Store, rows: Path) -> None:
    progress: list[tuple[int, int]] = []
    source = manage.upload(rows, lambda sent_bytes, total_bytes: progress.append((sent_bytes, total_bytes)))
    (arrived,) = store.upload(source["upload"]).iterdir()
    assert hashlib.sha256(arrived.read_bytes()).digest() == hashlib.sha256(rows.read_bytes()).digest()
    total = len(ROWS)
    assert [sent for sent, _ in progress] == [*range(100, total, 100), total]
    assert {total_bytes for _, total_bytes in progress} == {total}


@pytest.mark.parametrize("action", ["create", "update"])
def test_given_names_of_columns_are_part_of_the_request(
    manage: ManageClient, transport: InProcess, registry: Registry, rows: Path, action: str
) -> None:
    if action == "update":
        publish(registry, "acme")
    make = {"create": manage.create_tenant, "update": manage.update_tenant}[action]
    for names, expected in (
        ({}, None),
        ({"text_column": "Body", "label_column": "Category"}, {"text": "Body", "label": "Category"}),
        ({"pair_column": "Answer"}, {"pair": "Answer"}),
    ):
        job = make("acme", train=manage.upload(rows), **names)
        assert json.loads(transport.asked[-1]).get("columns") == expected
        assert registry.job(job).request["columns"] == (expected or {})
        manage.cancel_job(job)


def test_a_chunk_is_sent_again_if_the_server_is_full_or_away(
    manage: ManageClient, transport: InProcess, store: Store, rows: Path
) -> None:
    def add_faults(sent_bytes: int, total_bytes: int) -> None:
        transport.faults = [errors.QueueFullError("full"), UnreachableError("away")]

    source = manage.upload(rows, add_faults)
    (arrived,) = store.upload(source["upload"]).iterdir()
    assert arrived.read_text() == ROWS


def test_an_upload_waits_for_room_on_the_server_but_begins_once(
    manage: ManageClient, transport: InProcess, registry: Registry, rows: Path
) -> None:
    transport.faults = [errors.QueueFullError("full"), errors.QueueFullError("full")]
    source = manage.upload(rows)
    assert [upload.id for upload in registry.uploads()] == [source["upload"]]
    # After this error the server may have begun an upload.
    transport.faults = [UnreachableError("away")]
    with pytest.raises(UnreachableError):
        manage.upload(rows)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), errors.StoreUnavailableError("full"), BrokenPipeError()])
def test_an_interrupted_upload_is_dropped_on_the_server(
    manage: ManageClient, registry: Registry, rows: Path, error: BaseException
) -> None:
    def interrupt(sent_bytes: int, total_bytes: int) -> None:
        raise error

    with pytest.raises(type(error)):
        manage.upload(rows, interrupt)
    assert registry.uploads() == []


def test_a_chunk_whose_call_timed_out_is_sent_again(
    manage: ManageClient, transport: InProcess, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manage_upload, "RETRY_S", -1.0)
    real_ask, failures = transport.ask, iter([True, True, False, True])

    def ask(request: bytes) -> bytes:
        if b"upload.chunk" in request and next(failures, False):
            raise errors.UnreachableError("timed out")
        return real_ask(request)

    monkeypatch.setattr(transport, "ask", ask)
    assert manage.upload(rows)["upload"]


def test_many_uploads_are_listed_page_by_page_even_if_the_last_of_a_page_is_dropped_meanwhile(
    manage: ManageClient, transport: InProcess, registry: Registry
) -> None:
    rows = [
        {"id": f"{number:04}", "bytes": 1, "sha256": "a", "received": 0, "created_s": 1.0, "complete": False}
        for number in range(2 * PAGE_SIZE)
    ]
    with registry._database.writing() as connection:
        connection.execute(insert(schema.uploads), rows)
    real_handle, sizes = transport.handle, []

    def handle(raw: bytes, caller: Caller) -> dict[str, object]:
        answer: Any = real_handle(raw, caller)
        sizes.append(len(answer["uploads"]))
        if len(sizes) == 1:
            registry.drop_uploads(ids=[answer["uploads"][-1]["id"]])
        return answer

    transport.handle = handle
    listed = [upload.id for upload in manage.list_uploads()]
    assert listed == [row["id"] for number, row in enumerate(rows, 1) if number != PAGE_SIZE]
    assert sizes == [PAGE_SIZE, PAGE_SIZE, 0]


def test_an_upload_whose_job_ends_between_two_pages_is_listed_once(
    manage: ManageClient, transport: InProcess, registry: Registry
) -> None:
    rows = [
        {"id": f"{number:04}", "bytes": 1, "sha256": "a", "received": 0, "created_s": 1.0, "complete": False}
        for number in range(PAGE_SIZE + 1)
    ]
    with registry._database.writing() as connection:
        connection.execute(insert(schema.uploads), rows)
    real_handle, pages = transport.handle, []

    def handle(raw: bytes, caller: Caller) -> dict[str, object]:
        answer: Any = real_handle(raw, caller)
        pages.append(answer["uploads"])
        if len(pages) == 1:
            with registry._database.writing() as connection:
                expire_uploads(connection, [pages[0][-1]["id"]])
        return answer

    transport.handle = handle
    assert [upload.id for upload in manage.list_uploads()] == [row["id"] for row in rows]


def test_a_file_that_is_missing_empty_a_pipe_or_changes_is_refused_by_name(manage: ManageClient, rows: Path) -> None:
    with pytest.raises(errors.DataError, match=r"nowhere\.csv cannot be read"):
        manage.upload("nowhere.csv")
    rows.write_text("")
    with pytest.raises(errors.DataError, match=r"rows\.csv is empty"):
        manage.upload(rows)
    os.mkfifo(pipe := rows.with_name("pipe.csv"))
    with pytest.raises(errors.DataError, match=r"pipe\.csv is a pipe: .*, so send a file"):
        manage.upload(pipe)
    rows.write_text(ROWS)

    def change(sent_bytes: int, total_bytes: int) -> None:
        rows.write_text("other\n" * 100)

    with pytest.raises(errors.UploadError):
        manage.upload(rows, change)


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("a.csv", "a.csv"),
        ("my data (1).csv", "my-data--1-.csv"),
        ("../x.csv", "x.csv"),
        ("ä.jsonl", "file.jsonl"),
        ("данные.csv", "file.csv"),
        ("数据.txt.gz", "file.txt.gz"),
        (".hidden.tsv", "file.hidden.tsv"),
        ("ä-1.csv", "file1.csv"),
        ("ü" * 200 + ".conll", "file.conll"),
        ("x" * 200 + ".conll", "x" * 94 + ".conll"),
    ],
)
def test_a_name_keeps_the_letters_that_the_server_takes(name: str, sent: str) -> None:
    assert name_on_server(Path(name)) == sent


def test_creating_a_tenant_is_a_job_with_the_requested_settings(
    manage: ManageClient, registry: Registry, rows: Path
) -> None:
    job = manage.create_tenant("acme", train=manage.upload(rows), settings={"epochs": 2})
    shown = manage.show_job(job)
    assert (shown.kind, shown.subject, shown.state) == ("tenant.create", "tenant:acme", "queued")
    assert registry.job(job).request["settings"] == {"epochs": 2}
    assert manage.list_jobs(["queued"]) == [shown]
    assert manage.list_jobs(["running"]) == []


def test_tenants_are_shown_listed_rolled_back_and_deleted(manage: ManageClient, registry: Registry) -> None:
    publish(registry, "acme", 2)
    publish(registry, "beta")
    shown = manage.show_tenant("acme")
    assert (shown.name, shown.domain, shown.version, shown.base) == ("acme", "general", 2, "tiny")
    assert shown.about["scores"] == {"dev_accuracy": 0.2}
    assert [(version.version, version.scores["dev_accuracy"]) for version in shown.versions] == [(1, 0.1), (2, 0.2)]
    assert [(tenant.name, tenant.texts) for tenant in manage.list_tenants()] == [("acme", 2), ("beta", 1)]
    assert [tenant.name for tenant in manage.list_tenants("b", limit=1)] == ["beta"]
    assert manage.rollback_tenant("acme") == 1
    assert manage.rollback_tenant("acme", 2) == 2
    manage.delete_tenant("acme")
    assert [tenant.name for tenant in manage.list_tenants()] == ["beta"]


def test_a_tenant_is_shown_over_each_of_its_bases_and_deleted_over_one(
    manage: ManageClient, registry: Registry
) -> None:
    publish(registry, "acme", 2)
    registry.publish_base("second", "f", "bases/second", 1.0)
    root = registry.publish_domain("second", "root", "plots/root", 1.0, parent_id=None, about={}, expected=None)
    registry.publish_tenant("acme", root.id, "tenants/acme/3", 3.0, about={"texts": 1}, number=3, expected=None)
    shown = manage.show_tenant("acme")
    assert (shown.base, shown.version, shown.default_base, shown.bases) == ("tiny", 2, "tiny", {"second": 3, "tiny": 2})
    assert [(version.version, version.base) for version in shown.versions] == [(1, "tiny"), (2, "tiny"), (3, "second")]
    other = manage.show_tenant("acme", base="second")
    assert (other.base, other.domain, other.version) == ("second", "root", 3)
    (listed,) = manage.list_tenants()
    assert (listed.base, listed.version, listed.bases) == ("tiny", 2, {"second": 3, "tiny": 2})
    answer = manage.ask("tenant.rollback", tenant="acme")
    assert (answer["version"], answer["bases"]) == (2, {"tiny": 2})
    assert manage.rollback_tenant("acme", 3) == 3
    manage.delete_tenant("acme", base="tiny")
    assert (manage.show_tenant("acme").base, manage.show_tenant("acme").bases) == ("second", {"second": 3})


def test_domains_are_shown_and_listed_and_a_used_domain_is_not_deleted(
    manage: ManageClient, registry: Registry
) -> None:
    root = registry.domain_versions("tiny", "general")[0].id
    made = registry.publish_domain(
        "tiny", "law", "domains/tiny/law/1", 2.0, parent_id=root, about={"tokens": 7}, expected=None
    )
    assert [domain.name for domain in manage.list_domains()] == ["general", "law"]
    shown = manage.show_domain("law")
    assert (shown.parent, shown.version, shown.about) == ("general", 1, {"tokens": 7})
    registry.publish_tenant("acme", made.id, "tenants/acme/1", 3.0, about={}, number=1, expected=None)
    with pytest.raises(errors.DomainInUseError, match="acme"):
        manage.delete_domain("law")
    manage.delete_tenant("acme")
    registry.retire(1, 4.0, base="tiny")
    manage.delete_domain("law")
    assert [domain.name for domain in manage.list_domains("tiny")] == ["general"]


ERRORS: list[tuple[Callable[[ManageClient], object], type[HplmError]]] = [
    (lambda m: m.show_tenant("nobody"), errors.UnknownTenantError),
    (lambda m: m.show_tenant("a/b"), errors.TenantNameError),
    (lambda m: m.show_domain("nowhere"), errors.UnknownDomainError),
    (lambda m: m.show_job("j1"), errors.UnknownJobError),
    (lambda m: next(m.watch("j1")), errors.UnknownJobError),
    (lambda m: m.cancel_job("j1"), errors.UnknownJobError),
    (lambda m: m.rollback_tenant("nobody"), errors.UnknownTenantError),
    (lambda m: m.delete_domain("general"), errors.BadManageRequestError),
    (lambda m: m.create_tenant("t", train={"upload": "u1"}), errors.UnknownUploadError),
    (lambda m: m.create_tenant("t", train=m.on_server("/etc/passwd")), errors.ForbiddenError),
    (lambda m: m.create_tenant("t", train={"upload": "u1"}, settings={"epoch": 1}), errors.BadManageRequestError),
    (lambda m: m.ask("tenant.explode"), errors.BadManageRequestError),
    # A local path is refused, because it was not uploaded.
    (lambda m: m.create_tenant("t", train="train.csv"), errors.BadInputError),
    (lambda m: m.update_tenant("t", train={"upload": "u1"}, dev=Path("dev.csv")), errors.BadInputError),
    (lambda m: m.create_domain("d", corpus="notes.txt"), errors.BadInputError),
    (lambda m: m.drop_upload("u1"), errors.BadInputError),
    # An entry of `list_uploads` may be named.
    (lambda m: m.create_tenant("t", train=Upload("u1", 1, 1, True, 0.0)), errors.UnknownUploadError),
]


@pytest.mark.parametrize(("ask", "error"), ERRORS, ids=[f"{e.code}-{i}" for i, (_, e) in enumerate(ERRORS)])
def test_a_refusal_of_the_server_is_a_typed_error(
    manage: ManageClient, ask: Callable[[ManageClient], object], error: type[HplmError]
) -> None:
    with pytest.raises(HplmError) as caught:
        ask(manage)
    assert type(caught.value) is error


def run_job(registry: Registry, job: str, **ended: object) -> Callable[[JobEvent], None]:
    """Return a worker process's next step, to be called with each event that the client receives."""

    def step(event: JobEvent) -> None:
        now_s = time.time()
        if event.state == "queued":
            claimed = registry.claim_job("w", now_s, LEASE_S)
            assert claimed is not None
            assert claimed.id == job
        elif event.state == "running" and event.progress < 0.5:
            registry.report_job(job, "w", now_s, LEASE_S, step="train", progress=0.5, eta_s=3.0)
        elif event.state == "running":
            registry.finish_job(job, "w", now_s, **ended)  # type: ignore[arg-type]

    return step


def test_a_job_is_watched_from_its_start_to_its_end(manage: ManageClient, registry: Registry, rows: Path) -> None:
    job = manage.create_tenant("acme", train=manage.upload(rows))
    step = run_job(registry, job, result={"version": 1})
    seen = []
    for event in manage.watch(job):
        seen.append(event)
        step(event)
    assert [event.state for event in seen] == ["queued", "running", "running", "done"]
    assert [event.progress for event in seen] == [0.0, 0.0, 0.5, 1.0]
    assert (seen[2].step, seen[2].eta_s) == ("train", 3.0)
    assert seen[-1].result == {"version": 1}


def test_waiting_raises_the_jobs_error(manage: ManageClient, registry: Registry, rows: Path) -> None:
    job = manage.create_tenant("acme", train=manage.upload(rows))
    with pytest.raises(errors.DataError, match="one label only"):
        manage.wait(job, run_job(registry, job, error={"code": "BAD_DATA", "message": "one label only"}))


def test_waiting_for_a_cancelled_job_says_so(manage: ManageClient, rows: Path) -> None:
    job = manage.create_tenant("acme", train=manage.upload(rows))
    assert manage.cancel_job(job).state == "cancelled"
    with pytest.raises(errors.JobCancelledError, match=job):
        manage.wait(job)


def test_watching_continues_after_the_server_was_away(
    manage: ManageClient, transport: InProcess, registry: Registry, rows: Path
) -> None:
    job = manage.create_tenant("acme", train=manage.upload(rows))
    watch = manage.watch(job)
    assert next(watch).state == "queued"
    transport.faults = [UnreachableError("away")] * 2
    registry.cancel_job(job, time.time())
    assert next(watch).state == "cancelled"


def test_a_server_that_stays_away_is_an_error_after_patience_s(manage: ManageClient, transport: InProcess) -> None:
    transport.faults = [UnreachableError("away")] * 100
    with pytest.raises(UnreachableError):
        next(manage.watch("j1", patience_s=0.5))


def test_an_answer_that_is_none_is_an_error_and_no_traceback(transport: InProcess) -> None:
    transport.handle = lambda raw, caller: {"ok": True}
    with ManageClient(transport=transport) as client:
        with pytest.raises(errors.InternalError, match="lacks 'tenant'"):
            client.show_tenant("acme")
        transport.handle = lambda raw, caller: {"ok": True, "job": {"state": "queued"}}
        with pytest.raises(errors.InternalError, match="no Job"):
            client.show_job("j1")


def test_a_dry_run_names_files_as_its_job_does(transport: InProcess, rows: Path) -> None:
    requests: list[dict[str, object]] = []

    def handle(raw: bytes, caller: Caller) -> dict[str, object]:
        requests.append(json.loads(raw))
        return {"ok": True, "job": "j1", "plan": {"estimated_s": 1.0}}

    transport.handle = handle
    upload = Upload("u1", 1, 1, True, 0.0)
    with ManageClient(transport=transport) as client:
        client.plan("tenant.create", tenant="acme", data={"train": upload, "dev": client.on_server("dev.csv")})
        client.plan("domain.create", domain="medical", corpus=upload)
        client.plan("domain.create", domain="medical", corpus=upload, dev=[upload, client.on_server("dev.csv")])
        with pytest.raises(errors.BadInputError, match="train: give what `upload` or `on_server` returned"):
            client.plan("tenant.create", tenant="acme", data={"train": rows})
    assert [request.get("data", request.get("corpus")) for request in requests] == [
        {"train": {"upload": "u1"}, "dev": {"path": "dev.csv"}},
        {"upload": "u1"},
        {"upload": "u1"},
    ]
    assert [request.get("dev") for request in requests] == [None, None, [{"upload": "u1"}, {"path": "dev.csv"}]]


def test_a_dry_run_returns_the_plan_that_a_worker_process_made(
    manage: ManageClient, transport: InProcess, registry: Registry, rows: Path
) -> None:
    source = manage.upload(rows)
    real_handle = transport.handle

    def handle(raw: bytes, caller: Caller) -> dict[str, object]:
        # The server did not wait long enough, so the plan is the job's result.
        if b"dry_run" not in raw:
            return real_handle(raw, caller)
        job = registry.submit_job("tenant.create", "plan:tenant:acme", {"dry_run": True}, 1.0)
        registry.claim_job("w", 1.0, LEASE_S)
        registry.finish_job(job.id, "w", 2.0, result={"plan": {"examples": {"train": 40}, "estimated_s": 12.5}})
        return {"ok": True, "job": job.id}

    transport.handle = handle
    states: list[str] = []
    plan = manage.plan(
        "tenant.create", told=lambda event: states.append(event.state), tenant="acme", data={"train": source}
    )
    assert states == ["done"]
    assert plan.estimated_s == 12.5
    assert plan.details["examples"] == {"train": 40}
