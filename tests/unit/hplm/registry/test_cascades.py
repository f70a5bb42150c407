"""Cascades: levels that are published, rolled back and in force as one, on both databases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from hplm.cascade.plan import CascadePlan, Dispatch, LevelPlan, Promise
from hplm.errors import ConfigError, ConflictError, DomainInUseError, InternalError, UnknownVersionError
from hplm.registry.cascades import plans_in_force
from hplm.registry.catalog import Catalog
from hplm.registry.records import DomainVersion, NewLevel
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests.unit.hplm.registry.making import NOW_S, publish, publish_branch, publish_root

LATER_S = NOW_S + 10


@pytest.fixture
def other(registry: Registry) -> DomainVersion:
    """The root domain `general-c` of base `c`."""
    return publish_root(registry, "general-c", base="c")


@pytest.fixture
def catalog(registry: Registry, store: Store) -> Iterator[Catalog]:
    with closing(Catalog(store, None)) as opened:
        yield opened


def make_plan(levels: dict[str, int], target: float = 0.9) -> CascadePlan:
    """A plan over versions by base, the smallest first."""
    plans = tuple(
        LevelPlan(base, number, Dispatch(1.5, 0.8, 4.0), (1 / place,) * place, 0.2 * (place > 1))
        for place, (base, number) in enumerate(levels.items(), 1)
    )
    return CascadePlan(plans, Promise(0.91, 935, 1000, 12.5, target_accuracy=target))


def publish_cascade(
    registry: Registry, name: str, *over: DomainVersion, part: slice = slice(None), target: float = 0.9
) -> dict[str, int]:
    """Publish the next version over each domain's base; the plan uses a part of the levels."""
    found = registry.find_tenant(name)
    levels = [(domain.base, domain, registry.next_number(name)) for domain in over]
    new = [
        NewLevel(domain.id, f"tenants/{name}/{number}", {}, number, found.bases.get(base) if found else None)
        for base, domain, number in levels
    ]
    numbers = {base: number for base, _, number in levels}
    registry.publish_levels(name, new, make_plan(dict(list(numbers.items())[part]), target), NOW_S)
    return numbers


def retarget(registry: Registry, name: str, bases: list[str], target: float) -> int:
    expected = dict(registry.tenant(name).bases)
    number = registry.next_number(name)
    numbers = {base: expected[base] for base in bases[:-1]} | {bases[-1]: number}
    plan = make_plan(numbers, target)
    registry.retarget_tenant(name, plan, LATER_S, about={"job": "j"}, number=number, expected=expected)
    return number


def plan_now(catalog: Catalog, name: str = "films") -> dict[str, int] | None:
    """The levels of the plan in force, as serving sees them after a poll."""
    catalog.refresh()
    plan = catalog.plan_of(name)
    return None if plan is None else {level.base: level.number for level in plan.levels}


def roll_back(registry: Registry, number: int | None = None) -> dict[str, int]:
    served = registry.rollback_tenant("films", number, LATER_S)
    return {base: version.number for base, version in served.items()}


def test_levels_are_published_as_one_with_their_plan_and_the_last_levels_base_is_the_default(
    registry: Registry, root: DomainVersion, other: DomainVersion, catalog: Catalog
) -> None:
    publish(registry, "books", root)
    assert publish_cascade(registry, "films", root, other) == {"b": 1, "c": 2}
    record = registry.tenant("films")
    assert (record.default_base, record.bases) == ("c", {"b": 1, "c": 2})
    assert plan_now(catalog) == {"b": 1, "c": 2}
    assert plan_now(catalog, "books") is None
    assert catalog.plan_of("films") == make_plan({"b": 1, "c": 2})
    cascade = registry.cascade_of("films")
    assert cascade is not None
    assert cascade.is_in_force
    assert registry.cascade_of("books") is None


def test_a_level_that_was_changed_meanwhile_keeps_all_levels_from_being_published(
    registry: Registry, root: DomainVersion, other: DomainVersion
) -> None:
    publish(registry, "films", other)
    levels = [NewLevel(root.id, "p/2", {}, 2, None), NewLevel(other.id, "p/3", {}, 3, None)]
    generation = registry.generation()
    with pytest.raises(ConflictError, match="over base 'c' exists already, at version 1"):
        registry.publish_levels("films", levels, make_plan({"b": 2, "c": 3}), NOW_S)
    assert registry.tenant("films").bases == {"c": 1}
    assert registry.generation() == generation


