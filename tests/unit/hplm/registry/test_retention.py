"""Which versions are retired and which files may go, on both databases."""

from __future__ import annotations

from hplm.registry.records import DomainVersion, NewDomain
from hplm.registry.registry import Registry
from tests.unit.hplm.registry.making import NOW_S, publish, publish_branch

LATER_S = NOW_S + 10


def numbers(registry: Registry, tenant: str) -> list[int]:
    return [one.number for one in registry.tenant_versions(tenant)]


def updates(registry: Registry, tenant: str, domain: DomainVersion, count: int) -> None:
    for version in range(count):
        publish(registry, tenant, domain, version or None)


def test_the_versions_that_were_served_last_are_kept(registry: Registry, root: DomainVersion) -> None:
    updates(registry, "films", root, 5)
    updates(registry, "books", root, 1)
    registry.rollback_tenant("films", 1, NOW_S)
    assert registry.retire(3, LATER_S, base="b") == 2
    assert numbers(registry, "films") == [1, 4, 5]
    assert numbers(registry, "books") == [1]
    assert registry.retire(3, LATER_S, base="b") == 0
    assert registry.collectable(LATER_S + 1) == ["tenants/films/2", "tenants/films/3"]


def test_the_last_good_version_is_what_a_bad_update_of_it_goes_back_to(registry: Registry, root: DomainVersion) -> None:
    updates(registry, "films", root, 3)
    # 2 and 3 were no good, and neither is what comes next.
    registry.rollback_tenant("films", 1, NOW_S)
    publish(registry, "films", root, 1)
    registry.retire(3, LATER_S, base="b")
    assert numbers(registry, "films") == [1, 3, 4]
    assert registry.rollback_tenant("films", None, NOW_S)["b"].number == 1


def test_versions_in_a_bank_are_kept_as_others_are(registry: Registry, root: DomainVersion) -> None:
    for turn in range(3):
        registry.publish_tenants(root.id, f"banks/{turn}", ["a", "b"], NOW_S)
    registry.rollback_tenant("a", 1, NOW_S)
    registry.retire(2, LATER_S, base="b")
    assert (numbers(registry, "a"), numbers(registry, "b")) == ([1, 3], [2, 3])


def test_a_domain_version_stays_while_a_job_runs_over_its_domain(registry: Registry, root: DomainVersion) -> None:
    publish_branch(registry, "law", root)
    request = {"base": "b", "domain": "law", "dry_run": False}
    job = registry.submit_job("tenant.create", "tenant:films", request, NOW_S)
    registry.claim_job("w", NOW_S, 1e6)
    for _ in range(2):
        publish_branch(registry, "law", root)
    registry.submit_job("tenant.create", "tenant:books", request, NOW_S)  # has not begun: it will start from the newest
    registry.retire(1, LATER_S, base="b", by_job="another")
    assert [one.number for one in registry.domain_versions("b", "law")] == [1, 2, 3]
    registry.retire(1, LATER_S, base="b", by_job=job.id)
    assert [one.number for one in registry.domain_versions("b", "law")] == [3]


def test_versions_over_another_base_are_left_to_whoever_serves_it(registry: Registry, root: DomainVersion) -> None:
    updates(registry, "films", root, 3)
    publish_branch(registry, "law", root)
    publish_branch(registry, "law", root)
    assert registry.retire(1, LATER_S, base="another") == 0
    assert numbers(registry, "films") == [1, 2, 3]
    assert registry.retire(1, LATER_S, base="b") == 3


def test_retired_files_may_go_only_after_their_time(registry: Registry, root: DomainVersion) -> None:
    updates(registry, "films", root, 2)
    registry.retire(1, LATER_S, base="b")
    assert registry.collectable(LATER_S) == []
    assert registry.collectable(LATER_S + 1) == ["tenants/films/1"]


