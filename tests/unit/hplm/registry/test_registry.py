"""Bases, domains, tenants and what serving sees of them, on both databases."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from hplm.errors import (
    BadManageRequestError,
    ConflictError,
    DomainInUseError,
    RegistryUnavailableError,
    UnknownDomainError,
    UnknownTenantError,
    UnknownVersionError,
)
from hplm.registry.records import BaseRecord, DomainRecord, DomainVersion, ServedTenant, WithdrawnTenant
from hplm.registry.registry import Registry
from hplm.registry.serving import changed_since
from hplm.registry.tenants import listing
from hplm.store.layout import Store
from tests.unit.hplm.registry.making import NOW_S, publish, publish_branch, publish_root

FLEET = [f"tenant-{number:05d}" for number in range(10_000)]


def search_plan(registry: Registry, query: object) -> list[str]:
    """How SQLite would find the rows of a query."""
    with registry._database.reading() as connection:
        compiled = query.compile(connection, compile_kwargs={"literal_binds": True})  # type: ignore[attr-defined]
        return [str(row[3]) for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {compiled}")]


def test_a_registered_base_is_found(registry: Registry) -> None:
    registry.publish_base("b", "f", "bases/b", NOW_S)
    registry.publish_base("b", "f", "bases/b", NOW_S)
    assert registry.base("b") == BaseRecord("b", "f", "bases/b")
    with pytest.raises(UnknownDomainError, match="no base 'c'"):
        registry.base("c")


def test_a_base_with_domains_keeps_its_weights_and_one_without_may_change(registry: Registry) -> None:
    registry.publish_base("b", "old", "bases/b", NOW_S)
    registry.publish_base("b", "new", "bases/b", NOW_S)
    assert registry.base("b").fingerprint == "new"
    publish_root(registry, base="c")
    with pytest.raises(ConflictError, match="has domain 'general'"):
        registry.publish_base("c", "other", "bases/c", NOW_S)


def test_the_next_version_of_a_domain_is_current_and_the_first_is_kept(registry: Registry, root: DomainVersion) -> None:
    first, second = (publish_branch(registry, "law", root) for _ in range(2))
    assert (first.number, second.number) == (1, 2)
    assert second.path == "domains/b/law/2"
    assert registry.domain("b", "law") == DomainRecord("b", "law", "general", second)
    assert registry.domain_versions("b", "law") == [first, second]
    assert registry.lineage(first.id) == [first, root]
    assert [one.name for one in registry.domains("b")] == ["general", "law"]
    assert registry.domains("another") == []


def test_a_lineage_leads_from_the_branch_to_the_root(registry: Registry, root: DomainVersion) -> None:
    law = publish_branch(registry, "law", root)
    tax = publish_branch(registry, "tax", law)
    publish_branch(registry, "law", root)
    assert registry.lineage(tax.id) == [tax, law, root]
    with pytest.raises(UnknownVersionError):
        registry.lineage(tax.id + 100)


def test_what_a_domain_says_of_itself_comes_back_as_it_was(registry: Registry, root: DomainVersion) -> None:
    about = {"loss": [2.5, 1.25], "corpus": {"name": "Straße.txt", "tokens": 50_000}, "none": None}
    registry.publish_domain("b", "law", "domains/b/law/1", NOW_S, parent_id=root.id, about=about, expected=None)
    assert registry.current_domain("b", "law").about == about


def test_a_score_that_is_no_number_is_none(registry: Registry, root: DomainVersion) -> None:
    about = {"scores": {"pearson": math.nan, "curve": [1.0, math.inf]}}
    made = registry.publish_domain("b", "law", "p", NOW_S, parent_id=root.id, about=about, expected=None)
    assert made.about == {"scores": {"pearson": None, "curve": [1.0, None]}}


def test_a_domain_that_was_changed_meanwhile_is_not_overwritten(registry: Registry, root: DomainVersion) -> None:
    publish_branch(registry, "law", root)
    with pytest.raises(ConflictError, match="at version 1, not 2"):
        registry.publish_domain("b", "law", "p", NOW_S, parent_id=root.id, about={}, expected=2)
    registry.publish_domain("b", "law", "p", NOW_S, parent_id=root.id, about={}, expected=1)


def test_a_number_is_given_once_and_the_version_may_carry_it(registry: Registry, root: DomainVersion) -> None:
    lost, taken = (registry.next_domain_number("b", "law") for _ in range(2))
    assert (lost, taken) == (1, 2)
    with pytest.raises(UnknownDomainError):
        registry.domain("b", "law")
    made = registry.publish_domain("b", "law", "p/2", NOW_S, parent_id=root.id, about={}, expected=None, number=taken)
    assert made.number == 2
    with pytest.raises(ConflictError, match="a version 2 already"):
        registry.publish_domain("b", "law", "q", NOW_S, parent_id=root.id, about={}, expected=2, number=taken)
    assert registry.next_number("films") == 1
    assert registry.next_number("films") == 2


def test_a_domain_stands_neither_on_itself_nor_on_another_bases(registry: Registry, root: DomainVersion) -> None:
    law = publish_branch(registry, "law", root)
    tax = publish_branch(registry, "tax", law)
    with pytest.raises(BadManageRequestError, match="cannot stand on 'tax'"):
        registry.publish_domain("b", "law", "p", NOW_S, parent_id=tax.id, about={}, expected=1)
    other = publish_root(registry, base="c")
    with pytest.raises(BadManageRequestError, match="of base 'c'"):
        registry.publish_domain("b", "law", "p", NOW_S, parent_id=other.id, about={}, expected=1)
    with pytest.raises(UnknownDomainError, match="no base 'd'"):
        registry.publish_domain("d", "law", "p", NOW_S, parent_id=None, about={}, expected=None)


def test_bases_have_trees_of_their_own(registry: Registry, root: DomainVersion) -> None:
    other = publish_root(registry, base="c")
    publish_branch(registry, "law", other)
    assert [(one.base, one.name) for one in registry.domains()] == [("b", "general"), ("c", "general"), ("c", "law")]
    with pytest.raises(UnknownDomainError):
        registry.domain("b", "law")


def test_a_published_tenant_is_found_with_its_domain(registry: Registry, root: DomainVersion) -> None:
    law = publish_branch(registry, "law", root)
    made = publish(registry, "films", law)
    found = registry.tenant("films")
    assert (found.name, found.base, found.current, found.domain, found.domain_number) == ("films", "b", made, "law", 1)
    assert registry.tenant_versions("films") == [made]
    assert registry.tenant_count() == 1
    assert registry.tenants_by_domain() == {("b", "law"): 1}
    with pytest.raises(UnknownTenantError):
        registry.tenant("film")


def test_a_tenant_that_was_changed_meanwhile_is_not_overwritten(registry: Registry, root: DomainVersion) -> None:
    publish(registry, "films", root)
    for expected, words in ((None, "exists already, at version 1"), (2, "at version 1, not 2")):
        with pytest.raises(ConflictError, match=words):
            publish(registry, "films", root, expected)
    with pytest.raises(ConflictError, match="was deleted meanwhile"):
        publish(registry, "books", root, 1)
    with pytest.raises(ConflictError, match="has had a version 1"):
        registry.publish_tenant("films", root.id, "p", NOW_S, about={}, number=1, expected=1)
    assert [one.number for one in registry.tenant_versions("films")] == [1]


def test_a_tenant_is_not_published_over_a_domain_version_that_has_gone(registry: Registry, root: DomainVersion) -> None:
    law = publish_branch(registry, "law", root)
    registry.delete_domain("b", "law", NOW_S)
    with pytest.raises(ConflictError, match="version 1 of domain 'law' was removed meanwhile"):
        publish(registry, "films", law)
    with pytest.raises(UnknownVersionError):
        registry.publish_tenant("films", 99, "p", NOW_S, about={}, number=1, expected=None)
    assert registry.tenant_count() == 0


def test_a_rollback_moves_only_what_is_current(registry: Registry, root: DomainVersion) -> None:
    first = publish(registry, "films", root)
    second = publish(registry, "films", root, 1)
    third = publish(registry, "films", root, 2)
    assert registry.rollback_tenant("films", None, NOW_S) == {"b": second}
    assert registry.rollback_tenant("films", None, NOW_S) == {"b": first}
    with pytest.raises(UnknownVersionError, match=r"no earlier one; kept are 1, 2, 3"):
        registry.rollback_tenant("films", None, NOW_S)
    assert registry.rollback_tenant("films", 3, NOW_S) == {"b": third}
    assert registry.tenant_versions("films") == [first, second, third]
    with pytest.raises(UnknownVersionError, match="no version 7"):
        registry.rollback_tenant("films", 7, NOW_S)
    with pytest.raises(UnknownTenantError):
        registry.rollback_tenant("books", None, NOW_S)


def test_a_tenant_made_again_after_its_deletion_has_other_numbers_and_ids(
    registry: Registry, root: DomainVersion
) -> None:
    first = publish(registry, "films", root)
    registry.delete_tenant("films", NOW_S)
    with pytest.raises(UnknownTenantError):
        registry.tenant("films")
    with pytest.raises(UnknownTenantError):
        registry.delete_tenant("films", NOW_S)
    registry.forget(first.path)
    again = publish(registry, "films", root)
    assert again.number == 2
    assert again.id > first.id
    with pytest.raises(UnknownVersionError):
        registry.rollback_tenant("films", 1, NOW_S)


def test_a_domain_with_tenants_is_not_deleted_and_the_error_names_them(registry: Registry, root: DomainVersion) -> None:
    law = publish_branch(registry, "law", root)
    for number in range(23):
        publish(registry, f"t{number:02d}", law)
    with pytest.raises(DomainInUseError, match=r"tenants t00, .*, t19 and 3 more$"):
        registry.delete_domain("b", "law", NOW_S)
    for number in range(23):
        registry.delete_tenant(f"t{number:02d}", NOW_S)
    registry.delete_domain("b", "law", NOW_S)
    with pytest.raises(UnknownDomainError):
        registry.domain("b", "law")
    with pytest.raises(UnknownDomainError):
        registry.delete_domain("b", "law", NOW_S)


def test_a_domain_that_jobs_build_on_is_not_deleted_but_its_own_jobs_are_cancelled(
    registry: Registry, root: DomainVersion
) -> None:
    publish_branch(registry, "law", root)
    own = {"base": "b", "domain": "law", "parent": "general"}
    child = {"base": "b", "domain": "tax", "parent": "law"}
    tenant = {"base": "b", "domain": "law", "data": {}}
    updating = registry.submit_job("domain.update", "domain:b/law", own, NOW_S)
    jobs = [
        registry.submit_job("domain.create", "domain:b/tax", child, NOW_S),
        registry.submit_job("tenant.create", "tenant:films", tenant, NOW_S),
    ]
    registry.submit_job("tenant.create", "plan:tenant:films", {**tenant, "dry_run": True}, NOW_S)
    registry.submit_job("tenant.create", "tenant:of-another-base", {**tenant, "base": "c"}, NOW_S)
    for job in jobs:
        with pytest.raises(DomainInUseError, match=f"jobs {job.id} .{job.subject}"):
            registry.delete_domain("b", "law", NOW_S)
        registry.cancel_job(job.id, NOW_S)
    registry.delete_domain("b", "law", NOW_S)
    assert registry.job(updating.id).state == "cancelled"


def test_of_many_jobs_that_build_on_a_domain_some_are_named(registry: Registry, root: DomainVersion) -> None:
    publish_branch(registry, "law", root)
    for number in range(25):
        registry.submit_job("tenant.create", f"tenant:t{number}", {"base": "b", "domain": "law", "data": {}}, NOW_S)
    with pytest.raises(DomainInUseError, match=r"\(tenant:t19\) and 5 more$") as refused:
        registry.delete_domain("b", "law", NOW_S)
    assert "tenant:t20" not in str(refused.value)


@pytest.mark.parametrize("kind", ["tenant", "domain"])
def test_no_number_is_given_whose_folder_is_there_and_what_lies_there_stays(
    registry: Registry, root: DomainVersion, tmp_path: Path, kind: str
) -> None:
    def take() -> int:
        if kind == "tenant":
            registry.check_next_number("films", lambda n: tmp_path / str(n))
            return registry.next_number("films", lambda n: tmp_path / str(n))
        return registry.next_domain_number("b", "law", lambda n: tmp_path / str(n))

    assert take() == 1
    # As after a backup of the registry was put back: it gave 2 once, and knows nothing of it.
    (tmp_path / "2").mkdir()
    for _ in range(2):
        with pytest.raises(ConflictError, match="never gave that number") as refused:
            take()
        assert str(tmp_path) not in str(refused.value)
    if kind == "tenant":
        with pytest.raises(ConflictError, match="never gave that number"):
            registry.check_next_number("films", lambda n: tmp_path / str(n))
    (tmp_path / "2").rmdir()
    assert take() == 2


def test_a_domain_with_children_is_not_deleted_and_the_error_names_them_and_their_tenants(
    registry: Registry, root: DomainVersion
) -> None:
    law = publish_branch(registry, "law", root)
    tax = publish_branch(registry, "tax", law)
    publish(registry, "films", tax)
    with pytest.raises(DomainInUseError, match="tenants films; domains tax"):
        registry.delete_domain("b", "law", NOW_S)


def test_a_domain_can_go_when_all_have_moved_away_and_what_stood_on_it_cannot_come_back(
    registry: Registry, root: DomainVersion
) -> None:
    law = publish_branch(registry, "law", root)
    publish(registry, "films", law)
    publish(registry, "films", root, 1)
    publish_branch(registry, "tax", law)
    moved = publish_branch(registry, "tax", root)
    registry.delete_domain("b", "law", NOW_S)
    with pytest.raises(UnknownVersionError, match="no version 1; kept are 2"):
        registry.rollback_tenant("films", 1, NOW_S)
    assert registry.domain_versions("b", "tax") == [moved]
    assert registry.tenant("films").domain == "general"


def test_a_deleted_domain_made_again_goes_on_counting(registry: Registry, root: DomainVersion) -> None:
    publish_branch(registry, "law", root)
    registry.delete_domain("b", "law", NOW_S)
    assert publish_branch(registry, "law", root).number == 2
    assert [one.number for one in registry.domain_versions("b", "law")] == [2]


def test_listing_goes_on_after_a_name_and_keeps_to_a_prefix(registry: Registry, root: DomainVersion) -> None:
    for name in ("a", "films", "films-1", "films-2", "films.x", "films_x", "filmt", "z"):
        publish(registry, name, root)
    registry.delete_tenant("films-2", NOW_S)

    def names(prefix: str = "", after: str = "", limit: int = 100) -> list[str]:
        return [one.name for one in registry.tenants(prefix=prefix, after=after, limit=limit)]

    assert names() == ["a", "films", "films-1", "films.x", "films_x", "filmt", "z"]
    assert names(prefix="films") == ["films", "films-1", "films.x", "films_x"]
    assert names(prefix="films", after="films", limit=2) == ["films-1", "films.x"]
    assert names(limit=1) == ["a"]
    assert names(prefix="q") == []


def test_listing_leaves_what_is_about_a_version_in_the_database(registry: Registry, root: DomainVersion) -> None:
    about = {"confusion": {"test": {"a": {"a": 3}}}}
    registry.publish_tenant("films", root.id, "tenants/films/1", NOW_S, about=about, number=1, expected=None)
    assert registry.tenant("films").current.about == about
    assert "about" not in str(listing("", "", 100))
    (listed,) = registry.tenants()
    assert replace(listed.current, about=about) == registry.tenant("films").current


def test_ten_thousand_tenants_are_published_together_listed_and_found(registry: Registry, root: DomainVersion) -> None:
    before = publish(registry, FLEET[7], root)
    assert registry.publish_tenants(root.id, "banks/fleet", FLEET, NOW_S) == len(FLEET)
    assert registry.tenant_count() == len(FLEET)
    found = registry.tenant(FLEET[7]).current
    assert (found.number, found.path) == (2, "banks/fleet")
    assert [one.name for one in registry.tenants(prefix="tenant-05", limit=3)] == FLEET[5000:5003]
    # A version elsewhere can still be gone back to.
    assert registry.rollback_tenant(FLEET[7], None, NOW_S) == {"b": before}


def test_a_bank_built_again_replaces_its_tenants_versions(registry: Registry, root: DomainVersion) -> None:
    registry.publish_tenants(root.id, "banks/fleet", ["a", "b"], NOW_S)
    assert registry.publish_tenants(root.id, "banks/fleet", ["b", "c", "c"], NOW_S) == 2
    assert [(one.name, one.current.number) for one in registry.tenants()] == [("a", 1), ("b", 2), ("c", 1)]
    # The files of version 1 are no more.
    assert [one.number for one in registry.tenant_versions("b")] == [2]
    assert registry.publish_tenants(root.id, "banks/empty", [], NOW_S) == 0


def test_a_bank_in_anothers_place_cancels_jobs_of_tenants_that_go_and_their_uploads_go_too(
    registry: Registry, root: DomainVersion
) -> None:
    registry.publish_tenants(root.id, "banks/fleet", ["a", "b"], NOW_S)
    upload = registry.start_upload(1, "digest", NOW_S)
    request = {"base": "b", "data": {"train": {"upload": upload.id}}, "drop_uploads": True}
    job = registry.submit_job("tenant.update", "tenant:a", request, NOW_S)
    registry.publish_tenants(root.id, "banks/fleet-2", ["b"], NOW_S, instead_of=["banks/fleet"])
    assert registry.job(job.id).state == "cancelled"
    assert registry.drop_uploads(before_s=NOW_S - 1) == [upload.id]


def test_listing_finding_and_following_search_an_index(sqlite_store: Store) -> None:
    with closing(Registry.open(sqlite_store, create=True)) as registry:
        root = publish_root(registry)
        registry.publish_tenants(root.id, "banks/fleet", FLEET, NOW_S)
        generation = registry.generation()
        for query, index in (
            (listing("tenant-05", "tenant-0512", 100), "(name>? AND name<?)"),
            (listing("", "", 100), "(name>?)"),
            (changed_since(generation), "tenants_by_generation"),
        ):
            plan = search_plan(registry, query)
            assert plan[0].startswith("SEARCH tenants USING"), plan
            assert index in plan[0]
            assert not [line for line in plan if line.startswith("SCAN") or "TEMP B-TREE FOR ORDER" in line], plan


def test_the_generation_grows_with_every_change_of_a_tenant_or_domain(registry: Registry, root: DomainVersion) -> None:
    seen = [registry.generation()]
    law = publish_branch(registry, "law", root)
    for change in (
        lambda: publish(registry, "films", law),
        lambda: publish(registry, "films", root, 1),
        lambda: registry.rollback_tenant("films", 1, NOW_S),
        lambda: registry.delete_tenant("films", NOW_S),
        lambda: registry.delete_domain("b", "law", NOW_S),
        lambda: registry.publish_tenants(root.id, "banks/x", ["a"], NOW_S),
    ):
        change()
        seen.append(registry.generation())
    assert seen == sorted(set(seen))
    registry.next_number("films")
    registry.submit_job("tenant.create", "tenant:x", {}, NOW_S)
    assert registry.generation() == seen[-1]


def test_changes_name_what_was_published_and_removed_since(registry: Registry, root: DomainVersion) -> None:
    films = publish(registry, "films", root)
    books = publish(registry, "books", root)
    everything = registry.changes_since(0)
    assert everything.full
    assert everything.generation == registry.generation()
    assert set(everything.published) == {
        ServedTenant("films", films.id, 1, "tenants/films/1", root.id, "b"),
        ServedTenant("books", books.id, 1, "tenants/books/1", root.id, "b"),
    }
    registry.delete_tenant("books", NOW_S)
    second = publish(registry, "films", root, 1)
    changes = registry.changes_since(everything.generation)
    assert changes.published == (ServedTenant("films", second.id, 2, "tenants/films/2", root.id, "b"),)
    assert changes.withdrawn == (WithdrawnTenant("books", "b"),)
    assert not changes.full
    nothing = registry.changes_since(changes.generation)
    assert (nothing.published, nothing.withdrawn, nothing.full) == ((), (), False)
    assert [one.name for one in registry.changes_since(0).published] == ["films"]


def test_a_number_that_was_only_given_is_no_change(registry: Registry, root: DomainVersion) -> None:
    before = registry.generation()
    registry.next_number("films")
    changes = registry.changes_since(before)
    assert (changes.published, changes.withdrawn) == ((), ())
    assert registry.changes_since(0).withdrawn == ()


def test_another_registrys_generation_gets_everything(registry: Registry, root: DomainVersion) -> None:
    publish(registry, "films", root)
    now = registry.generation()
    for other in (now + 1, now - 1_000_000):
        assert registry.changes_since(other).full


def test_a_reader_follows_a_writer_and_cannot_write(registry: Registry, root: DomainVersion, store: Store) -> None:
    with closing(Registry.open_read_only(store)) as reader:
        seen = reader.generation()
        made = publish(registry, "films", root)
        assert [one.version_id for one in reader.changes_since(seen).published] == [made.id]
        assert reader.lineage(made.domain_version_id) == [root]
        for write in (
            lambda: reader.delete_tenant("films", NOW_S),
            lambda: reader.submit_job("k", "tenant:x", {}, NOW_S),
            lambda: reader.next_number("films"),
        ):
            with pytest.raises(RegistryUnavailableError, match="can only be read here"):
                write()
        assert reader.tenant("films").current == made
