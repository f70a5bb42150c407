"""Cascades as jobs make them: all levels trained, proved and published as one, selected again, updated, refused."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hplm_builder.cascade.outputs import load_outputs

from hplm.cascade.promise import proved_accuracy
from hplm.core.settings import WHOLE
from hplm.errors import BadManageRequestError, ConflictError
from hplm.housekeeping import garbage_collection
from hplm.manage.service import ManageService
from hplm.models import base as bases
from hplm.registry.catalog import Catalog
from hplm.registry.registry import Registry
from hplm.store.cascade_outputs import outputs_of
from hplm.store.layout import Store
from tests import tiny
from tests.managed import at_work
from tests.unit.hplm.manage.making import (
    NOW_S,
    QUICK,
    ask,
    create_tenant,
    failure,
    make_service,
    make_store,
    update,
    upload,
    work,
)
from tests.unit.hplm.manage.nursery import Nursery
from tests.unit.hplm.profiles.made_profiles import keep_profile

BASES = ["tiny", "big"]
KILLED = 137
LEASE_S, LONG_S = 120.0, 200_000.0
# The classes of `rows` by the colour that a text names.
COLOURS = ("red", "blue")
LEARNING = {"epochs": 3, "learning_rates": [0.02], "adapter_width": "narrow"}


def rows(count: int, seed: int, *, wrong: float = 0.0) -> str:
    """Distinct labelled texts that name their class; the share `wrong` has the other class."""
    rng = np.random.default_rng(seed)
    words = [word for word in tiny.WORDS if word not in COLOURS]
    lines = ["text,label"]
    for number in range(count):
        named = number % 2
        label = named if rng.random() >= wrong else 1 - named
        lines.append(f"{' '.join(rng.choice(words, 6))} {COLOURS[named]},{COLOURS[label]}")
    return "\n".join(lines) + "\n"


def add_base(store: Store, name: str) -> None:
    """A whole base with its root, registered."""
    base = tiny.make_base(store, tiny.config(form=WHOLE, name=name))
    with closing(Registry.open(store)) as registry:
        registry.publish_base(name, base.fingerprint, f"bases/{name}", NOW_S)
        registry.publish_domain(name, "general", f"bases/{name}", NOW_S, parent_id=None, about={}, expected=None)


def files(service: ManageService, **parts: str) -> dict[str, Any]:
    return {part: {"upload": upload(service, content, f"{part}.csv")} for part, content in parts.items()}


def create_cascade(service: ManageService, name: str = "acme", examples: int = 160, **values: Any) -> str:
    """Ask for a tenant with a level over each base; returns the job's id."""
    data = files(service, train=rows(examples, 1), proof=rows(120, 2))
    request = {"tenant": name, "data": data, "levels": BASES, "settings": LEARNING, **values}
    return str(ask(service, "tenant.create", **request)["job"])


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bases with profiles: texts take 1 ms over `tiny` and 10 ms over `big`."""
    store = make_store(tmp_path_factory.mktemp("two") / "store")
    add_base(store, "big")
    for name, ms in (("tiny", 1.0), ("big", 10.0)):
        keep_profile(store, bases.load(store.base(name)), ms)
    return store.root


@pytest.fixture(scope="module")
def cascade_store(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`empty_store` with the cascade `acme`, which promises an accuracy of 0.8."""
    store = Store(tmp_path_factory.mktemp("cascade") / "store")
    shutil.copytree(empty_store, store.root)
    with closing(serve(store)) as service, closing(Registry.open(store)) as registry:
        job = create_cascade(service, target={"accuracy": 0.8})
        work(store)
        assert registry.job(job).state == "done", registry.job(job).error
    return store.root


