"""Students as jobs make them: for a new tenant, for one that exists, again for an update, as a level of a cascade; killed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hplm_builder.jobs.local_builds import build_tenant
from hplm_builder.tenants.finetune import TrainSettings
from rich.progress import Progress

from hplm.adapters import tenant as tenants
from hplm.core.settings import WHOLE
from hplm.errors import BadManageRequestError, ConfigError, UnknownTenantError
from hplm.housekeeping import garbage_collection
from hplm.manage.service import ManageService
from hplm.models import base as bases
from hplm.registry.registry import Registry
from hplm.reporting.student_lines import student_lines
from hplm.store.layout import Store
from tests import tiny
from tests.managed import at_work
from tests.tasks import colour_data
from tests.unit.hplm.manage.making import (
    NOW_S,
    QUICK,
    ask,
    colours,
    create_tenant,
    failure,
    make_service,
    make_store,
    names,
    upload,
    work,
)
from tests.unit.hplm.manage.nursery import Nursery
from tests.unit.hplm.profiles.made_profiles import keep_profile

KILLED = 137
LEASE_S, LONG_S = 120.0, 200_000.0
TWO = {"most": 2, "teacher": "tiny"}


@pytest.fixture(scope="module")
def trunk_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base `tiny` with the tenant `acme`, and the trunk `trunk` of two layers."""
    store = make_store(tmp_path_factory.mktemp("trunk") / "store")
    shape = replace(tiny.config(form=WHOLE, name="trunk"), upper_layers=2, adapter_layers=0)
    trunk = tiny.make_base(store, shape, seed=1, trunk_of="tiny")
    with closing(Registry.open(store)) as registry, closing(serve(store)) as service:
        registry.publish_base("trunk", trunk.fingerprint, "bases/trunk", NOW_S)
        registry.publish_domain("trunk", "general", "bases/trunk", NOW_S, parent_id=None, about={}, expected=None)
        create_tenant(service, "acme")
        work(store)
    return store.root


def serve(store: Store) -> ManageService:
    return make_service(store, bases={"trunk": {"domain": "general"}})


@pytest.fixture
def store(trunk_store: Path, tmp_path: Path) -> Store:
    shutil.copytree(trunk_store, tmp_path / "store")
    return Store(tmp_path / "store")


@pytest.fixture
def service(store: Store) -> Iterator[ManageService]:
    with closing(serve(store)) as opened:
        yield opened


def submit(
    service: ManageService, action: str, content: str | None = None, file: str = "train.csv", **values: Any
) -> str:
    """Ask for a job about students of a tenant, by default `acme`; returns the job's id."""
    data = {"train": {"upload": upload(service, content or colours(), file)}}
    return str(ask(service, action, **{"tenant": "acme", "data": data, "settings": QUICK, **values})["job"])


def result_of(registry: Registry, job: str) -> dict[str, Any]:
    done = registry.job(job)
    assert (done.state, done.error, done.progress) == ("done", None, 1.0)
    assert done.result is not None
    return done.result


def check_clean(store: Store, registry: Registry) -> None:
    """Nothing is broken, and nothing lies there that the registry does not name."""
    work(store, later_s=LONG_S)
    verdict = garbage_collection.verify(store, registry, time.time() + LONG_S)
    assert (verdict.problems, verdict.loose) == ((), ())


def test_a_new_tenant_gets_students_and_every_prefix_is_shown(
    service: ManageService, store: Store, registry: Registry
) -> None:
    job = submit(service, "tenant.create", tenant="new", students={"most": 2, "form": "own"})
    work(store)
    result = result_of(registry, job)
    assert (result["published"], registry.tenant("new").base) == (True, "trunk")
    students = result["students"]
    # Without a version of its own, the tenant is taught by a new adapter or a full fine-tuning of the trunk's base.
    assert set(students["teacher"]["candidates"]) == {"tiny", "full tiny"}
    shown = ask(service, "tenant.show", tenant="new")["tenant"]["about"]
    lines = [*student_lines(shown)]
    assert f"students: {students['count']} of the form own" in lines[0]
    assert len(lines) == 1 + len(students["prefixes"])
    folder = store.tenant_version("new", result["version"])
    made = tenants.load(folder, fingerprint=bases.load(store.base("trunk")).fingerprint, name="new")
    assert (made.card.students, made.card.student_form) == (students["count"], "own")
    check_clean(store, registry)
    with pytest.raises(ConfigError, match="'new' has students over base 'trunk'"):
        build_tenant(store, "trunk", "general", "new", colour_data(), TrainSettings(epochs=1), Progress(disable=True))