def test_a_deleted_tenants_files_may_go_and_are_then_forgotten(registry: Registry, root: DomainVersion) -> None:
    updates(registry, "films", root, 2)
    registry.delete_tenant("films", LATER_S)
    paths = registry.collectable(LATER_S + 1)
    assert paths == ["tenants/films/1", "tenants/films/2"]
    assert registry.snapshot().paths == {"bases/b", "plots/general", *paths}
    for path in paths:
        registry.forget(path)
    assert registry.collectable(LATER_S + 1) == []
    assert registry.snapshot().paths == {"bases/b", "plots/general"}


def test_a_live_version_is_never_forgotten(registry: Registry, root: DomainVersion) -> None:
    made = publish(registry, "films", root)
    for path in (made.path, root.path):
        registry.forget(path)
    assert registry.tenant("films").current == made
    assert registry.lineage(root.id) == [root]


def test_a_bank_may_go_when_its_last_tenant_has_gone(registry: Registry, root: DomainVersion) -> None:
    registry.publish_tenants(root.id, "banks/fleet", ["a", "b"], NOW_S)
    registry.delete_tenant("a", LATER_S)
    assert registry.collectable(LATER_S + 1) == []
    registry.delete_tenant("b", LATER_S + 5)
    assert registry.collectable(LATER_S + 1) == []
    assert registry.collectable(LATER_S + 6) == ["banks/fleet"]


def test_a_domain_version_stays_while_a_kept_tenant_version_is_tied_to_it(
    registry: Registry, root: DomainVersion
) -> None:
    first = publish_branch(registry, "law", root)
    publish(registry, "films", first)
    publish(registry, "films", root, 1)
    publish_branch(registry, "law", root)
    third = publish_branch(registry, "law", root)
    registry.retire(2, LATER_S, base="b")
    assert [one.number for one in registry.domain_versions("b", "law")] == [1, 2, 3]
    registry.retire(1, LATER_S, base="b")
    assert registry.domain_versions("b", "law") == [third]
    assert registry.collectable(LATER_S + 1) == ["tenants/films/1", "domains/b/law/2", "domains/b/law/1"]


def test_a_parent_stays_while_a_kept_child_stands_on_it_and_goes_with_it(
    registry: Registry, root: DomainVersion
) -> None:
    law = publish_branch(registry, "law", root)
    publish_branch(registry, "law", root)
    publish_branch(registry, "tax", law)
    registry.retire(1, LATER_S, base="b")
    assert [one.number for one in registry.domain_versions("b", "law")] == [1, 2]
    publish_branch(registry, "tax", root)
    registry.retire(1, LATER_S, base="b")
    assert registry.collectable(LATER_S + 1) == ["domains/b/tax/1", "domains/b/law/1"]


def test_what_others_stand_on_is_forgotten_after_them_in_any_order(registry: Registry, root: DomainVersion) -> None:
    law = publish_branch(registry, "law", root)
    tax = publish_branch(registry, "tax", law)
    publish(registry, "films", tax)
    registry.delete_tenant("films", LATER_S)
    registry.delete_domain("b", "tax", LATER_S)
    registry.delete_domain("b", "law", LATER_S)
    assert registry.collectable(LATER_S + 1) == ["tenants/films/1", "domains/b/tax/1", "domains/b/law/1"]
    for path in ("domains/b/law/1", "domains/b/tax/1", "tenants/films/1"):
        registry.forget(path)
    assert registry.collectable(LATER_S + 1) == ["domains/b/tax/1", "domains/b/law/1"]
    for path in registry.collectable(LATER_S + 1):
        registry.forget(path)
    assert registry.snapshot().paths == {"bases/b", "plots/general"}


def test_of_a_domain_the_highest_numbers_are_kept_whatever_their_order(registry: Registry, root: DomainVersion) -> None:
    # As an adoption reads them, by their names.
    numbers = (1, 10, 11, 2, 3, 9)
    new = [NewDomain("b", "law", number, f"domains/b/law/{number}", root.path, {}) for number in numbers]
    registry.adopt(registry.snapshot().generation, (), new, (), NOW_S)
    registry.retire(3, LATER_S, base="b")
    kept = registry.snapshot().domains
    assert sorted(one.number for one in kept if one.domain == "law") == [9, 10, 11]
