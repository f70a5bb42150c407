"""Tenants with versions over several bases, and bases that are deleted, on both databases."""

from __future__ import annotations

import pytest

from hplm.errors import ConflictError, UnknownDomainError, UnknownTenantError, UnknownVersionError
from hplm.registry.records import BaseRecord, DomainVersion, WithdrawnTenant
from hplm.registry.registry import Registry
from tests.unit.hplm.registry.making import NOW_S, publish, publish_branch, publish_root

LATER_S = NOW_S + 10


@pytest.fixture
def other(registry: Registry) -> DomainVersion:
    """The root domain `general-c` of base `c`."""
    return publish_root(registry, "general-c", base="c")


def bases_of(registry: Registry, name: str) -> dict[str, int]:
    return dict(registry.tenant(name).bases)


def roll_back(registry: Registry, name: str, number: int | None = None) -> dict[str, int]:
    served = registry.rollback_tenant(name, number, LATER_S)
    return {base: version.number for base, version in served.items()}


def served(registry: Registry) -> set[tuple[str, str, int, bool]]:
    return {(one.name, one.base, one.number, one.is_default) for one in registry.changes_since(0).published}


def test_a_version_over_another_base_is_added_and_the_first_base_stays_the_default(
    registry: Registry, root: DomainVersion, other: DomainVersion
) -> None:
    first, second = publish(registry, "films", other), publish(registry, "films", root)
    assert (first.base, first.number, second.base, second.number) == ("c", 1, "b", 2)
    record = registry.tenant("films")
    assert (record.current, record.base, record.default_base) == (first, "c", "c")
    assert record.bases == {"b": 2, "c": 1}
    assert registry.tenant("films", "b").current == second
    assert registry.tenant_versions("films") == [first, second]
    assert served(registry) == {("films", "c", 1, True), ("films", "b", 2, False)}
    assert registry.tenants_by_domain() == {("b", "general"): 1, ("c", "general-c"): 1}
    assert registry.tenant_count() == 1


def test_a_tenant_is_unknown_over_a_base_that_it_has_no_version_of(
    registry: Registry, root: DomainVersion, other: DomainVersion
) -> None:
    publish(registry, "films", root)
    assert registry.find_tenant("films", "c") is None
    with pytest.raises(UnknownTenantError, match="no tenant 'films' over base 'c'"):
        registry.tenant("films", "c")
    with pytest.raises(UnknownTenantError, match="no tenant 'films' over base 'c'"):
        registry.delete_tenant("films", NOW_S, base="c")


def test_the_expected_number_is_that_over_the_base(
    registry: Registry, root: DomainVersion, other: DomainVersion
) -> None:
    publish(registry, "films", root)
    with pytest.raises(ConflictError, match="over base 'c' was deleted meanwhile"):
        publish(registry, "films", other, 1)
    publish(registry, "films", other)
    with pytest.raises(ConflictError, match="over base 'c' is at version 3, not 1"):
        publish(registry, "films", other, 1)
    assert publish(registry, "films", root, 1).number == 5


def test_a_list_names_each_tenant_once_with_its_default_base(
    registry: Registry, root: DomainVersion, other: DomainVersion
) -> None:
    for name in ("a", "films", "z"):
        publish(registry, name, other)
        publish(registry, name, root)
    listed = registry.tenants(prefix="f")
    assert [(one.name, one.base, one.current.number, one.bases) for one in listed] == [
        ("films", "c", 1, {"b": 2, "c": 1})
    ]


def test_a_rollback_to_a_number_takes_every_base_to_its_newest_version_up_to_it(
    registry: Registry, root: DomainVersion, other: DomainVersion
) -> None:
    for domain, expected in ((root, None), (other, None), (root, 1), (other, 2), (root, 3)):
        publish(registry, "films", domain, expected)
    assert roll_back(registry, "films", 3) == {"b": 3, "c": 2}
    assert roll_back(registry, "films", 4) == {"b": 3, "c": 4}
    assert roll_back(registry, "films", 2) == {"b": 1, "c": 2}
    assert bases_of(registry, "films") == {"b": 1, "c": 2}
    assert served(registry) == {("films", "b", 1, True), ("films", "c", 2, False)}
    with pytest.raises(UnknownVersionError, match=r"at version 2 and has no version 7; kept are 1, 2, 3, 4, 5"):
        roll_back(registry, "films", 7)


def test_a_rollback_takes_the_tenant_from_a_base_without_a_version_and_a_later_one_brings_it_back(
    registry: Registry, root: DomainVersion, other: DomainVersion
) -> None:
    publish(registry, "films", root)
    publish(registry, "films", other)
    seen = registry.generation()
    assert roll_back(registry, "films", 1) == {"b": 1}
    assert registry.find_tenant("films", "c") is None
    assert registry.changes_since(seen).withdrawn == (WithdrawnTenant("films", "c"),)
    assert roll_back(registry, "films", 2) == {"b": 1, "c": 2}


