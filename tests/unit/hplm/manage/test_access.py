"""Each manage request needs a key that allows it, and is in the audit log."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from hplm.access.access_mode import AccessMode
from hplm.access.gate import MANAGE, TEXTS, server_proof
from hplm.access.key_ring import REFUSED_ACTION, KeyRing
from hplm.access.keys import parse
from hplm.access.proof import Prover
from hplm.core import wire
from hplm.core.settings import ManagerSettings
from hplm.errors import (
    BadManageRequestError,
    ForbiddenError,
    RegistryUnavailableError,
    UnknownJobError,
    UnknownKeyError,
    UnknownTenantError,
)
from hplm.manage import audit_log, students
from hplm.manage.access import LOCAL, Caller
from hplm.manage.audit_log import AuditLog
from hplm.manage.rights import RIGHTS
from hplm.manage.service import ManageService
from hplm.registry.access.audit import AuditEntry
from hplm.registry.records import Job
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests.unit.hplm.registry.making import NOW_S, publish, publish_branch, publish_root

SETTINGS = ManagerSettings("", "b", "general")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def registry(store: Store) -> Iterator[Registry]:
    with closing(Registry.open(store, create=True)) as opened:
        root = publish_root(opened)
        for name in ("films", "news"):
            publish(opened, name, root)
        yield opened


@pytest.fixture
def service(store: Store, registry: Registry) -> Iterator[ManageService]:
    with closing(ManageService(store, lambda: SETTINGS, lambda: NOW_S, ring=KeyRing(store))) as opened:
        yield opened


Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(service: ManageService) -> Ask:
    def send(key: str, action: str, /, **values: Any) -> dict[str, Any]:
        return send_as(service, service.admit(key.encode()), action, **values)

    return send


def send_as(service: ManageService, caller: Caller, action: str, /, **values: Any) -> dict[str, Any]:
    return service.handle(json.dumps({"action": action, **values}).encode(), caller)


@pytest.fixture
def key(service: ManageService) -> Callable[..., str]:
    """Create a key as a command on the store does; returns its text."""

    def create(**values: Any) -> str:
        return str(send_as(service, LOCAL, "key.create", **values)["key"]["text"])

    return create


def log_of(registry: Registry, service: ManageService) -> list[tuple[str | None, str, str, str, int]]:
    """The audit log, oldest first, without commands on the store."""
    service._access._log.write()
    return [
        (entry.role, entry.action, entry.subject, entry.outcome, entry.times)
        for entry in reversed(registry.audit())
        if entry.role != "local"
    ]


def test_every_action_has_a_right_and_every_right_an_action() -> None:
    assert RIGHTS.keys() == ManageService.ACTIONS.keys()


def test_without_a_ring_no_request_needs_a_key(store: Store, registry: Registry) -> None:
    with closing(ManageService(store, lambda: SETTINGS)) as service:
        assert send_as(service, service.admit(b""), "tenant.list")["ok"]


@pytest.mark.parametrize("wrong", [b"", b"nonsense", b"hplm_abcdefgh234567ab_" + b"A" * 43])
def test_a_request_without_a_valid_key_is_refused_before_it_is_read(service: ManageService, wrong: bytes) -> None:
    with pytest.raises(ForbiddenError, match="the key is missing, or is not valid for this action"):
        service.admit(wrong)


def test_an_operators_role_allows_what_it_says(ask: Ask, key: Callable[..., str]) -> None:
    reader, manager, admin = (key(operator=role) for role in ("read", "manage", "admin"))
    for operator in (reader, manager, admin):
        assert ask(operator, "tenant.list")["ok"]
        assert ask(operator, "tenant.show", tenant="films")["ok"]
    with pytest.raises(ForbiddenError):
        ask(reader, "tenant.delete", tenant="films")
    assert ask(manager, "tenant.delete", tenant="films")["ok"]
    for operator in (reader, manager):
        for action in ("key.list", "audit.list"):
            with pytest.raises(ForbiddenError):
                ask(operator, action)
        with pytest.raises(ForbiddenError):
            ask(operator, "key.create", operator="admin")
    assert len(ask(admin, "key.list")["keys"]) == 3


def test_a_tenants_manage_key_is_for_its_own_tenant_alone(
    ask: Ask, key: Callable[..., str], registry: Registry
) -> None:
    publish(registry, "films", registry.current_domain("b", "general"), expected=1)
    own = key(tenant="films", scope="manage")
    assert ask(own, "tenant.show", tenant="films")["ok"]
    assert ask(own, "tenant.rollback", tenant="films", version=1)["version"] == 1
    refused: list[tuple[str, dict[str, Any]]] = [
        ("tenant.show", {"tenant": "news"}),
        ("tenant.show", {"tenant": "nobody"}),
        ("tenant.rollback", {"tenant": "news"}),
        ("tenant.delete", {"tenant": "films"}),
        ("tenant.list", {}),
        ("job.list", {}),
        ("upload.list", {}),
        ("key.create", {"tenant": "films"}),
        ("tenant.update", {"tenant": "films", "data": {"train": {"path": "/of/another.csv"}}}),
        ("tenant.show", {"tenant": "films", "base": "another"}),
    ]
    for action, values in refused:
        with pytest.raises(ForbiddenError, match="not valid for this action"):
            ask(own, action, **values)


@pytest.mark.parametrize("action", ["tenant.update", "tenant.students"])
@pytest.mark.parametrize(
    "values",
    [
        # A tenant's key must not tell which domains and bases exist, so all of them give one error.
        {"domain": "of-another"},
        {"domain": "nowhere"},
        {"domain": "general"},
        {"base": "another"},
        {"base": "nowhere"},
        {"levels": ["b", "another"]},
        {"students": {"teacher": "another"}},
    ],
)
def test_a_tenants_key_chooses_no_domain_and_no_base_of_others(
    ask: Ask, key: Callable[..., str], registry: Registry, action: str, values: dict[str, Any]
) -> None:
    publish_root(registry, base="another")
    publish_branch(registry, "of-another", registry.current_domain("b", "general"))
    own = key(tenant="films", scope="manage")
    for dry_run in (True, False):
        request = {"tenant": "films", "data": {"train": {"upload": "u"}}, "dry_run": dry_run}
        with pytest.raises(ForbiddenError) as refused:
            ask(own, action, **request, **values)
        assert str(refused.value) == REFUSED_ACTION
    assert not registry.jobs()


def test_no_error_names_the_servers_bases_to_a_tenants_key(
    store: Store, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(students, "_is_trunk", lambda store, base: True)
    settings = ManagerSettings("", "secret-a", "general", bases={"secret-b": {"domain": "general"}})
    values = {"tenant": "films", "data": {"train": {"upload": "u"}}}
    own = Caller("k", "manage", "films")
    with closing(ManageService(store, lambda: settings, lambda: NOW_S, ring=KeyRing(store))) as service:
        for action, base, says in (
            ("tenant.update", "b", "does not serve base 'b'"),
            ("tenant.update", None, "does not serve base 'b'"),
            ("tenant.students", "b", "does not serve base 'b'"),
            ("tenant.students", None, "name the trunk"),
        ):
            with pytest.raises(BadManageRequestError, match=says) as refused:
                send_as(service, own, action, base=base, **values)
            assert "secret" not in str(refused.value)


def test_an_infer_key_manages_nothing(ask: Ask, key: Callable[..., str]) -> None:
    with pytest.raises(ForbiddenError):
        ask(key(tenant="films"), "tenant.show", tenant="films")


def test_a_tenants_key_sees_jobs_of_its_own_tenant_alone(ask: Ask, key: Callable[..., str], registry: Registry) -> None:
    own, other, plan = (submit(registry, subject) for subject in ("tenant:films", "tenant:news", "plan:tenant:films"))
    tenant, operator = key(tenant="films", scope="manage"), key(operator="read")
    for job in (own, plan):
        assert ask(tenant, "job.show", job=job.id)["job"]["id"] == job.id
    assert ask(tenant, "job.cancel", job=own.id)["job"]["state"] == "cancelled"
    for job_id in (other.id, "unknown"):
        for action in ("job.show", "job.cancel"):
            with pytest.raises(ForbiddenError, match="not valid for this action"):
                ask(tenant, action, job=job_id)
    assert ask(operator, "job.show", job=other.id)["ok"]
    with pytest.raises(UnknownJobError):
        ask(operator, "job.show", job="unknown")


def submit(registry: Registry, subject: str) -> Job:
    request = {"base": "b", "domain": "general", "keep_versions": None}
    return registry.submit_job("tenant.update", subject, request, NOW_S)


def test_a_key_is_shown_once_and_works_at_once(ask: Ask, key: Callable[..., str], registry: Registry) -> None:
    admin = key(operator="admin")
    made = ask(admin, "key.create", tenant="films", scope="manage", expires_in_s=86_400)["key"]
    assert (made["tenant"], made["role"], made["expires_s"]) == ("films", "manage", NOW_S + 86_400)
    assert ask(admin, "key.create", tenant="films")["key"]["role"] == "infer"
    secret = made["text"].rpartition("_")[2]
    shown = json.dumps([ask(admin, "key.list"), ask(admin, "audit.list")])
    assert made["id"] in shown
    assert secret not in shown
    assert registry.key(made["id"]).sha256.hex() not in shown


def test_a_revoked_key_is_refused_at_once(ask: Ask, key: Callable[..., str]) -> None:
    admin, other = key(operator="admin"), key(operator="read")
    parsed = parse(other.encode())
    assert parsed is not None
    ask(other, "tenant.list")
    revoked = ask(admin, "key.revoke", key=parsed.id)["key"]
    assert (revoked["revoked_s"], revoked["refused_by_s"]) == (NOW_S, NOW_S + 1)
    with pytest.raises(ForbiddenError):
        ask(other, "tenant.list")
    with pytest.raises(UnknownKeyError):
        ask(admin, "key.revoke", key="a" * 16)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"tenant": "films", "operator": "read"},
        {"operator": "read", "scope": "infer"},
        {"operator": "infer"},
        {"tenant": "films", "scope": "admin"},
        {"tenant": "films", "expires_in_s": 0},
        {"tenant": "films", "expires_in_s": 1e30},
    ],
)
def test_a_request_for_a_key_that_cannot_be_is_refused(service: ManageService, values: dict[str, Any]) -> None:
    with pytest.raises(BadManageRequestError):
        send_as(service, LOCAL, "key.create", **values)


def test_every_request_is_in_the_audit_log_with_its_outcome(
    ask: Ask, key: Callable[..., str], service: ManageService, registry: Registry
) -> None:
    admin, reader = key(operator="admin"), key(operator="read")
    ask(admin, "tenant.delete", tenant="news")
    assert log_now(registry) == [("admin", "tenant.delete", "tenant:news", "ok", 1)]  # a change is written at once
    with pytest.raises(UnknownTenantError):
        ask(admin, "tenant.show", tenant="nobody")
    with pytest.raises(ForbiddenError):
        ask(reader, "tenant.delete", tenant="films")
    for _ in range(3):
        ask(reader, "tenant.list")
        with pytest.raises(ForbiddenError):
            ask("wrong", "tenant.delete", tenant="films")
    with pytest.raises(BadManageRequestError):
        ask(admin, "no.such")
    assert sorted(map(str, log_of(registry, service))) == sorted(
        map(
            str,
            [
                ("admin", "tenant.delete", "tenant:news", "ok", 1),
                ("admin", "tenant.show", "tenant:nobody", "UNKNOWN_TENANT", 1),
                ("read", "tenant.delete", "", "FORBIDDEN", 1),
                ("read", "tenant.list", "", "ok", 3),
                (None, "-", "", "FORBIDDEN", 3),
                ("admin", "?", "", "BAD_MANAGE_REQUEST", 1),
            ],
        )
    )


def test_a_question_of_hplm_serve_itself_needs_a_proof_and_is_not_in_the_log(store: Store, registry: Registry) -> None:
    mode = AccessMode(bytes(range(32)))
    proof, text = server_proof(mode, "", MANAGE), server_proof(mode, "films", TEXTS)
    assert proof is not None
    assert text is not None
    ring, prover = KeyRing(store), Prover(bytes(range(32)))
    with closing(ManageService(store, lambda: SETTINGS, lambda: NOW_S, ring=ring, prover=prover)) as service:
        caller = service.admit(proof)
        with pytest.raises(UnknownJobError):
            send_as(service, caller, "job.show", job=wire.NO_JOB)
        assert log_of(registry, service) == []
        with pytest.raises(ForbiddenError):
            send_as(service, caller, "tenant.delete", tenant="films")
        with pytest.raises(ForbiddenError):
            service.admit(text)
        assert {entry[1:4] for entry in log_of(registry, service)} == {
            ("tenant.delete", "", "FORBIDDEN"),
            ("-", "", "FORBIDDEN"),
        }


def log_now(registry: Registry) -> list[tuple[str | None, str, str, str, int]]:
    return [
        (entry.role, entry.action, entry.subject, entry.outcome, entry.times)
        for entry in registry.audit()
        if entry.role != "local"
    ]


def test_the_log_is_read_by_key_and_by_subject(ask: Ask, key: Callable[..., str], service: ManageService) -> None:
    admin = key(operator="admin")
    parsed = parse(admin.encode())
    assert parsed is not None
    ask(admin, "tenant.delete", tenant="news")
    ask(admin, "tenant.delete", tenant="films")
    (found,) = ask(admin, "audit.list", subject="tenant:news")["entries"]
    assert (found["key"], found["outcome"], found["at_s"]) == (parsed.id, "ok", NOW_S)
    assert len(ask(admin, "audit.list", key=parsed.id, limit=1)["entries"]) == 1
    with pytest.raises(BadManageRequestError):
        ask(admin, "audit.list", subject="tenant: news'")


def test_an_audit_log_keeps_its_entries_while_the_registry_is_away(
    registry: Registry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "MOST_WAITING", 3)
    is_away = threading.Event()
    is_away.set()

    def opened() -> Registry:
        if is_away.is_set():
            raise RegistryUnavailableError("away")
        return registry

    with closing(AuditLog(opened, lambda: NOW_S)) as log:
        for number in range(5):
            log.note("k", "admin", "tenant.delete", f"tenant:t{number}", "ok", is_change=True)
        assert registry.audit() == []
        assert "entries of the audit log wait: REGISTRY_UNAVAILABLE: away" in caplog.text
        is_away.clear()
        log.write()
    assert [entry.subject for entry in registry.audit()] == ["tenant:t4", "tenant:t3", "tenant:t2"]
    assert "the audit log lacks 2 changes and 0 other entries" in caplog.text


@pytest.mark.parametrize("role", ["infer", "read"])
def test_a_flood_of_requests_that_change_nothing_pushes_out_no_change(
    ask: Ask,
    key: Callable[..., str],
    service: ManageService,
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    role: str,
) -> None:
    monkeypatch.setattr(audit_log, "MOST_WAITING", 3)
    flooding = key(tenant="films") if role == "infer" else key(operator="read")
    admin = key(operator="admin")
    with pytest.MonkeyPatch.context() as away:
        away.setattr(Registry, "add_audit", fails)
        ask(admin, "key.create", tenant="films")
        flood(ask, flooding, 20)
        with pytest.raises(UnknownTenantError):
            ask(admin, "tenant.show", tenant="nobody")
    service._access._log.write()
    entries = log_now(registry)
    assert ("admin", "key.create", "tenant:films", "ok", 1) in entries
    if role == "infer":
        # What it was refused for is not noted, so that equal requests are one entry.
        assert ("infer", "tenant.show", "", "FORBIDDEN", 20) in entries
    assert len(entries) <= 1 + 3


def test_a_flood_of_different_requests_pushes_no_change_out_of_the_registry(
    ask: Ask, key: Callable[..., str], service: ManageService, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "TRIM_EVERY", 8)
    monkeypatch.setattr(Registry, "trim_audit", partialmethod(Registry.trim_audit, most_others=5))
    admin, reader = key(operator="admin"), key(operator="read")
    ask(admin, "key.create", tenant="films")
    for part in range(4):
        flood(ask, reader, 10, f"p{part}-")
        service._access._log.write()
        entries = log_now(registry)
        assert ("admin", "key.create", "tenant:films", "ok", 1) in entries
        assert len(entries) == 1 + 5


def flood(ask: Ask, key: str, count: int, prefix: str = "t") -> None:
    """Ask for `count` tenants that do not exist."""
    for number in range(count):
        with pytest.raises((ForbiddenError, UnknownTenantError)):
            ask(key, "tenant.show", tenant=f"{prefix}{number}")


def fails(*_: object) -> None:
    raise RegistryUnavailableError("away")


def test_an_unexpected_error_loses_no_entry_and_does_not_end_the_thread(
    registry: Registry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "WRITE_EVERY_S", 0.01)
    tries = []
    has_written = threading.Event()

    def opened() -> Registry:
        tries.append(None)
        if len(tries) < 4:
            raise OSError(errno.EMFILE, "Too many open files")
        has_written.set()
        return registry

    with closing(AuditLog(opened, lambda: NOW_S)) as log:
        log.note("k", "admin", "tenant.delete", "tenant:films", "ok", is_change=True)
        log.note("k", "read", "tenant.list", "", "ok", is_change=False)
        assert has_written.wait(60)
    assert [(entry.action, entry.times) for entry in registry.audit()] == [("tenant.list", 1), ("tenant.delete", 1)]
    assert "entries of the audit log wait: OSError" in caplog.text


def test_old_entries_that_cannot_be_forgotten_let_no_entry_be_written_twice(
    registry: Registry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Registry, "trim_audit", fails)
    with closing(AuditLog(lambda: registry, lambda: NOW_S)) as log:
        log.note("k", "admin", "tenant.delete", "tenant:films", "ok", is_change=True)
        log.write()
    assert len(registry.audit()) == 1
    assert "old entries of the audit log stay: REGISTRY_UNAVAILABLE: away" in caplog.text


def test_an_audit_log_that_is_closed_has_written_all(registry: Registry) -> None:
    with closing(AuditLog(lambda: registry, lambda: NOW_S)) as log:
        log.note("k", "read", "tenant.list", "", "ok", is_change=False)
    (entry,) = registry.audit()
    assert entry == AuditEntry(NOW_S, "k", "read", "tenant.list", "", "ok", seq=entry.seq)


def test_a_fault_of_ours_is_in_the_log_too(service: ManageService, registry: Registry) -> None:
    with pytest.raises(ZeroDivisionError):
        fail(service)
    assert log_of(registry, service) == [("admin", "tenant.list", "", "INTERNAL", 1)]


def fail(service: ManageService) -> None:
    with service._access.noting(Caller("k", "admin")) as note:
        note.action = "tenant.list"
        raise ZeroDivisionError