def test_an_existing_tenant_teaches_its_students_and_keeps_its_other_versions(
    service: ManageService, store: Store, registry: Registry
) -> None:
    job = submit(service, "tenant.students", students={"most": 2, "teacher": "auto"})
    work(store)
    result = result_of(registry, job)
    assert registry.tenant("acme").bases == {"tiny": 1, "trunk": 2}
    assert "tiny" in result["students"]["teacher"]["candidates"]
    assert ask(service, "tenant.rollback", tenant="acme")["bases"] == {"tiny": 1}
    check_clean(store, registry)


def test_an_update_that_makes_students_no_better_publishes_nothing(
    service: ManageService, store: Store, registry: Registry
) -> None:
    submit(service, "tenant.create", tenant="new", students=TWO)
    work(store)
    job = submit(service, "tenant.update", tenant="new")
    work(store)
    again = result_of(registry, job)
    assert (again["published"], again["version"]) == (False, 1)
    assert "no better on dev" in again["why"]
    # The options that were given at first are kept.
    assert registry.tenant("new").current.about["students"]["asked"] == TWO
    check_clean(store, registry)


def test_taggings_get_no_students(service: ManageService, store: Store, registry: Registry) -> None:
    job = submit(service, "tenant.create", names(), "train.jsonl", tenant="new", students={})
    work(store)
    assert "students are for classifications and regressions, not for a tagging" in failure(registry, job, "BAD_DATA")
    assert registry.find_tenant("new") is None


@pytest.mark.parametrize(
    ("point", "is_published"),
    # Behind the teacher, behind the first student, and at publishing.
    [("job.trained:1", False), ("job.trained:2", False), ("publish.committing", False), ("publish.after", True)],
)
def test_a_worker_killed_anywhere_publishes_all_students_or_none_and_another_worker_finishes(
    service: ManageService, store: Store, registry: Registry, nursery: Nursery, point: str, is_published: bool
) -> None:
    job = submit(service, "tenant.create", tenant="new", students=TWO)
    assert nursery.work(store.root, point) == KILLED
    assert (registry.find_tenant("new") is not None) == is_published
    work(store, later_s=LEASE_S)
    result = result_of(registry, job)
    assert registry.tenant("new").bases == {"trunk": result["version"]}
    assert len(registry.tenant_versions("new")) == 1
    check_clean(store, registry)


def test_what_students_would_take_is_planned(service: ManageService, store: Store) -> None:
    service._dry_run_wait_s = 120.0
    data = {"train": {"upload": upload(service, colours())}}
    with at_work(store):
        plan = ask(service, "tenant.students", tenant="acme", data=data, settings=QUICK, dry_run=True)["plan"]
    assert (plan["teachers"], plan["most_students"], plan["student_form"]) == (["tiny", "full tiny"], 6, "shared")
    assert plan["estimated_s"] > 0
    assert plan["bytes"] == 6 * 4 * 2 * (2 * 48 * 3 + 3 + 48) + 4 * 2 * 49


def test_a_level_over_a_trunk_gets_students_that_the_larger_level_teaches(
    service: ManageService, store: Store, registry: Registry
) -> None:
    for name, ms in (("trunk", 1.0), ("tiny", 10.0)):
        keep_profile(store, bases.load(store.base(name)), ms)
    job = submit(
        service,
        "tenant.create",
        colours(160),
        tenant="new",
        levels=["trunk", "tiny"],
        students={"most": 2},
        target={},
        settings={**QUICK, "adapter_width": "narrow"},
    )
    work(store)
    result = result_of(registry, job)
    assert set(result["levels"]) == {"trunk", "tiny"}
    students = registry.tenant("new", "trunk").current.about["students"]
    assert students["teacher"]["name"] == "tiny"
    assert "students" not in registry.tenant("new", "tiny").current.about
    with pytest.raises(BadManageRequestError, match="hplm tenant update new"):
        submit(service, "tenant.students", tenant="new")
    check_clean(store, registry)


def test_requests_that_make_no_students_are_refused_at_once(service: ManageService, registry: Registry) -> None:
    before = len(registry.jobs())
    for action, wrong, why in (
        ("tenant.create", {"tenant": "new", "base": "tiny", "students": {}}, "'tiny' is no trunk"),
        ("tenant.create", {"tenant": "new", "students": {"teacher": "trunk"}}, "one of the server's bases"),
        ("tenant.create", {"tenant": "new", "students": {"most": 17}}, "most must be 1 to 16"),
        ("tenant.create", {"tenant": "new", "students": {"form": "mine"}}, "form"),
        ("tenant.students", {"levels": ["trunk", "tiny"]}, "are for a cascade"),
        ("tenant.update", {"students": {}}, "has no students over 'tiny'"),
        ("tenant.students", {"settings": {"learning_rates": [0.1, 0.2]}}, "one learning rate"),
    ):
        with pytest.raises(BadManageRequestError, match=why):
            submit(service, action, **wrong)
    with pytest.raises(UnknownTenantError):
        submit(service, "tenant.students", tenant="nobody")
    assert len(registry.jobs()) == before