def serve(store: Store) -> ManageService:
    return make_service(store, bases={"big": {"domain": "general"}})


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A copy of `cascade_store`; for tests with the parameter `empty_store`, of that."""
    made: Path = request.getfixturevalue(getattr(request, "param", "cascade_store"))
    shutil.copytree(made, tmp_path / "store")
    return Store(tmp_path / "store")


@pytest.fixture
def service(store: Store) -> Iterator[ManageService]:
    with closing(serve(store)) as opened:
        yield opened


EMPTY = pytest.mark.parametrize("store", ["empty_store"], indirect=True)


def result_of(registry: Registry, job: str) -> dict[str, Any]:
    done = registry.job(job)
    assert (done.state, done.error, done.progress) == ("done", None, 1.0)
    assert done.result is not None
    return done.result


def show(service: ManageService) -> dict[str, Any]:
    return dict(ask(service, "tenant.show", tenant="acme")["tenant"])


def check_clean(store: Store, registry: Registry) -> None:
    """Nothing is broken, and nothing lies there that the registry does not name."""
    work(store, later_s=LONG_S)
    verdict = garbage_collection.verify(store, registry, time.time() + LONG_S)
    assert (verdict.problems, verdict.loose) == ((), ())


def test_all_levels_are_published_as_one_with_the_plan_that_was_proved(
    service: ManageService, store: Store, registry: Registry
) -> None:
    (job,) = registry.jobs()
    result = result_of(registry, job.id)
    assert (result["version"], result["levels"]) == (2, {"tiny": 1, "big": 2})
    assert result["promise"]["accuracy"] >= 0.8
    assert result["promise"]["examples"] == 120
    cascade = show(service)["cascade"]
    assert cascade["in_force"]
    assert cascade["levels"] == {"tiny": 1, "big": 2}
    assert cascade["plan"]["promise"] == result["promise"]
    assert [row["base"] for row in cascade["calibration"]] in (BASES, BASES[::-1])
    assert sum(row["chosen"] for row in cascade["candidates"]) == 1
    with closing(Catalog(store, None)) as catalog:
        plan = catalog.plan_of("acme")
        assert plan is not None
        assert json.loads(json.dumps(plan.to_json())) == cascade["plan"]
        assert catalog.find("acme").base == plan.levels[-1].base
    assert load_outputs(outputs_of(store.tenant_version("acme", 2))).tenant == "acme"
    check_clean(store, registry)


def test_damaged_outputs_are_found_and_refuse_another_target(
    service: ManageService, store: Store, registry: Registry
) -> None:
    (outputs_of(store.tenant_version("acme", 2)) / "answers.json").write_text("{}")
    (problem,) = garbage_collection.verify(store, registry, time.time()).problems
    assert "answers.json" in problem.what
    job = str(ask(service, "tenant.target", tenant="acme", target={"accuracy": 0.5})["job"])
    work(store)
    assert "the outputs of the tenant's levels cannot be used" in failure(registry, job, "CORRUPT_ARTIFACT")


def test_another_target_is_selected_without_training_and_rolled_back(
    service: ManageService, store: Store, registry: Registry
) -> None:
    before = show(service)["cascade"]["plan"]
    job = str(ask(service, "tenant.target", tenant="acme", target={"accuracy": 0.5, "deterministic": True})["job"])
    work(store)
    result = result_of(registry, job)
    assert result["version"] == 3
    plan = show(service)["cascade"]["plan"]
    assert (plan["promise"]["target_accuracy"], plan["deterministic"]) == (0.5, True)
    assert {version.path for version in registry.tenant_versions("acme")} == {"tenants/acme/1", "tenants/acme/2"}
    check_clean(store, registry)
    ask(service, "tenant.rollback", tenant="acme")
    assert show(service)["cascade"]["plan"] == before
    # What a request leaves open stays.
    ask(service, "tenant.target", tenant="acme", target={"on_late": "refuse"})
    work(store)
    plan = show(service)["cascade"]["plan"]
    assert (plan["promise"]["target_accuracy"], plan["on_late"], plan["deterministic"]) == (0.8, "refuse", False)


def test_a_target_that_cannot_be_promised_is_refused_with_an_offer(
    service: ManageService, store: Store, registry: Registry
) -> None:
    before = show(service)
    job = str(ask(service, "tenant.target", tenant="acme", target={"latency_ms": 0.5})["job"])
    work(store)
    assert "nearest offer is" in failure(registry, job, "CONTRACT_REFUSED")
    assert show(service) == before


def test_an_update_makes_and_proves_all_levels_again(service: ManageService, store: Store, registry: Registry) -> None:
    # The classes are swapped, so the levels have much to learn.
    data = files(service, train=rows(160, 5, wrong=1.0), proof=rows(120, 6, wrong=1.0))
    settings = {**LEARNING, "learning_rates": [0.05]}
    job = str(ask(service, "tenant.update", tenant="acme", data=data, settings=settings)["job"])
    work(store)
    result = result_of(registry, job)
    assert (result["published"], result["levels"]) == (True, {"tiny": 3, "big": 4})
    cascade = show(service)["cascade"]
    assert cascade["in_force"]
    assert cascade["plan"]["promise"]["target_accuracy"] == 0.8
    assert ask(service, "tenant.rollback", tenant="acme", version=1)["bases"] == {"tiny": 1, "big": 2}
    check_clean(store, registry)


def test_an_update_that_makes_no_level_better_publishes_nothing(
    service: ManageService, store: Store, registry: Registry
) -> None:
    data = files(service, train=rows(60, 1), proof=rows(20, 2))
    settings = {"epochs": 1, "learning_rates": [1e-7]}
    job = str(
        ask(service, "tenant.update", tenant="acme", data=data, settings=settings, target={"accuracy": 0.1})["job"]
    )
    work(store)
    result = result_of(registry, job)
    assert (result["published"], result["why"]) == (
        False,
        "no level is better on dev: version 2 stays, with its target",
    )
    check_clean(store, registry)


def test_an_update_that_breaks_the_contract_publishes_nothing_and_says_why(
    service: ManageService, store: Store, registry: Registry
) -> None:
    before = show(service)
    # What is learned is swapped, what proves is not.
    data = files(service, train=rows(160, 5, wrong=1.0), proof=rows(120, 6))
    job = str(
        ask(service, "tenant.update", tenant="acme", data=data, settings={**LEARNING, "learning_rates": [0.05]})["job"]
    )
    work(store)
    result = result_of(registry, job)
    assert not result["published"]
    assert "accuracy 0.800 is not proved" in result["why"]
    assert "nearest offer" in result["why"]
    assert "version 2 stays" in result["why"]
    assert show(service) == before
    check_clean(store, registry)


def test_an_update_is_not_proved_on_texts_that_trained_the_version_before_it(
    service: ManageService, store: Store, registry: Registry
) -> None:
    # `rows(160, 1)` trained the tenant.
    data = files(service, train=rows(160, 5), proof=rows(160, 1))
    job = str(ask(service, "tenant.update", tenant="acme", data=data, settings=LEARNING)["job"])
    work(store)
    assert "160 of 160 proof examples have trained or selected an earlier version" in failure(registry, job, "BAD_DATA")
    check_clean(store, registry)


@EMPTY
def test_a_proof_with_other_labels_is_refused_before_training(
    service: ManageService, store: Store, registry: Registry
) -> None:
    data = files(service, train=rows(60, 1), proof="text,label\nsome words,green\n")
    job = str(ask(service, "tenant.create", tenant="acme", data=data, levels=BASES, settings=LEARNING)["job"])
    work(store)
    assert "the proof data has labels that the train data lacks: 'green'" in failure(registry, job, "BAD_DATA")


@EMPTY
@pytest.mark.parametrize(
    ("point", "is_published"),
    [
        ("job.trained", False),
        ("publish.committing:2", False),
        ("publish.after", True),
    ],
)
def test_a_worker_killed_anywhere_publishes_all_levels_or_none_and_another_worker_finishes(
    service: ManageService, store: Store, registry: Registry, nursery: Nursery, point: str, is_published: bool
) -> None:
    job = create_cascade(service, examples=60, settings={**QUICK, "adapter_width": "narrow"})
    assert nursery.work(store.root, point) == KILLED
    found = registry.find_tenant("acme")
    assert (found is not None) == is_published
    work(store, later_s=LEASE_S)
    result = result_of(registry, job)
    assert set(result["levels"]) == set(BASES)
    assert registry.tenant("acme").bases == result["levels"]
    assert len(registry.tenant_versions("acme")) == 2
    check_clean(store, registry)


@EMPTY
def test_a_promise_that_no_answers_could_prove_is_refused_before_training(
    service: ManageService, store: Store, registry: Registry
) -> None:
    job = create_cascade(service, target={"accuracy": 0.99})
    work(store)
    message = failure(registry, job, "CONTRACT_REFUSED")
    assert "120 proof examples cannot prove accuracy 0.990, even if all answers are right: at least 299" in message
    assert registry.find_tenant("acme") is None


@EMPTY
def test_copies_of_texts_prove_and_calibrate_nothing_and_are_counted(
    service: ManageService, store: Store, registry: Registry
) -> None:
    header, *nine = rows(9, 2).splitlines()
    copied = [header, *(f"  {text.upper()}" if number % 2 else text for number in range(60) for text in nine)]
    copied = [line.replace("RED", "red").replace("BLUE", "blue") for line in copied]
    data = files(
        service,
        train=rows(160, 1),
        dev="\n".join([header, *rows(3, 3).splitlines()[1:] * 40]),
        proof="\n".join(copied),
    )
    job = str(ask(service, "tenant.create", tenant="acme", data=data, levels=BASES, settings=LEARNING)["job"])
    work(store)
    result = result_of(registry, job)
    promise = result["promise"]
    assert promise["examples"] == 9
    assert promise["accuracy"] == proved_accuracy(promise["right"], 9) <= 0.717
    assert {row["temperature"] for row in show(service)["cascade"]["calibration"]} == {1.0}
    said = "\n".join(result["warnings"])
    assert "540 proof examples have 9 distinct texts: each text counts once, 531 repeats are left out" in said
    assert "120 dev examples have 3 distinct texts: each text counts once, 117 repeats are left out" in said
    assert "dev cannot calibrate the confidence over tiny, because 3 examples are fewer than 20" in said


@EMPTY
def test_what_a_cascade_would_take_is_planned(service: ManageService, store: Store) -> None:
    service._dry_run_wait_s = 120.0
    data = files(service, train=rows(160, 1))
    with at_work(store):
        plan = ask(service, "tenant.create", tenant="acme", data=data, levels=BASES, dry_run=True)["plan"]
    assert plan["levels"] == BASES
    assert plan["estimated_s"] > 0
    assert plan["examples"]["dev"] + plan["examples"]["proof"] in range(10, 30)


@EMPTY
def test_requests_that_make_no_cascade_are_refused_at_once(service: ManageService, registry: Registry) -> None:
    data = files(service, train=rows(160, 1))
    for wrong, why in (
        ({"levels": ["tiny", "huge"]}, "does not serve base 'huge'"),
        ({"levels": ["tiny", "tiny"]}, "different bases"),
        ({"levels": BASES, "base": "tiny"}, "not both"),
        ({"target": {"accuracy": 0.9}}, "are for a tenant with `levels`"),
        ({"levels": BASES, "target": {"accuracy": 90}}, "accuracy must be 0.01 to 0.9999, got 90"),
    ):
        with pytest.raises(BadManageRequestError, match=why):
            ask(service, "tenant.create", tenant="acme", data=data, **wrong)
    assert not registry.jobs()


def test_a_cascade_is_changed_as_one_or_not_at_all(service: ManageService, store: Store, registry: Registry) -> None:
    data = files(service, train=rows(160, 1))
    with pytest.raises(BadManageRequestError, match="an update trains as one"):
        ask(service, "tenant.update", tenant="acme", data=data, base="tiny")
    with pytest.raises(BadManageRequestError, match="keeps a tenant's levels"):
        ask(service, "tenant.update", tenant="acme", data=data, levels=["tiny"])
    ask(service, "tenant.delete", tenant="acme", base="tiny")
    cascade = show(service)["cascade"]
    assert (cascade["in_force"], cascade["lost"]) == (False, ["tiny"])
    with pytest.raises(ConflictError, match="out of force, because its versions over tiny are no longer served"):
        ask(service, "tenant.target", tenant="acme", target={})
    with pytest.raises(BadManageRequestError, match="are for a cascade"):
        ask(service, "tenant.update", tenant="acme", data=data, target={"accuracy": 0.5})
    # What is left is a tenant like any other.
    update(service, "acme", rows(160, 7, wrong=1.0), settings={**LEARNING, "learning_rates": [0.05]})
    work(store)
    assert list(registry.tenant("acme").bases) == ["big"]


def test_a_tenant_without_levels_has_no_target(service: ManageService, store: Store) -> None:
    create_tenant(service, "plain")
    work(store)
    with pytest.raises(BadManageRequestError, match="tenant 'plain' has no cascade"):
        ask(service, "tenant.target", tenant="plain", target={"accuracy": 0.9})
    assert "cascade" not in ask(service, "tenant.show", tenant="plain")["tenant"]


def test_jobs_of_a_cascade_are_jobs_over_each_of_its_bases(service: ManageService, registry: Registry) -> None:
    data = files(service, train=rows(160, 1))
    job = str(ask(service, "tenant.update", tenant="acme", data=data, settings=QUICK)["job"])
    ask(service, "tenant.delete", tenant="acme", base="tiny")
    assert registry.job(job).state == "cancelled"
