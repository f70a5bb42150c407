"""Which tenants and versions there are, while they are added, replaced and deleted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np
import pytest

from hplm import errors
from hplm.housekeeping import garbage_collection
from hplm.models.base import Base
from hplm.registry.catalog import REMEMBER_S, Catalog
from hplm.registry.records import ServedTenant
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests import tiny
from tests.unit.hplm.adapters.place import Place, pack_all
from tests.waiting import until


def test_tenants_added_replaced_and_deleted_show_at_the_next_look(tiny_base: Base, store: Store, place: Place) -> None:
    first, key = place.load("alpha"), place.bank.resolve(b"alpha")
    tiny.make_tenant(store, tiny_base, "alpha", seed=99)
    assert place.bank.resolve(b"alpha") == key
    second = place.load("alpha")
    assert second.version != first.version
    tiny.delete_tenant(store, "alpha")
    place.catalog.refresh()
    with pytest.raises(errors.UnknownTenantError):
        place.bank.resolve(b"alpha")
    tiny.make_tenant(store, tiny_base, "alpha", seed=7)
    assert place.load("alpha").card.name == "alpha"


def test_another_least_number_of_students_shows_at_the_next_look_and_loads_nothing_again(
    store: Store, place: Place
) -> None:
    before = place.bank.resolve(b"alpha")
    with closing(Registry.open(store)) as registry:
        registry.set_least_students("alpha", 2)
    place.catalog.refresh()
    after = place.bank.resolve(b"alpha")
    # The host cache finds a tenant by an equal version.
    assert (before.least_students, after.least_students, after == before) == (1, 2, True)
    assert hash(after) == hash(before)


def test_a_request_under_way_gets_the_version_it_started_with_after_an_update_and_after_a_deletion(
    tiny_base: Base, store: Store, place: Place
) -> None:
    first = place.bank.resolve(b"alpha")
    loaded = place.bank.load(first)
    tiny.make_tenant(store, tiny_base, "alpha", seed=99)
    place.catalog.refresh()
    assert place.bank.resolve(b"alpha", first.version_id) == first
    tiny.delete_tenant(store, "alpha")
    place.catalog.refresh()
    assert place.bank.load(place.bank.resolve(b"alpha", first.version_id)).version == loaded.version


def test_a_version_that_only_the_other_stage_has_seen_is_looked_for_at_once(
    tiny_base: Base, store: Store, place: Place
) -> None:
    with closing(Catalog(store, "tiny")) as other:
        tiny.make_tenant(store, tiny_base, "alpha", seed=99)
        other.refresh()
        newer = other.find("alpha")
    assert place.bank.resolve(b"alpha") != newer
    assert place.bank.resolve(b"alpha", newer.version_id) == newer


def test_a_version_of_another_tenant_or_of_nobody_is_unknown(store: Store, place: Place) -> None:
    beta = place.bank.resolve(b"beta")
    for version_id in (beta.version_id, 10**9, 0, -1):
        with pytest.raises(errors.UnknownVersionError, match="no such version of tenant 'alpha'"):
            place.bank.resolve(b"alpha", version_id)


def test_a_version_is_found_until_its_files_are_collected(tiny_base: Base, store: Store) -> None:
    now = [0.0]
    with closing(Catalog(store, "tiny", clock=lambda: now[0])) as catalog, closing(Registry.open(store)) as registry:
        first = catalog.find("alpha")
        tiny.delete_tenant(store, "alpha")
        # Longer than it is remembered: now the registry is asked.
        now[0] = REMEMBER_S + 1
        for _ in range(2):
            catalog.refresh()
        assert catalog.find("alpha", first.version_id) == first
        garbage_collection.collect(store, registry, time.time() + 1e6, grace_s=0.0)
        now[0] = 3 * REMEMBER_S
        catalog.refresh()
        with pytest.raises(errors.UnknownVersionError):
            catalog.find("alpha", first.version_id)


def test_what_can_no_longer_be_found_is_told_once_and_again_where_nobody_took_it(
    store: Store, tiny_base: Base, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    told: list[list[str]] = []

    def forget(versions: Sequence[ServedTenant]) -> None:
        told.append([f"{one.name} {one.number}" for one in versions])
        if len(told) == 1:
            raise OSError("not now")

    with (
        closing(Catalog(store, "tiny", on_forgotten=forget, clock=lambda: now[0])) as catalog,
        closing(Registry.open(store)) as registry,
    ):
        catalog.start()
        tiny.make_tenant(store, tiny_base, "alpha", 5)
        tiny.make_tenant(store, tiny_base, "beta", 5)
        until(lambda: catalog.find("beta").number == 2)
        registry.rollback_tenant("beta", None, time.time())
        until(lambda: catalog.find("beta").number == 1)
        now[0] = REMEMBER_S + 1
        until(lambda: sorted(name for names in told[1:] for name in names) == ["alpha 1", "beta 2"])
    assert "the next poll tries again" in caplog.text


def test_tenants_of_another_base_are_unknown_here(store: Store, tiny_base: Base) -> None:
    with closing(Registry.open(store)) as registry:
        registry.publish_base("other", "f" * 16, "bases/other", 1.0)
        root = registry.publish_domain("other", "general", "plots/other", 1.0, parent_id=None, about={}, expected=None)
        registry.publish_tenants(root.id, "banks/other", ["stranger"], 1.0)
    with closing(Catalog(store, "tiny")) as catalog, closing(Catalog(store, "other")) as other:
        assert len(catalog) == len(tiny.TASKS)
        with pytest.raises(errors.UnknownTenantError):
            catalog.find("stranger")
        assert other.find("stranger").path == "banks/other"


def test_a_catalog_goes_on_with_what_it_knows_when_the_registry_is_lost(
    store: Store, tiny_base: Base, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Catalog(store, "tiny")) as catalog:
        catalog.start()
        for path in store.root.glob("registry.sqlite*"):
            path.unlink()
        (store.root / "registry.sqlite").write_bytes(b"not a database at all" * 100)
        until(lambda: any("stay served" in r.message for r in caplog.records))
        failures = catalog.failures
        until(lambda: catalog.failures > failures)
        assert catalog.find("alpha").name == "alpha"
        # Said once, however often it is so.
        assert len([r for r in caplog.records if "stay served" in r.message]) == 1


def test_a_registry_that_is_lost_and_adopted_while_serving_never_leaves_anybody_unknown_or_crossed(
    tiny_base: Base, store: Store, place: Place
) -> None:
    before = {name: place.load(name).version for name in tiny.TASKS}
    known = set(place.catalog.served())
    for path in store.root.glob("registry.sqlite*"):
        path.unlink()
    Registry.open(store, create=True).close()
    # Between making the new registry and naming what there is.
    with pytest.raises(errors.RegistryUnavailableError, match="hplm store adopt"):
        place.catalog.refresh()
    assert place.bank.resolve(b"alpha").name == "alpha"
    with closing(Registry.open(store)) as registry:
        root = registry.publish_base("tiny", tiny_base.fingerprint, "bases/tiny", 1.0)
        general = registry.publish_domain(
            root.name, "general", "plots/general", 1.0, parent_id=None, about={}, expected=None
        )
        other = registry.publish_domain(
            "tiny", "law", "domains/tiny/law/1", 1.0, parent_id=general.id, about={}, expected=None
        )
        # In another order than before, so that every id is somebody else's.
        for name in sorted(tiny.TASKS, reverse=True):
            over = other if name == "beta" else general
            registry.publish_tenant(name, over.id, f"tenants/{name}/1", 1.0, about={}, number=1, expected=None)
    assert {name: place.load(name).version for name in tiny.TASKS} == before
    assert place.bank.resolve(b"beta").lineage == ("domains/tiny/law/1", "plots/general")
    assert place.bank.resolve(b"alpha").lineage == ("plots/general",)
    place.catalog.start()
    until(lambda: set(place.forgotten) == known - set(place.catalog.served()))


def publish_over_other(registry: Registry, *names: str) -> None:
    """Publish tenants over a second base."""
    registry.publish_base("other", "f" * 16, "bases/other", 1.0)
    root = registry.publish_domain("other", "general", "plots/other", 1.0, parent_id=None, about={}, expected=None)
    registry.publish_tenants(root.id, "banks/other", names, 1.0)


def test_a_tenant_that_is_published_over_another_base_stays_the_same_here(store: Store, place: Place) -> None:
    before = place.bank.resolve(b"alpha")
    with closing(Registry.open(store)) as registry, closing(Catalog(store, "other")) as other:
        publish_over_other(registry, "alpha")
        for catalog in (place.catalog, other):
            catalog.refresh()
        assert place.bank.resolve(b"alpha") == before
        assert (other.find("alpha").path, other.find("alpha").is_default) == ("banks/other", False)
        # A version belongs to its base.
        with pytest.raises(errors.UnknownVersionError):
            other.find("alpha", before.version_id)


def test_a_tenant_that_leaves_a_base_is_unknown_there_and_stays_known_over_the_other(
    store: Store, place: Place
) -> None:
    with closing(Registry.open(store)) as registry, closing(Catalog(store, "other")) as other:
        publish_over_other(registry, "alpha")
        other.refresh()
        registry.delete_tenant("alpha", time.time(), base="tiny")
        for catalog in (place.catalog, other):
            catalog.refresh()
        with pytest.raises(errors.UnknownTenantError):
            place.bank.resolve(b"alpha")
        assert other.find("alpha").is_default


def test_a_catalog_of_all_bases_has_each_tenant_over_its_default_base(store: Store, tiny_base: Base) -> None:
    with closing(Registry.open(store)) as registry, closing(Catalog(store, None)) as catalog:
        publish_over_other(registry, "alpha", "stranger")
        catalog.refresh()
        assert {name: catalog.find(name).base for name in ("alpha", "beta", "stranger")} == {
            "alpha": "tiny",
            "beta": "tiny",
            "stranger": "other",
        }
        first = catalog.find("alpha")
        registry.delete_tenant("alpha", time.time(), base="tiny")
        registry.delete_tenant("stranger", time.time())
        catalog.refresh()
        assert catalog.find("alpha").base == "other"
        assert catalog.find("alpha", first.version_id) == first
        with pytest.raises(errors.UnknownTenantError):
            catalog.find("stranger")


def test_a_folder_published_after_the_bank_file_goes_before_it_and_rolls_back_to_it(
    tiny_base: Base, store: Store, place: Place
) -> None:
    pack_all(store, tiny_base)
    banked = place.load("alpha")
    tiny.make_tenant(store, tiny_base, "alpha", seed=99)
    assert place.load("alpha").version != banked.version
    with closing(Registry.open(store)) as registry:
        registry.rollback_tenant("alpha", None, time.time())
    assert place.load("alpha").version == banked.version


def test_a_bank_in_anothers_place_leaves_that_to_requests_under_way_and_deletes_whom_it_lacks(
    tiny_base: Base, store: Store, place: Place
) -> None:
    first = tiny.make_fleet(store, tiny_base, 3)
    place.catalog.refresh()
    under_way = place.bank.resolve(b"t0")
    second = tiny.make_fleet(store, tiny_base, 2, seed=1)
    np.testing.assert_array_equal(place.load("t0").packed.weights, second[0].packed.weights)
    np.testing.assert_array_equal(place.bank.load(under_way).packed.weights, first[0].packed.weights)
    with pytest.raises(errors.UnknownTenantError):
        place.load("t2")
    with closing(Registry.open(store)) as registry:
        removed = garbage_collection.collect(store, registry, time.time() + 1000).removed
        assert [(one.where, one.what) for one in removed] == [("banks/fleet", "retired")]
    assert [folder.name for folder in store.banks()] == ["fleet-2"]


def test_a_tenant_replaced_again_and_again_is_read_whole_every_time(
    tiny_base: Base, store: Store, place: Place
) -> None:
    wanted = {tiny.tenant_of(tiny_base, "alpha", seed).adapter.up.sum() for seed in (1, 2)}
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            for seed in (1, 2):
                tiny.make_tenant(store, tiny_base, "alpha", seed)

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        for _ in range(200):
            assert place.load("alpha").adapter.up.sum() in wanted
    finally:
        stop.set()
        writer.join()


def test_a_tenant_that_is_not_known_while_the_registry_cannot_be_read_is_not_said_to_be_unknown(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Catalog(store, "tiny")) as catalog:
        with pytest.raises(errors.UnknownTenantError):
            catalog.find("late")
        with monkeypatch.context() as patched:
            patched.setattr(catalog._registry, "generation", lambda: 1 / 0)
            catalog.start()
            until(lambda: catalog.failures > 0)
            with pytest.raises(errors.RegistryUnavailableError):
                catalog.find("late")
            assert catalog.find("alpha").name == "alpha"
        until(lambda: raised(lambda: catalog.find("late")) is errors.UnknownTenantError)


def test_a_look_that_hangs_counts_as_one_that_failed_and_is_not_waited_for(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hplm.runtime.polling.BLIND_AFTER_S", 0.5)
    entered, over = threading.Event(), threading.Event()

    def hang() -> int:
        entered.set()
        over.wait(60)
        raise OSError("too late")

    with closing(Catalog(store, "tiny")) as catalog:
        monkeypatch.setattr(catalog._registry, "generation", hang)
        catalog.start()
        assert entered.wait(10)
        until(lambda: raised(lambda: catalog.find("late")) is errors.RegistryUnavailableError)
        assert catalog.failures == 1
        assert "a poll hangs" in caplog.text
        begun_s = time.monotonic()
        catalog.close()
        assert time.monotonic() - begun_s < 10
        over.set()
        catalog._poller._thread.join(10)
        assert catalog.failures == 1


def raised(ask: Callable[[], object]) -> type[BaseException] | None:
    try:
        ask()
    except errors.HplmError as error:
        return type(error)
    return None
