"""The manager answers from the registry, and queues as jobs what takes longer."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hplm.core.settings import ManagerSettings
from hplm.errors import (
    AlreadyThereError,
    BadManageRequestError,
    ConfigError,
    CorpusTooSmallError,
    CorruptRegistryError,
    DataError,
    DomainInUseError,
    ForbiddenError,
    MissingRegistryError,
    QueueFullError,
    UnknownDomainError,
    UnknownJobError,
    UnknownTenantError,
    UnknownUploadError,
    UnknownVersionError,
    UploadError,
)
from hplm.manage import service as serving
from hplm.manage.current_settings import CurrentSettings
from hplm.manage.service import ManageService
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests.unit.hplm.manage import making
from tests.unit.hplm.manage.making import (
    NOW_S,
    ask,
    colours,
    corpus,
    create_domain,
    create_tenant,
    make_service,
    update,
    upload,
)
from tests.unit.hplm.registry.making import publish_next
from tests.waiting import until


def publish(registry: Registry, name: str, times: int = 1, domain: str = "general", base: str = "tiny") -> None:
    """Versions of a tenant, in the registry alone."""
    version = next(one for one in registry.domain_versions(base, domain))
    for _ in range(times):
        number = registry.next_number(name)
        path = f"tenants/{name}/{number}"
        expected = number - 1 or None
        registry.publish_tenant(name, version.id, path, NOW_S, about={}, number=number, expected=expected)


def publish_branch(registry: Registry, name: str, parent: str = "general") -> None:
    above = registry.domain_versions("tiny", parent)[-1]
    publish_next(registry, "tiny", name, f"domains/tiny/{name}/{{number}}", above)


def publish_second(registry: Registry, *roots: str) -> None:
    """Another base, in the registry alone."""
    registry.publish_base("second", "f", "bases/second", NOW_S)
    for root in roots:
        registry.publish_domain("second", root, f"plots/{root}", NOW_S, parent_id=None, about={}, expected=None)


def test_a_tenant_is_queued_as_a_job_that_says_all_it_needs(service: ManageService, registry: Registry) -> None:
    job = registry.job(create_tenant(service, "acme"))
    assert (job.kind, job.subject, job.state) == ("tenant.create", "tenant:acme", "queued")
    assert job.request["base"] == "tiny"
    assert job.request["domain"] == "general"
    assert job.request["settings"] == making.QUICK
    assert job.request["keep_versions"] == 3
    shown = ask(service, "job.show", job=job.id)["job"]
    assert shown["state"] == "queued"
    assert ask(service, "job.list", states=["queued"])["jobs"] == [shown]
    assert ask(service, "job.list", states=["done"])["jobs"] == []


def test_an_update_stays_on_its_tenants_domain_and_a_create_needs_a_new_name(
    service: ManageService, registry: Registry
) -> None:
    publish_branch(registry, "law")
    publish(registry, "acme", domain="law")
    data = {"train": {"upload": upload(service, colours())}}
    job = registry.job(ask(service, "tenant.update", tenant="acme", data=data)["job"])
    assert job.request["domain"] == "law"
    with pytest.raises(AlreadyThereError):
        ask(service, "tenant.create", tenant="acme", data=data)
    with pytest.raises(UnknownTenantError):
        ask(service, "tenant.update", tenant="other", data=data)
    with pytest.raises(BadManageRequestError, match="does not serve base 'other': `hplm base list`"):
        ask(service, "tenant.update", tenant="acme", data=data, base="other")
    with pytest.raises(UnknownDomainError):
        ask(service, "tenant.create", tenant="other", domain="nowhere", data=data)


def test_one_more_job_than_may_wait_is_refused(service: ManageService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MOST_QUEUED", 1)
    data = {"train": {"upload": upload(service, colours())}}
    ask(service, "tenant.create", tenant="acme", data=data)
    with pytest.raises(QueueFullError, match="1 jobs wait already"):
        ask(service, "tenant.create", tenant="other", data=data)


def test_a_name_that_a_job_creates_already_is_not_created_twice(service: ManageService, registry: Registry) -> None:
    data = {"train": {"upload": upload(service, colours())}}
    job = ask(service, "tenant.create", tenant="acme", data=data)["job"]
    with pytest.raises(AlreadyThereError, match=rf"job {job} creates tenant 'acme' already"):
        ask(service, "tenant.create", tenant="acme", data=data)
    ask(service, "tenant.create", tenant="other", data={"train": {"upload": upload(service, colours())}})
    law = create_domain(service, "law")
    with pytest.raises(AlreadyThereError, match=f"job {law} creates domain 'law' already"):
        create_domain(service, "law")
    ask(service, "job.cancel", job=job)
    assert ask(service, "tenant.create", tenant="acme", data={"train": {"upload": upload(service, colours())}})["job"]


def test_of_what_a_job_is_still_to_create_the_job_is_told(service: ManageService) -> None:
    acme, law = create_tenant(service, "acme"), create_domain(service, "law")
    of_tenant = f"there is no tenant 'acme' yet: job {acme} makes it; .* cancel it .`hplm job cancel {acme}`"
    for action in ("tenant.delete", "tenant.rollback", "tenant.show"):
        with pytest.raises(UnknownTenantError, match=of_tenant):
            ask(service, action, tenant="acme")
    with pytest.raises(UnknownTenantError, match=of_tenant):
        update(service, "acme", colours())
    for action in ("domain.delete", "domain.show"):
        with pytest.raises(UnknownDomainError, match=f"has no domain 'law' yet: job {law} makes it"):
            ask(service, action, domain="law")
    for job in (acme, law):
        ask(service, "job.cancel", job=job)
    with pytest.raises(UnknownTenantError, match=r"there is no tenant 'acme'$"):
        ask(service, "tenant.delete", tenant="acme")


def test_a_domain_stands_on_its_parent_and_is_told_from_a_root(service: ManageService, registry: Registry) -> None:
    assert registry.job(create_domain(service, "law")).request["parent"] == "general"
    publish_branch(registry, "law")
    publish_branch(registry, "contracts", "law")
    source = {"upload": upload(service, corpus(), "c.txt")}
    job = registry.job(ask(service, "domain.update", domain="contracts", corpus=source)["job"])
    assert (job.kind, job.request["parent"]) == ("domain.update", "law")
    with pytest.raises(BadManageRequestError, match="below 'law'"):
        ask(service, "domain.update", domain="contracts", corpus=source, parent="general")
    with pytest.raises(BadManageRequestError, match="root of its tree"):
        ask(service, "domain.update", domain="general", corpus=source)
    with pytest.raises(AlreadyThereError):
        ask(service, "domain.create", domain="law", corpus=source)
    with pytest.raises(UnknownDomainError):
        ask(service, "domain.create", domain="new", parent="nowhere", corpus=source)


SECOND = {"second": {"domain": "general-second", "miss": "backoff", "reduction_factor": 4}}


def test_a_job_has_the_settings_of_the_base_that_the_request_names(store: Store, registry: Registry) -> None:
    publish_second(registry, "general-second")
    with closing(making.make_service(store, reduction_factor=8, bases=SECOND)) as service:
        own = registry.job(create_tenant(service, "acme"))
        other = registry.job(create_tenant(service, "other", base="second"))
        domain = registry.job(create_domain(service, "law", base="second"))
        settings = ("base", "domain", "miss", "reduction_factor")
        assert [own.request[key] for key in settings] == ["tiny", "general", "compute", 8]
        assert [other.request[key] for key in settings] == ["second", "general-second", "backoff", 4]
        assert [domain.request[key] for key in settings] == ["second", "law", "backoff", 4]
        assert domain.request["parent"] == "general-second"
        publish(registry, "alone")
        with pytest.raises(UnknownTenantError, match="no tenant 'alone' over base 'second'"):
            making.update(service, "alone", colours(), base="second")
        corpus = {"upload": upload(service, "a red cat\n" * 200, "corpus.txt")}
        with pytest.raises(BadManageRequestError, match="answers misses by back-off"):
            ask(service, "domain.create", domain="new", base="second", corpus=corpus, settings={"top_percent": 0})
        with pytest.raises(BadManageRequestError, match="the root of its tree"):
            ask(service, "domain.delete", domain="general-second", base="second")


def test_a_base_that_the_server_does_not_serve_is_refused_with_those_that_it_serves(
    store: Store, registry: Registry
) -> None:
    registry.publish_base("third", "f", "bases/third", NOW_S)
    registry.publish_domain("third", "root", "plots/root", NOW_S, parent_id=None, about={}, expected=None)
    publish(registry, "acme", domain="root", base="third")
    with closing(making.make_service(store, bases=SECOND)) as service:
        for request in (
            lambda: create_tenant(service, "other", base="third"),
            lambda: create_tenant(service, "other", base="third", dry_run=True),
            lambda: making.update(service, "acme", colours()),
            lambda: create_domain(service, "law", base="third"),
            lambda: ask(service, "domain.show", domain="root", base="third"),
            lambda: ask(service, "domain.delete", domain="root", base="third"),
            lambda: ask(service, "domain.list", base="third"),
        ):
            with pytest.raises(BadManageRequestError, match="does not serve base 'third'"):
                request()
    assert not registry.jobs()


def test_a_base_is_known_as_soon_as_it_is_in_the_settings_file(
    store: Store, registry: Registry, tmp_path: Path
) -> None:
    publish_second(registry, "general-second")
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(making.SETTINGS))
    with closing(ManageService(store, CurrentSettings(path))) as service:
        with pytest.raises(BadManageRequestError, match="does not serve base 'second'"):
            create_tenant(service, "acme", base="second")
        path.write_text(json.dumps(making.SETTINGS | {"bases": SECOND}))
        create_tenant(service, "acme", base="second")
        # A file that is away, or damaged, leaves the settings as they were.
        path.unlink()
        create_tenant(service, "another", base="second")
        path.write_text("{")
        create_tenant(service, "yet-another", base="second")
        path.write_text(json.dumps(making.SETTINGS))
        with pytest.raises(BadManageRequestError, match="does not serve base 'second'"):
            create_tenant(service, "new", base="second")


def test_a_domain_in_use_is_not_deleted_and_names_who_uses_it(service: ManageService, registry: Registry) -> None:
    publish_branch(registry, "law")
    publish_branch(registry, "contracts", "law")
    publish(registry, "acme", domain="contracts")
    with pytest.raises(DomainInUseError, match=r"tenants acme.*domains contracts"):
        ask(service, "domain.delete", domain="law")
    with pytest.raises(BadManageRequestError, match="root of its tree"):
        ask(service, "domain.delete", domain="general")
    ask(service, "tenant.delete", tenant="acme")
    ask(service, "domain.delete", domain="contracts")
    ask(service, "domain.delete", domain="law")
    assert [one["name"] for one in ask(service, "domain.list")["domains"]] == ["general"]


def test_the_domain_that_a_server_is_exported_over_is_not_deleted(store: Store, registry: Registry) -> None:
    publish_branch(registry, "law")
    publish_branch(registry, "tax")
    with closing(make_service(store, domain="law")) as service:
        with pytest.raises(DomainInUseError, match="models were exported over it"):
            ask(service, "domain.delete", domain="law")
        ask(service, "domain.delete", domain="tax")


def test_the_least_number_of_students_is_set_without_a_job_and_shown(
    service: ManageService, registry: Registry
) -> None:
    publish(registry, "acme")
    assert ask(service, "tenant.show", tenant="acme")["tenant"]["least_students"] == 1
    ask(service, "tenant.least_students", tenant="acme", least=2)
    assert ask(service, "tenant.show", tenant="acme")["tenant"]["least_students"] == 2
    assert ask(service, "job.list")["jobs"] == []
    for least in (0, 17):
        with pytest.raises(BadManageRequestError, match="least must be 1 to 16"):
            ask(service, "tenant.least_students", tenant="acme", least=least)
    with pytest.raises(UnknownTenantError):
        ask(service, "tenant.least_students", tenant="nobody", least=2)


def test_a_roll_back_goes_to_the_version_before_or_to_the_one_named(service: ManageService, registry: Registry) -> None:
    publish(registry, "acme", times=3)
    assert ask(service, "tenant.rollback", tenant="acme")["version"] == 2
    assert ask(service, "tenant.rollback", tenant="acme", version=3)["version"] == 3
    assert ask(service, "tenant.rollback", tenant="acme", version=1)["version"] == 1
    with pytest.raises(UnknownVersionError):
        ask(service, "tenant.rollback", tenant="acme")
    shown = ask(service, "tenant.show", tenant="acme")["tenant"]
    assert shown["version"] == 1
    assert [one["version"] for one in shown["versions"]] == [1, 2, 3]


def test_tenants_are_listed_page_by_page(service: ManageService, registry: Registry) -> None:
    for name in ("a1", "a2", "a3", "b1"):
        publish(registry, name)
    first = ask(service, "tenant.list", prefix="a", limit=2)["tenants"]
    assert [one["name"] for one in first] == ["a1", "a2"]
    rest = ask(service, "tenant.list", prefix="a", after="a2", limit=2)["tenants"]
    assert [one["name"] for one in rest] == ["a3"]


def test_deleting_a_tenant_cancels_what_is_still_to_be_done_with_it(service: ManageService, registry: Registry) -> None:
    publish(registry, "acme")
    other = create_tenant(service, "other")
    data = {"train": {"upload": upload(service, colours())}}
    job = ask(service, "tenant.update", tenant="acme", data=data)["job"]
    ask(service, "tenant.delete", tenant="acme")
    assert registry.job(job).state == "cancelled"
    assert registry.job(other).state == "queued"
    with pytest.raises(UnknownTenantError):
        ask(service, "tenant.show", tenant="acme")
    # What is asked for under the same name afterwards is another's.
    assert registry.job(create_tenant(service, "acme")).state == "queued"


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        (b"text,label\nb\xe4d,x\n", "train.csv", "not UTF-8"),
        (b"PK\x03\x04", "train.csv", "packed"),
        (b"x,y\n" + b"z" * 1_000_001, "train.csv", "line 2 has more than"),
        (b"text", "train.txt", "the ending must be one of"),
    ],
    ids=["encoding", "zip", "long-line", "ending"],
)
def test_an_upload_that_is_no_text_is_refused_and_nothing_is_left(
    service: ManageService, registry: Registry, store: Store, content: bytes, name: str, words: str
) -> None:
    data = {"train": {"upload": upload(service, content, name)}}
    with pytest.raises(DataError, match=words):
        ask(service, "tenant.create", tenant="acme", data=data)
    assert not registry.uploads()
    assert not registry.jobs()
    assert not list((store.root / "uploads").iterdir())


def test_an_ending_that_says_no_format_is_refused_before_anything_is_sent(service: ManageService) -> None:
    with pytest.raises(DataError, match=r"train\.xlsx: the ending must be one of \.jsonl, \.csv"):
        ask(service, "upload.start", bytes=1, sha256="0" * 64, name="train.xlsx")


def test_a_corpus_far_too_small_is_refused_before_a_worker_sees_it(store: Store) -> None:
    with closing(make_service(store, min_corpus_tokens=50_000)) as service:
        source = {"upload": upload(service, "too short\n", "c.txt")}
        with pytest.raises(
            CorpusTooSmallError,
            match="10 bytes, so no more tokens; a domain needs 50,000 tokens: send at least 49,990 more",
        ):
            ask(service, "domain.create", domain="law", corpus=source)


def test_a_corpus_that_was_accepted_is_not_too_large_for_the_worker(store: Store, registry: Registry) -> None:
    with closing(make_service(store, max_upload_bytes=1 << 30)) as service:
        assert registry.job(create_domain(service)).request["most_corpus_bytes"] == 1 << 30


def test_an_upload_must_exist_and_be_finished(service: ManageService) -> None:
    with pytest.raises(UnknownUploadError):
        ask(service, "tenant.create", tenant="acme", data={"train": {"upload": "u1"}})
    begun = ask(service, "upload.start", bytes=5, sha256="0" * 64, name="a.csv")["upload"]
    with pytest.raises(UploadError, match="not finished"):
        ask(service, "tenant.create", tenant="acme", data={"train": {"upload": begun}})


@pytest.mark.parametrize("name", ["../../evil.csv", "/etc/passwd", ".hidden", "a/b.csv", "a\0.csv", "ä.csv", ""])
def test_an_uploads_name_can_be_no_path(service: ManageService, name: str) -> None:
    with pytest.raises(BadManageRequestError, match="name is 1 to 100"):
        ask(service, "upload.start", bytes=5, sha256="0" * 64, name=name)


def test_files_by_path_are_for_operators_who_allow_it(store: Store, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text(colours())
    named = {"train": {"path": "train.csv"}}
    with closing(make_service(store)) as service, pytest.raises(ForbiddenError, match="takes no paths"):
        ask(service, "tenant.create", tenant="acme", data=named)
    with closing(make_service(store, allow_paths=True, data_root=str(tmp_path / "data"))) as service:
        ask(service, "tenant.create", tenant="acme", data=named)
        with pytest.raises(ForbiddenError, match="no file below"):
            ask(service, "tenant.create", tenant="other", data={"train": {"path": "../store/registry.sqlite"}})


def test_paths_without_a_folder_for_them_are_refused_at_the_start(store: Store) -> None:
    with pytest.raises(ConfigError, match="data_root must be the absolute path"):
        make_service(store, allow_paths=True)


def test_a_registry_that_is_missing_or_broken_is_said_and_found_again(store: Store, registry: Registry) -> None:
    registry.close()
    kept = {path: path.read_bytes() for path in store.root.glob("registry.sqlite*")}
    for path in kept:
        path.unlink()
    with closing(make_service(store)) as service:
        with pytest.raises(MissingRegistryError, match="hplm store adopt"):
            ask(service, "tenant.list")
        (store.root / "registry.sqlite").write_bytes(b"not a database" * 1000)
        with pytest.raises(CorruptRegistryError):
            ask(service, "tenant.list")
        for path, content in kept.items():
            path.write_bytes(content)
        assert ask(service, "domain.list")["domains"]


@pytest.mark.usefixtures("patience")
def test_many_threads_ask_at_once_and_each_gets_its_answer(service: ManageService) -> None:
    def work(number: int) -> bool:
        name = f"t{number}"
        job = create_tenant(service, name)
        return str(ask(service, "job.show", job=job)["job"]["subject"]) == f"tenant:{name}"

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))
    assert len(ask(service, "job.list")["jobs"]) == 16


@pytest.mark.parametrize("values", [{"job": "no-such-job"}])
def test_an_unknown_job_is_not_found(service: ManageService, values: dict[str, Any]) -> None:
    for action in ("job.show", "job.cancel"):
        with pytest.raises(UnknownJobError):
            ask(service, action, **values)


def test_a_dry_run_that_no_worker_takes_is_answered_with_its_job(store: Store) -> None:
    settings = ManagerSettings(**making.SETTINGS)
    with closing(ManageService(store, lambda: settings, dry_run_wait_s=0.1)) as service:
        data = {"train": {"upload": upload(service, colours())}}
        answer = ask(service, "tenant.create", tenant="acme", data=data, dry_run=True)
        assert "plan" not in answer
        shown = ask(service, "job.show", job=answer["job"])["job"]
    assert (shown["state"], shown["dry_run"], shown["subject"]) == ("queued", True, "tenant:acme")


def test_a_service_that_is_told_to_stop_waits_for_no_plan(store: Store, registry: Registry) -> None:
    settings, told = ManagerSettings(**making.SETTINGS), threading.Event()
    with (
        closing(ManageService(store, lambda: settings, dry_run_wait_s=60.0, is_told_to_stop=told.is_set)) as service,
        ThreadPoolExecutor(1) as pool,
    ):
        data = {"train": {"upload": upload(service, colours())}}
        asked = pool.submit(ask, service, "tenant.create", tenant="acme", data=data, dry_run=True)
        until(lambda: bool(registry.jobs()))
        told.set()
        assert asked.result(timeout=10.0)["job"] == registry.jobs()[0].id


def test_the_manager_never_imports_torch() -> None:
    code = "import sys; import hplm.manage.service; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_answers_say_nothing_of_the_servers_paths(service: ManageService, registry: Registry, store: Store) -> None:
    publish(registry, "acme")
    create_tenant(service, "other")
    for action, values in (("tenant.show", {"tenant": "acme"}), ("job.list", {}), ("domain.list", {})):
        assert str(store.root) not in json.dumps(ask(service, action, **values))