def test_a_plan_that_names_other_versions_or_cannot_be_read_again_is_refused(
    registry: Registry, root: DomainVersion
) -> None:
    levels = [NewLevel(root.id, "p/1", {}, 1, None)]
    with pytest.raises(InternalError, match="number=7"):
        registry.publish_levels("films", levels, make_plan({"b": 7}), NOW_S)
    unreadable = replace(make_plan({"b": 1}), promise=Promise(float("nan"), 1, 1, 1.0))
    with pytest.raises(ConfigError):
        registry.publish_levels("films", levels, unreadable, NOW_S)
    assert registry.find_tenant("films") is None


def test_a_rollback_to_any_level_takes_all_levels_and_without_a_number_undoes_the_whole_publication(
    registry: Registry, root: DomainVersion, other: DomainVersion, catalog: Catalog
) -> None:
    publish_cascade(registry, "films", root, other)
    publish_cascade(registry, "films", root, other)
    assert plan_now(catalog) == {"b": 3, "c": 4}
    for number, wanted in ((1, {"b": 1, "c": 2}), (3, {"b": 3, "c": 4}), (2, {"b": 1, "c": 2}), (4, {"b": 3, "c": 4})):
        assert roll_back(registry, number) == wanted == plan_now(catalog)
    assert roll_back(registry) == {"b": 1, "c": 2} == plan_now(catalog)
    with pytest.raises(UnknownVersionError, match="no earlier one"):
        roll_back(registry)


def test_a_publication_after_a_plain_version_is_undone_on_all_its_bases(
    registry: Registry, root: DomainVersion, other: DomainVersion, catalog: Catalog
) -> None:
    publish(registry, "films", root)
    publish_cascade(registry, "films", root, other)
    assert registry.tenant("films").default_base == "c"
    assert roll_back(registry) == {"b": 1}
    assert plan_now(catalog) is None
    assert registry.tenant("films").default_base == "b"
    assert roll_back(registry, 2) == {"b": 2, "c": 3} == plan_now(catalog)
    assert registry.tenant("films").default_base == "c"


def test_a_cascade_with_another_target_has_a_version_of_its_own_over_the_same_files(
    registry: Registry, root: DomainVersion, other: DomainVersion, catalog: Catalog
) -> None:
    publish_cascade(registry, "films", root, other)
    assert retarget(registry, "films", ["b", "c"], 0.95) == 3
    assert plan_now(catalog) == {"b": 1, "c": 3}
    assert registry.tenant("films", "c").current.path == "tenants/films/2"
    assert retarget(registry, "films", ["b"], 0.5) == 4
    assert plan_now(catalog) == {"b": 4}
    assert registry.tenant("films").bases == {"b": 4, "c": 3}
    assert registry.tenant("films").default_base == "b"
    assert roll_back(registry) == {"b": 1, "c": 3} == plan_now(catalog)
    assert registry.tenant("films").default_base == "c"
    assert roll_back(registry) == {"b": 1, "c": 2} == plan_now(catalog)
    assert roll_back(registry, 4) == {"b": 4, "c": 3}
    assert plan_now(catalog) == {"b": 4}
    with pytest.raises(ConflictError, match="over base 'b' is at version 4, not 1"):
        registry.retarget_tenant(
            "films", make_plan({"b": 1, "c": 9}), NOW_S, about={}, number=9, expected={"b": 1, "c": 3}
        )


def test_files_that_two_versions_share_stay_until_both_are_retired(
    registry: Registry, root: DomainVersion, other: DomainVersion
) -> None:
    publish_cascade(registry, "films", root, other)
    retarget(registry, "films", ["b", "c"], 0.95)
    assert registry.retire(1, LATER_S, base="c") == 1
    assert registry.collectable(LATER_S + 1) == []
    with pytest.raises(UnknownVersionError, match="no version 1 whose levels are all kept; kept are 1, 3"):
        roll_back(registry, 1)
    assert roll_back(registry, 3) == {"b": 1, "c": 3}
    assert registry.snapshot().tenants["tenants/films/2"] == {"films"}
    publish_cascade(registry, "films", root, other)
    registry.retire(1, LATER_S, base="c")
    assert registry.collectable(LATER_S + 1) == ["tenants/films/2"]
    registry.forget("tenants/films/2")
    assert registry.collectable(LATER_S + 1) == []