def test_a_rollback_without_a_number_undoes_the_last_publication_and_leaves_the_other_base(
    registry: Registry, root: DomainVersion, other: DomainVersion
) -> None:
    for domain, expected in ((root, None), (other, None), (root, 1), (other, 2)):
        publish(registry, "films", domain, expected)
    assert roll_back(registry, "films") == {"b": 3, "c": 2}
    assert roll_back(registry, "films") == {"b": 1, "c": 2}
    assert roll_back(registry, "films") == {"b": 1}
    with pytest.raises(UnknownVersionError, match="no earlier one"):
        roll_back(registry, "films")


def test_a_publication_over_one_base_is_undone_though_the_other_was_rolled_back(
    registry: Registry, root: DomainVersion, other: DomainVersion
) -> None:
    publish(registry, "films", root)
    publish(registry, "films", root, 1)
    roll_back(registry, "films", 1)
    publish(registry, "films", other)
    publish(registry, "films", root, 1)
    # 2 was no good, so 1 was served before 4.
    assert roll_back(registry, "films") == {"b": 1, "c": 3}


def test_the_default_moves_to_the_first_base_that_is_left(
    registry: Registry, root: DomainVersion, other: DomainVersion
) -> None:
    third = publish_root(registry, "general-d", base="d")
    for domain in (third, other, root):
        publish(registry, "films", domain)
    seen = registry.generation()
    registry.delete_tenant("films", NOW_S, base="d")
    assert registry.tenant("films").base == "b"
    changes = registry.changes_since(seen)
    assert changes.withdrawn == (WithdrawnTenant("films", "d"),)
    assert [(one.base, one.is_default) for one in changes.published] == [("b", True), ("c", False)]


def test_a_tenant_deleted_over_one_base_cannot_go_back_to_it_and_goes_with_its_last_base(
    registry: Registry, root: DomainVersion, other: DomainVersion
) -> None:
    publish(registry, "films", root)
    publish(registry, "films", other)
    publish(registry, "films", other, 2)
    registry.delete_tenant("films", LATER_S, base="c")
    assert registry.collectable(LATER_S + 1) == ["tenants/films/2", "tenants/films/3"]
    with pytest.raises(UnknownVersionError, match="no version 2; kept are 1"):
        roll_back(registry, "films", 2)
    registry.delete_tenant("films", LATER_S, base="b")
    assert registry.find_tenant("films") is None
    assert registry.tenant_count() == 0
    assert publish(registry, "films", other).number == 4
    assert registry.tenant("films").default_base == "c"


def test_jobs_over_a_base_end_when_the_tenant_leaves_it(
    registry: Registry, root: DomainVersion, other: DomainVersion
) -> None:
    def submit(base: str) -> str:
        upload = registry.start_upload(1, "digest", NOW_S)
        request = {"base": base, "data": {"train": {"upload": upload.id}}, "drop_uploads": True}
        return registry.submit_job("tenant.update", "tenant:films", request, NOW_S).id

    publish(registry, "films", root)
    publish(registry, "films", other)
    stays, rolled_back = submit("b"), submit("c")
    roll_back(registry, "films", 1)
    assert (registry.job(stays).state, registry.job(rolled_back).state) == ("queued", "cancelled")
    assert len(registry.drop_uploads(before_s=NOW_S - 1)) == 1
    roll_back(registry, "films", 2)
    deleted = submit("c")
    assert len(registry.delete_tenant("films", NOW_S, base="c")) == 1
    assert (registry.job(stays).state, registry.job(deleted).state) == ("queued", "cancelled")


def test_a_queued_update_follows_its_tenant_over_its_own_base_only(
    registry: Registry, root: DomainVersion, other: DomainVersion
) -> None:
    publish(registry, "films", root)
    publish(registry, "films", other)
    request = {"base": "b", "domain": "general", "stays": True}
    job = registry.submit_job("tenant.update", "tenant:films", request, NOW_S)
    publish(registry, "films", publish_branch(registry, "tax", other), 2)
    assert registry.job(job.id).request["domain"] == "general"
    publish(registry, "films", publish_branch(registry, "law", root), 1)
    assert registry.job(job.id).request["domain"] == "law"


def test_a_job_creates_a_tenant_over_its_base_only(registry: Registry) -> None:
    job = registry.submit_job("tenant.create", "tenant:films", {"base": "b"}, NOW_S)
    assert registry.creating("tenant:films", "b") == registry.creating("tenant:films") == job.id
    assert registry.creating("tenant:films", "c") is None


def test_each_base_keeps_versions_of_its_own(registry: Registry, root: DomainVersion, other: DomainVersion) -> None:
    for domain, expected in ((root, None), (other, None), (root, 1), (root, 3), (root, 4), (other, 2)):
        publish(registry, "films", domain, expected)
    assert registry.retire(2, LATER_S, base="b") == 2
    assert [one.number for one in registry.tenant_versions("films")] == [2, 4, 5, 6]
    assert registry.retire(1, LATER_S, base="c") == 1
    assert bases_of(registry, "films") == {"b": 5, "c": 6}


