"""What is adopted into a registry, and what is found wrong."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from hplm.errors import ConflictError
from hplm.housekeeping import garbage_collection
from hplm.housekeeping.inventory import Card, Kind
from hplm.housekeeping.removal_plan import AdoptPlan, plan_adoption
from hplm.registry.records import BaseRecord, DomainVersion, NewDomain, NewTenant
from hplm.registry.registry import Registry
from hplm.store import artifact
from hplm.store.layout import Store
from tests.unit.hplm.housekeeping.stores import NOTHING, fill, found, publish
from tests.unit.hplm.registry.making import NOW_S, put, put_bank, put_base, put_domain, put_plot, put_tenant


def test_an_adoption_puts_parents_before_children_whatever_their_order() -> None:
    cards = [
        Card(found("domains/b/a/1", "domain"), "f", "domains/b/z/1"),
        Card(found("domains/b/z/1", "domain"), "f", "plots/general"),
        Card(found("plots/general", "plot"), "f"),
        Card(found("bases/b", "base"), "f"),
    ]
    plan = plan_adoption(cards, NOTHING)
    assert plan == AdoptPlan(
        0,
        (BaseRecord("b", "f", "bases/b"),),
        (
            NewDomain("b", "general", 1, "plots/general", None, {}),
            NewDomain("b", "z", 1, "domains/b/z/1", "plots/general", {}),
            NewDomain("b", "a", 1, "domains/b/a/1", "domains/b/z/1", {}),
        ),
    )


@pytest.mark.parametrize(
    ("card", "why"),
    [
        (Card(found("tenants/a/1", "tenant"), "f", fault="no manifest"), "no manifest"),
        (Card(found("tenants/a/1", "tenant"), "g"), "over base g, which is not in the store"),
        (Card(found("tenants/a/1", "tenant"), "f", "domains/b/law/7"), "stands on domains/b/law/7"),
        (Card(found("domains/b/law/1", "domain"), "f", "domains/b/x/1"), "stands on domains/b/x/1"),
        (Card(found("domains/c/law/1", "domain"), "f"), "over base f"),
        (Card(found("banks/x", "bank"), "f"), "all its tenants are registered elsewhere"),
    ],
    ids=["broken", "no-base", "no-domain", "no-parent", "another-base", "nobody-new"],
)
def test_what_cannot_be_adopted_is_skipped_with_the_reason(card: Card, why: str) -> None:
    tree = [Card(found("bases/b", "base"), "f"), Card(found("plots/general", "plot"), "f")]
    plan = plan_adoption([*tree, card], NOTHING)
    assert (len(plan.domains), plan.tenants) == (1, ())
    (skipped,) = plan.skipped
    assert skipped.where == card.entry.path
    assert why in skipped.what


def test_what_names_no_domain_goes_to_the_root_that_is_named_or_to_general_or_is_skipped() -> None:
    tenant = Card(found("tenants/a/1", "tenant"), "f")

    def home(*roots: str, root: str = "") -> str | None:
        cards = [Card(found("bases/b", "base"), "f"), *(Card(found(f"plots/{name}", "plot"), "f") for name in roots)]
        plan = plan_adoption([*cards, tenant], NOTHING, root=root)
        return plan.tenants[0].domain if plan.tenants else None

    assert home("only") == "plots/only"
    assert home("x", "general") == "plots/general"
    assert home("x", "general", root="x") == "plots/x"
    assert home("x", "y") is None
    assert home() is None


def test_a_folder_goes_before_a_bank_and_the_newest_bank_before_the_others() -> None:
    tree = [Card(found("bases/b", "base"), "f"), Card(found("plots/general", "plot"), "f")]
    cards = [
        Card(found("banks/1", "bank"), "f", members=("b", "c"), made_s=1.0),
        Card(found("banks/2", "bank"), "f", members=("a", "c"), made_s=2.0),
        Card(found("tenants/a/4", "tenant"), "f"),
    ]
    plan = plan_adoption([*tree, *cards], NOTHING)
    assert plan.tenants == (
        NewTenant("a", 4, "tenants/a/4", "plots/general", {}),
        NewTenant("c", 1, "banks/2", "plots/general", {}),
        NewTenant("b", 1, "banks/1", "plots/general", {}),
    )


def test_a_tenant_in_banks_over_two_bases_is_adopted_over_both_and_a_folder_goes_before_a_bank_of_its_base() -> None:
    tree = [
        card
        for base in ("b", "c")
        for card in (
            Card(found(f"bases/{base}", "base"), f"f-{base}"),
            Card(found(f"plots/{base}", "plot"), f"f-{base}"),
        )
    ]
    cards = [
        Card(found("banks/b", "bank"), "f-b", members=("a", "z"), made_s=1.0),
        Card(found("banks/c", "bank"), "f-c", members=("a", "z"), made_s=2.0),
        Card(found("tenants/a/4", "tenant"), "f-c"),
    ]
    plan = plan_adoption([*tree, *cards], NOTHING)
    assert plan.tenants == (
        NewTenant("a", 4, "tenants/a/4", "plots/c", {}),
        NewTenant("z", 1, "banks/c", "plots/c", {}),
        NewTenant("a", 5, "banks/b", "plots/b", {}),
        NewTenant("z", 2, "banks/b", "plots/b", {}),
    )


def test_each_base_of_an_adopted_tenant_is_at_its_newest_version(store: Store, registry: Registry, base: str) -> None:
    put_plot(store, "general-c", put(store, "bases/c", "base", name="c").fingerprint)
    other = artifact.read(store.path("bases/c"), "base").fingerprint
    for number, of in ((2, base), (3, other), (5, base)):
        put_tenant(store, f"tenants/films/{number}", of)
    assert garbage_collection.adopt(store, registry, NOW_S).skipped == ()
    record = registry.tenant("films")
    assert (record.default_base, record.bases) == ("b", {"b": 5, "c": 3})
    assert garbage_collection.verify(store, registry, NOW_S) == garbage_collection.Verdict((), ())


def test_a_deleted_base_that_is_put_back_is_adopted_with_its_root(store: Store, registry: Registry, base: str) -> None:
    put_plot(store, "general-c", put(store, "bases/c", "base", name="c").fingerprint)
    garbage_collection.adopt(store, registry, NOW_S)
    registry.delete_base("c", time.time() + 1)
    later_s = time.time() + 1_000
    removed = {finding.where for finding in garbage_collection.collect(store, registry, later_s).removed}
    assert removed == {"bases/c", "plots/general-c"}
    assert garbage_collection.collect(store, registry, later_s).removed == ()
    put_plot(store, "general-c", put(store, "bases/c", "base", name="c").fingerprint)
    assert garbage_collection.adopt(store, registry, NOW_S).skipped == ()
    assert registry.current_domain("c", "general-c").number == 2


def test_a_lost_registry_is_made_again_from_the_artifacts(store: Store, registry: Registry, base: str) -> None:
    fill(store, base)
    plan = garbage_collection.adopt(store, registry, NOW_S)
    assert plan.skipped == ()
    assert [(one.base, one.name, one.parent, one.current.number) for one in registry.domains()] == [
        ("b", "general", None, 1),
        ("b", "law", "general", 3),
        ("b", "tax", "law", 1),
    ]
    assert [(one.name, one.current.number, one.current.path, one.domain) for one in registry.tenants()] == [
        ("a", 1, "banks/fleet", "general"),
        ("b", 1, "banks/fleet", "general"),
        ("new", 10, "tenants/new/10", "law"),
        ("old", 2, "tenants/old/2", "tax"),
    ]
    assert [one.number for one in registry.tenant_versions("old")] == [1, 2]
    # As of one that a job has published.
    assert {"task", "labels"} <= registry.tenant("new").current.about.keys()
    tax = registry.tenant("old").current.domain_version_id
    assert [one.domain for one in registry.lineage(tax)] == ["tax", "law", "general"]
    assert registry.next_number("new") == 11
    assert registry.next_domain_number("b", "law") == 4
    assert garbage_collection.verify(store, registry, NOW_S) == garbage_collection.Verdict((), ())
    assert [one.name for one in registry.changes_since(0).published] == ["a", "b", "new", "old"]


def test_adopting_again_does_nothing(store: Store, registry: Registry, base: str) -> None:
    fill(store, base)
    garbage_collection.adopt(store, registry, NOW_S)
    before = registry.snapshot()
    assert garbage_collection.adopt(store, registry, NOW_S) == AdoptPlan(before.generation)
    assert registry.snapshot() == before


def test_adopting_adds_what_came_later_and_leaves_alone_what_is_known(
    store: Store, registry: Registry, base: str
) -> None:
    fill(store, base)
    garbage_collection.adopt(store, registry, NOW_S)
    registry.rollback_tenant("old", 1, NOW_S)
    registry.delete_tenant("a", NOW_S)
    put_tenant(store, "tenants/late/1", base)
    # A killed job's: neither served nor adopted.
    put_tenant(store, "tenants/old/3", base)
    plan = garbage_collection.adopt(store, registry, NOW_S)
    assert [one.name for one in plan.tenants] == ["late"]
    assert [(one.name, one.current.number) for one in registry.tenants()] == [
        ("b", 1),
        ("late", 1),
        ("new", 10),
        ("old", 1),
    ]


def test_who_puts_back_what_was_deleted_is_told_that_it_will_not_stay(
    store: Store, registry: Registry, base: str, root: DomainVersion
) -> None:
    publish(store, registry, base, "kept")
    path = publish(store, registry, base, "deleted")
    registry.delete_tenant("deleted", NOW_S)
    registry.forget(path)
    plan = garbage_collection.adopt(store, registry, NOW_S)
    assert [one.where for one in plan.skipped] == [path]
    assert "deleted" in plan.skipped[0].what


def test_a_plot_that_has_the_name_of_a_registered_branch_keeps_nothing_else_from_adoption(
    store: Store, registry: Registry, base: str
) -> None:
    fill(store, base)
    garbage_collection.adopt(store, registry, NOW_S)
    put_plot(store, "law", base)
    put_tenant(store, "tenants/later/1", base, "plots/general")
    plan = garbage_collection.adopt(store, registry, NOW_S)
    assert [one.where for one in plan.skipped] == ["plots/law"]
    assert [one.name for one in plan.tenants] == ["later"]


def test_a_branch_that_has_the_name_of_a_plot_keeps_nothing_else_from_adoption(
    store: Store, registry: Registry, base: str
) -> None:
    fill(store, base)
    put_domain(store, "domains/b/general/1", base, "plots/general")
    plan = garbage_collection.adopt(store, registry, NOW_S)
    assert [(one.where, "is also called" in one.what) for one in plan.skipped] == [("domains/b/general/1", True)]
    assert {"old", "new", "a", "b"} <= {one.name for one in registry.tenants()}


def test_an_adoption_is_all_or_nothing_and_not_over_what_was_changed_meanwhile(
    store: Store, registry: Registry, base: str, root: DomainVersion
) -> None:
    new = [NewTenant("a", 1, "tenants/a/1", "plots/general", {})]
    generation = registry.generation()
    registry.next_number("a")
    with pytest.raises(ConflictError):
        registry.adopt(generation, [BaseRecord("c", "f", "bases/c")], [], new, NOW_S)
    assert [one.name for one in registry.snapshot().bases] == ["b"]
    # Retired since, which is no generation.
    for gone in ([NewDomain("b", "law", 1, "domains/b/law/1", "plots/gone", {})], []):
        tenant = NewTenant("z", 1, "tenants/z/1", "plots/gone", {})
        with pytest.raises(ConflictError, match="run the command again"):
            registry.adopt(generation, [], gone, [] if gone else [tenant], NOW_S)
    publish(store, registry, base, "x")
    with pytest.raises(ConflictError):
        registry.adopt(generation, [], [], [], NOW_S)


def test_nothing_is_adopted_over_a_base_that_was_registered_or_replaced_meanwhile(registry: Registry) -> None:
    law = [NewDomain("b", "law", 1, "plots/law", None, {})]
    generation = registry.generation()
    # As by `hplm build base` beside it, the second time with other weights.
    for fingerprint in ("f", "g"):
        registry.publish_base("b", fingerprint, "bases/b", NOW_S)
        with pytest.raises(ConflictError, match="run the command again"):
            registry.adopt(generation, [BaseRecord("b", "f", "bases/b")], law, [], NOW_S)
        generation = registry.generation()
    # The same once more is no change.
    registry.publish_base("b", "g", "bases/b", NOW_S)
    registry.adopt(generation, [], law, [], NOW_S)
    with pytest.raises(ConflictError, match="run the command again"):
        registry.adopt(generation, [], law, [], NOW_S)
    assert [one.name for one in registry.domains()] == ["law"]


def test_ten_thousand_tenants_of_a_bank_are_adopted_together(store: Store, registry: Registry, base: str) -> None:
    put_bank(store, "fleet", base, [f"tenant-{number:05d}" for number in range(10_000)])
    garbage_collection.adopt(store, registry, NOW_S)
    assert registry.tenant_count() == 10_000


def test_a_sound_store_has_no_problems(store: Store, registry: Registry, base: str) -> None:
    fill(store, base)
    assert len(garbage_collection.verify(store, registry, NOW_S).loose) == 10
    garbage_collection.adopt(store, registry, NOW_S)
    assert garbage_collection.verify(store, registry, NOW_S) == garbage_collection.Verdict((), ())


@pytest.mark.parametrize(
    ("path", "damage", "words"),
    [
        ("tenants/new/10", "remove", "MISSING_ARTIFACT"),
        ("domains/b/law/3/lower", "remove", "MISSING_ARTIFACT"),
        ("domains/b/law/3/branch", "flip", "does not match the checksum"),
        ("plots/general/bigram", "cut", "has 3 bytes"),
        ("banks/fleet", "bank", "lacks 1 tenants: b"),
        ("bases/b", "base", "the registry says"),
        ("tenants/new/10", "swap", "holds 'old', the registry says new"),
        ("tenants/new/10", "other", "is of base other, the registry says"),
    ],
)
def test_what_is_damaged_is_named_with_what_is_wrong(
    store: Store, registry: Registry, base: str, path: str, damage: str, words: str
) -> None:
    fill(store, base)
    garbage_collection.adopt(store, registry, NOW_S)
    folder = store.path(path)
    match damage:
        case "remove":
            shutil.rmtree(folder)
        case "flip":
            text = (folder / "weights").read_text()
            (folder / "weights").write_text(text.swapcase())
        case "cut":
            (folder / "weights").write_text("cut")
        case "bank":
            put_bank(store, "fleet", base, ["a"])
        case "base":
            with artifact.publish(folder, "base", {}) as partial:
                (partial / "weights").write_text("others")
        case "swap":
            put(store, path, "tenant", name="old", base=base, about={})
        case "other":
            put(store, path, "tenant", name="new", base="other", about={})
    problems = garbage_collection.verify(store, registry, NOW_S).problems
    assert [problem.where for problem in problems] == [
        path if path.startswith(("tenants", "banks", "bases")) else str(Path(path).parent)
    ]
    assert words in problems[0].what


def test_files_that_nobody_uses_are_no_problem_but_named(
    store: Store, registry: Registry, base: str, root: DomainVersion
) -> None:
    publish(store, registry, base, "films")
    registry.next_number("films")
    put_tenant(store, "tenants/films/2", base)
    put_tenant(store, "tenants/other/1", base)
    verdict = garbage_collection.verify(store, registry, time.time() + 1000)
    assert verdict.problems == ()
    assert {(one.where, one.what.split("`")[1]) for one in verdict.loose} == {
        ("tenants/films/2", "hplm store gc"),
        ("tenants/other/1", "hplm store adopt"),
    }


def test_a_plot_of_bigrams_is_whole_without_a_table_of_them(store: Store, registry: Registry) -> None:
    base = put_base(store)
    for level, size in (("root", 2), ("unigram", 1)):
        put(store, f"plots/general/{level}", "plot-table", base=base, size=size)
    assert garbage_collection.adopt(store, registry, NOW_S).skipped == ()
    assert garbage_collection.verify(store, registry, NOW_S) == garbage_collection.Verdict((), ())
    shutil.rmtree(store.path("plots/general/unigram"))
    assert len(garbage_collection.verify(store, registry, NOW_S).problems) == 1


def test_what_is_published_or_collected_while_a_store_is_checked_is_no_problem(
    store: Store, registry: Registry, base: str, root: DomainVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, registry, base, "first")
    publish(store, registry, base, "second")
    check, calls = garbage_collection._check, 0

    def changing(folder: Path, kind: Kind, *given: Any) -> None:
        nonlocal calls
        calls += kind == "tenant"
        if kind == "tenant" and calls == 1:
            publish(store, registry, base, "new")
            registry.delete_tenant("second", NOW_S)
            garbage_collection.collect(store, registry, NOW_S + 1000)
        check(folder, kind, *given)

    monkeypatch.setattr(garbage_collection, "_check", changing)
    assert garbage_collection.verify(store, registry, NOW_S) == garbage_collection.Verdict((), ())
    assert calls == 2


def test_a_domain_without_a_table_is_whole_and_adopted_and_a_lost_table_is_named(
    store: Store, registry: Registry, base: str
) -> None:
    put_base(store)
    put_domain(store, "domains/b/law/1", base, "plots/general", has_branch=False)
    put_domain(store, "domains/b/tax/1", base, "domains/b/law/1")
    assert garbage_collection.adopt(store, registry, NOW_S).skipped == ()
    assert [(one.name, one.parent) for one in registry.domains()] == [
        ("general", None),
        ("law", "general"),
        ("tax", "law"),
    ]
    assert garbage_collection.verify(store, registry, NOW_S) == garbage_collection.Verdict((), ())
    shutil.rmtree(store.path("domains/b/tax/1/branch"))
    (problem,) = garbage_collection.verify(store, registry, NOW_S).problems
    assert problem.where == "domains/b/tax/1"
    assert problem.what.startswith("MISSING_ARTIFACT: no plot-table in")


def test_a_deleted_domain_without_a_table_is_collected(store: Store, registry: Registry, base: str) -> None:
    put_domain(store, "domains/b/law/1", base, "plots/general", has_branch=False)
    garbage_collection.adopt(store, registry, NOW_S)
    registry.delete_domain("b", "law", NOW_S)
    garbage_collection.collect(store, registry, time.time() + 1000)
    assert not store.path("domains/b").exists()