def test_a_plan_is_out_of_force_when_a_level_is_changed_or_deleted(
    registry: Registry, root: DomainVersion, other: DomainVersion, catalog: Catalog
) -> None:
    def lost() -> tuple[bool, tuple[str, ...]]:
        cascade = registry.cascade_of("films")
        assert cascade is not None
        return cascade.plan is not None, cascade.lost

    publish_cascade(registry, "films", root, other)
    publish(registry, "films", root, 1)
    assert plan_now(catalog) is None
    assert lost() == (True, ("b",))
    roll_back(registry, 1)
    assert plan_now(catalog) == {"b": 1, "c": 2}
    registry.delete_tenant("films", LATER_S, base="c")
    assert plan_now(catalog) is None
    assert lost() == (False, ("c",))
    assert registry.tenant("films").default_base == "b"
    registry.delete_tenant("films", LATER_S)
    assert plan_now(catalog) is None


def test_a_plan_of_one_level_goes_out_of_force_with_a_level_that_is_kept_beside_it(
    registry: Registry, root: DomainVersion, other: DomainVersion, catalog: Catalog
) -> None:
    publish_cascade(registry, "films", root, other, part=slice(1))
    assert plan_now(catalog) == {"b": 1}
    assert registry.tenant("films").default_base == "b"
    registry.delete_tenant("films", LATER_S, base="c")
    assert plan_now(catalog) is None


def test_another_registry_brings_its_own_plans(tmp_path_factory: pytest.TempPathFactory) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    with closing(Registry.open(store, create=True)) as registry:
        root = publish_root(registry)
        publish_cascade(registry, "films", root)
        with closing(Catalog(store, "b")) as catalog:
            assert plan_now(catalog) == {"b": 1}
    store.root.joinpath("registry.sqlite").unlink()
    for left in store.root.glob("registry.sqlite-*"):
        left.unlink()
    with closing(Registry.open(store, create=True)) as registry:
        publish(registry, "films", publish_root(registry))
        with closing(Catalog(store, "b")) as catalog:
            assert plan_now(catalog) is None


def submit_update(registry: Registry, **domains: str) -> str:
    """Queue an update of a cascade whose levels stand on domains by base; the last base is that of the job."""
    base, domain = list(domains.items())[-1]
    request = {"base": base, "domain": domain, "levels": list(domains), "domains": domains, "stays": True}
    return registry.submit_job("tenant.update", "tenant:films", request, NOW_S).id


def test_a_job_waits_for_jobs_of_the_domains_of_all_its_levels(
    registry: Registry, root: DomainVersion, other: DomainVersion
) -> None:
    law = registry.submit_job("domain.update", "domain:b/law", {"base": "b", "domain": "law"}, NOW_S)
    assert registry.claim_job("first", NOW_S, 60.0) == registry.job(law.id)
    job = submit_update(registry, b="law", c="general-c")
    assert registry.claim_job("second", NOW_S, 60.0) is None
    registry.finish_job(law.id, "first", NOW_S, result={})
    claimed = registry.claim_job("second", NOW_S, 60.0)
    assert claimed is not None
    assert claimed.id == job


def test_a_domain_of_any_level_is_not_deleted_while_a_job_waits(
    registry: Registry, root: DomainVersion, other: DomainVersion
) -> None:
    publish_branch(registry, "law", root)
    job = submit_update(registry, b="law", c="general-c")
    with pytest.raises(DomainInUseError, match=job):
        registry.delete_domain("b", "law", NOW_S)


def test_a_queued_update_follows_each_level_to_its_domain(
    registry: Registry, root: DomainVersion, other: DomainVersion
) -> None:
    publish_cascade(registry, "films", root, other)
    job = submit_update(registry, b="general", c="general-c")
    publish_cascade(registry, "films", publish_branch(registry, "law", root), publish_branch(registry, "tax", other))
    request = registry.job(job).request
    assert (request["domain"], request["domains"]) == ("tax", {"b": "law", "c": "tax"})


def test_old_versions_of_a_domain_stay_while_a_job_over_a_level_runs(
    registry: Registry, root: DomainVersion, other: DomainVersion
) -> None:
    for _ in range(2):
        publish_branch(registry, "law", root)
    submit_update(registry, b="law", c="general-c")
    assert registry.claim_job("w", NOW_S, 60.0) is not None
    assert registry.retire(1, LATER_S, base="b") == 0


def test_a_plan_of_a_newer_hplm_leaves_its_tenant_to_the_default_base_and_keeps_no_other_tenants_changes() -> None:
    readable = make_plan({"b": 1})
    newer = {**readable.to_json(), "invented_later": 1}
    rows = [
        (name, "b", 1, {"levels": {"b": 1}, "plan": plan})
        for name, plan in (("films", newer), ("books", readable.to_json()))
    ]
    assert plans_in_force(json.loads(json.dumps(rows))) == {"books": readable}