def test_a_bank_over_another_base_leaves_the_first_and_its_successor_takes_its_tenants_from_that_base(
    registry: Registry, root: DomainVersion, other: DomainVersion
) -> None:
    registry.publish_tenants(root.id, "banks/b", ["a", "z"], NOW_S)
    registry.publish_tenants(other.id, "banks/c", ["a", "y"], NOW_S)
    assert [(one.name, one.bases) for one in registry.tenants()] == [
        ("a", {"b": 1, "c": 2}),
        ("y", {"c": 1}),
        ("z", {"b": 1}),
    ]
    seen = registry.generation()
    registry.publish_tenants(other.id, "banks/c-2", ["x"], NOW_S, instead_of=["banks/c"])
    assert served(registry) == {("a", "b", 1, True), ("z", "b", 1, True), ("x", "c", 1, True)}
    assert registry.changes_since(seen).withdrawn == (WithdrawnTenant("a", "c"), WithdrawnTenant("y", "c"))
    assert registry.find_tenant("y") is None
    with pytest.raises(UnknownVersionError):
        roll_back(registry, "a", 2)


def test_a_base_with_tenants_is_not_deleted(registry: Registry, root: DomainVersion, other: DomainVersion) -> None:
    for name in ("films", "books"):
        publish(registry, name, other)
    with pytest.raises(ConflictError, match="2 tenants stand on it, as 'books'"):
        registry.delete_base("c", NOW_S)
    with pytest.raises(UnknownDomainError, match="no base 'd'"):
        registry.delete_base("d", NOW_S)
    assert [base.name for base in registry.bases()] == ["b", "c"]


def test_a_base_is_deleted_with_its_domains_and_jobs_and_its_files_may_go(
    registry: Registry, root: DomainVersion, other: DomainVersion
) -> None:
    law = publish_branch(registry, "law", other)
    publish(registry, "films", root)
    publish(registry, "films", law)
    roll_back(registry, "films", 1)
    jobs = [
        registry.submit_job("domain.update", "domain:c/law", {"base": "c", "domain": "law"}, NOW_S),
        registry.submit_job("tenant.create", "tenant:books", {"base": "c", "domain": "law"}, NOW_S),
        registry.submit_job("tenant.create", "tenant:books", {"base": "b", "domain": "general"}, NOW_S),
    ]
    registry.delete_base("c", LATER_S)
    assert [registry.job(job.id).state for job in jobs] == ["cancelled", "cancelled", "queued"]
    assert [base.name for base in registry.bases()] == [base.name for base in registry.snapshot().bases] == ["b"]
    assert [one.name for one in registry.domains()] == ["general"]
    with pytest.raises(UnknownDomainError, match="no base 'c'"):
        publish_branch(registry, "tax", other)
    paths = ["tenants/films/2", "domains/c/law/1", "plots/general-c", "bases/c"]
    assert registry.collectable(LATER_S + 1) == paths
    for path in paths:
        registry.forget(path)
    assert registry.collectable(LATER_S + 1) == []
    assert not set(paths) & registry.snapshot().paths
    assert registry.tenant("films").bases == {"b": 1}


def test_a_deleted_base_that_is_published_again_goes_on_counting_and_keeps_its_files(
    registry: Registry, root: DomainVersion, other: DomainVersion
) -> None:
    registry.delete_base("c", LATER_S)
    assert publish_root(registry, "general-c", base="c").number == 2
    assert registry.collectable(LATER_S + 1) == []
    assert registry.base("c") == BaseRecord("c", "fingerprint of c", "bases/c")
    assert publish(registry, "films", registry.current_domain("c", "general-c")).base == "c"


def test_a_tenants_least_number_of_students_stays_through_updates_and_goes_with_the_tenant(
    registry: Registry, root: DomainVersion, other: DomainVersion
) -> None:
    def least() -> set[tuple[str, int]]:
        return {(one.base, one.least_students) for one in registry.changes_since(0).published}

    publish(registry, "films", root)
    publish(registry, "books", root)
    before = registry.generation()
    registry.set_least_students("films", 3)
    (changed,) = registry.changes_since(before).published
    assert (changed.name, changed.least_students) == ("films", 3)
    publish(registry, "films", other)
    registry.rollback_tenant("films", None, LATER_S)
    assert registry.tenant("films").least_students == 3
    assert registry.served_version(changed.version_id).least_students == 3
    registry.delete_tenant("books", LATER_S)
    assert least() == {("b", 3)}
    registry.delete_tenant("films", LATER_S)
    publish(registry, "films", root)
    assert least() == {("b", 1)}
    with pytest.raises(UnknownTenantError):
        registry.set_least_students("books", 2)
