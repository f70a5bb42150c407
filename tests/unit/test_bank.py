"""The tiers of tenants: files and bank files on disk, the host cache, and updates while requests come."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm import errors
from hplm.adapters import bank_file, packed
from hplm.adapters.bank import TenantBank
from hplm.adapters.bank_file import BankFile
from hplm.adapters.host_cache import HostCache
from hplm.adapters.packed import Adapter
from hplm.adapters.tenant import Tenant
from hplm.nn.base import Base
from hplm.store import caretaker
from hplm.store.catalog import REMEMBER_S, Catalog
from hplm.store.layout import Store
from hplm.store.records import ServedTenant
from hplm.store.registry import Registry
from tests import tiny
from tests.waiting import until


@pytest.fixture
def store(tmp_path: Path, tiny_base: Base) -> Store:
    made = Store(tmp_path)
    for seed, name in enumerate(tiny.TASKS, 1):
        tiny.make_tenant(made, tiny_base, name, seed)
    return made


@dataclass(frozen=True)
class Place:
    """A bank over a catalog that looks when it is told to, and what it forgot once it was started."""

    catalog: Catalog
    bank: TenantBank
    forgotten: list[ServedTenant]

    def load(self, name: str) -> Tenant:
        self.catalog.refresh()
        return self.bank.load(self.bank.resolve(name.encode()))


@pytest.fixture
def place(store: Store, tiny_base: Base) -> Iterator[Place]:
    forgotten: list[ServedTenant] = []
    with closing(Catalog(store, "tiny", on_forgotten=forgotten.extend)) as catalog:
        yield Place(catalog, TenantBank(store, catalog, tiny_base.fingerprint), forgotten)


def pack_all(store: Store, base: Base) -> Path:
    """All tenants of the store in a bank file, their folders gone."""
    members = [tiny.load_tenant(store, base, name) for name in sorted(tiny.TASKS)]
    folder = tiny.make_bank(store, base, members)
    shutil.rmtree(store.root / "tenants")
    return folder


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_bfloat16_bits_round_to_nearest_and_come_back_exactly(values: list[float]) -> None:
    import torch

    array = np.array(values, np.float32)
    bits = packed.to_bfloat16(array)
    wanted = torch.from_numpy(array).to(torch.bfloat16)
    np.testing.assert_array_equal(packed.from_bfloat16(bits), wanted.float().numpy())


def test_an_adapter_packs_and_unpacks_and_widens_without_change(tiny_base: Base, store: Store) -> None:
    adapter = tiny.load_tenant(store, tiny_base, "alpha").adapter
    again = packed.unpack(packed.pack(adapter))
    for name, array in vars(adapter).items():
        np.testing.assert_array_equal(array, getattr(again, name))
    wide = packed.unpack(packed.widen(packed.pack(adapter), 7))
    np.testing.assert_array_equal(wide.down[:, :3], adapter.down)
    assert not wide.down[:, 3:].any()
    with pytest.raises(errors.ConfigError, match="lower reduction_factor"):
        packed.widen(packed.pack(adapter), 2)


def test_a_bank_file_gives_each_tenant_its_weights_back_to_the_rounding(tiny_base: Base, store: Store) -> None:
    before = {name: tiny.load_tenant(store, tiny_base, name) for name in sorted(tiny.TASKS)}
    bank = BankFile(pack_all(store, tiny_base), tiny_base.fingerprint)
    assert bank.names == list(before)
    for name, tenant in before.items():
        got = bank.load(name)
        assert got.card == tenant.card
        np.testing.assert_array_equal(got.head.weight, tenant.head.weight)
        np.testing.assert_allclose(got.adapter.down, tenant.adapter.down, rtol=2**-8)


@pytest.mark.parametrize("name", ["adapters.bin", "heads.bin", "cards.jsonl"])
def test_a_flipped_byte_in_a_bank_file_is_found_and_harms_only_its_tenant(
    tiny_base: Base, store: Store, name: str
) -> None:
    path = pack_all(store, tiny_base) / name
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    if name == "cards.jsonl":
        with pytest.raises(errors.CorruptArtifactError):
            BankFile(path.parent, tiny_base.fingerprint)
        return
    bank = BankFile(path.parent, tiny_base.fingerprint)
    with pytest.raises(errors.CorruptArtifactError, match="alpha do not match"):
        bank.load("alpha")
    assert bank.load("beta").card.name == "beta"


def test_a_bank_file_cut_short_or_of_another_base_is_refused(tiny_base: Base, store: Store) -> None:
    folder = pack_all(store, tiny_base)
    with pytest.raises(errors.WrongBaseError):
        BankFile(folder, "0123456789abcdef")
    path = folder / "adapters.bin"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(errors.CorruptArtifactError, match="not a whole bank"):
        BankFile(folder, tiny_base.fingerprint)


def test_a_bank_takes_no_name_twice_and_no_other_base(tiny_base: Base, store: Store, tmp_path: Path) -> None:
    alpha = tiny.load_tenant(store, tiny_base, "alpha")
    for members, base in (([alpha, alpha], tiny_base.fingerprint), ([alpha], "another"), ([], tiny_base.fingerprint)):
        with pytest.raises(errors.ConfigError):
            bank_file.write(tmp_path / "bank", base, members)
        assert not (tmp_path / "bank").exists()


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
        caretaker.collect(store, registry, time.time() + 1e6, grace_s=0.0)
        now[0] = 3 * REMEMBER_S
        catalog.refresh()
        with pytest.raises(errors.UnknownVersionError):
            catalog.find("alpha", first.version_id)


def test_what_can_no_longer_be_found_is_told_once_and_again_where_nobody_took_it(
    store: Store, tiny_base: Base, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hplm.store.catalog.REMEMBER_S", 0.3)
    told: list[list[str]] = []

    def forget(versions: Sequence[ServedTenant]) -> None:
        told.append([f"{one.name} {one.number}" for one in versions])
        if len(told) == 1:
            raise OSError("not now")

    with closing(Catalog(store, "tiny", on_forgotten=forget)) as catalog, closing(Registry.open(store)) as registry:
        catalog.start()
        tiny.make_tenant(store, tiny_base, "alpha", 5)
        tiny.make_tenant(store, tiny_base, "beta", 5)
        until(lambda: catalog.find("beta").number == 2)
        registry.rollback_tenant("beta", None, time.time())
        until(lambda: catalog.find("beta").number == 1)
        until(lambda: sorted(name for names in told[1:] for name in names) == ["alpha 1", "beta 2"])
    assert "the next look tries again" in caplog.text


def test_tenants_of_another_base_are_unknown_here(store: Store, tiny_base: Base) -> None:
    with closing(Registry.open(store)) as registry:
        registry.publish_base("other", "f" * 16, "bases/other", 1.0)
        root = registry.publish_domain("other", "general", "plots/other", 1.0, parent_id=None, about={})
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
        until(lambda: any("goes on being served" in r.message for r in caplog.records))
        failures = catalog.failures
        until(lambda: catalog.failures > failures)
        assert catalog.find("alpha").name == "alpha"
        # Said once, however often it is so.
        assert len([r for r in caplog.records if "goes on being served" in r.message]) == 1


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
        general = registry.publish_domain(root.name, "general", "plots/general", 1.0, parent_id=None, about={})
        other = registry.publish_domain("tiny", "law", "domains/tiny/law/1", 1.0, parent_id=general.id, about={})
        # In another order than before, so that every id is somebody else's.
        for name in sorted(tiny.TASKS, reverse=True):
            over = other if name == "beta" else general
            registry.publish_tenant(name, over.id, f"tenants/{name}/1", 1.0, about={}, number=1, expected=None)
    assert {name: place.load(name).version for name in tiny.TASKS} == before
    assert place.bank.resolve(b"beta").lineage == ("domains/tiny/law/1", "plots/general")
    assert place.bank.resolve(b"alpha").lineage == ("plots/general",)
    place.catalog.start()
    until(lambda: set(place.forgotten) == known - set(place.catalog.served()))


def test_a_tenant_that_moves_to_another_base_is_unknown_here_from_then_on(store: Store, place: Place) -> None:
    with closing(Registry.open(store)) as registry:
        registry.publish_base("other", "f" * 16, "bases/other", 1.0)
        root = registry.publish_domain("other", "general", "plots/other", 1.0, parent_id=None, about={})
        registry.publish_tenants(root.id, "banks/other", ["alpha"], 1.0)
    place.catalog.refresh()
    with pytest.raises(errors.UnknownTenantError):
        place.bank.resolve(b"alpha")


def test_a_folder_published_after_the_bank_file_goes_before_it_and_rolls_back_to_it(
    tiny_base: Base, store: Store, place: Place
) -> None:
    pack_all(store, tiny_base)
    banked = place.load("alpha")
    tiny.make_tenant(store, tiny_base, "alpha", seed=99)
    assert place.load("alpha").version != banked.version
    with closing(Registry.open(store)) as registry:
        registry.rollback_tenant("alpha", None, 1.0)
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
        assert caretaker.collect(store, registry, time.time() + 1000).retired == ("banks/fleet",)
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


def test_one_cold_key_loads_once_for_all_who_ask_and_keys_do_not_wait_for_each_other() -> None:
    started, go = threading.Event(), threading.Event()
    loads: list[str] = []

    def load(key: str) -> str:
        loads.append(key)
        if key == "slow":
            started.set()
            go.wait()
        return key.upper()

    cache = HostCache(load, len, capacity_bytes=100, num_threads=2)
    waiting = [cache.fetch("slow") for _ in range(10)]
    started.wait()
    assert cache.fetch("quick").result(timeout=5) == "QUICK"
    go.set()
    assert {future.result(timeout=5) for future in waiting} == {"SLOW"}
    assert sorted(loads) == ["quick", "slow"]
    cache.close()


def test_the_cache_keeps_to_its_bytes_and_forgets_the_least_recently_used() -> None:
    loads: list[str] = []

    def load(key: str) -> str:
        loads.append(key)
        return key * 10

    cache = HostCache(load, len, capacity_bytes=30, num_threads=1)
    for key in ("a", "b", "c", "a", "d", "a", "b"):
        assert cache.fetch(key).result() == key * 10
        assert cache.kept_bytes <= 30
    assert loads == ["a", "b", "c", "d", "b"]
    cache.close()


def test_the_cache_lets_go_of_what_is_not_wanted_any_more() -> None:
    cache = HostCache(str.upper, len, capacity_bytes=30)
    for key in ("a", "bb", "ccc"):
        cache.fetch(key).result()
    cache.drop(["a", "ccc", "d"])
    assert (cache.get("a"), cache.get("bb"), cache.get("ccc")) == (None, "BB", None)
    assert cache.kept_bytes == 2
    cache.close()


def test_a_failed_load_is_tried_again_by_the_next_request() -> None:
    answers = iter([errors.CorruptArtifactError("broken"), "mended"])

    def load(key: str) -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    cache = HostCache(load, len, capacity_bytes=100)
    with pytest.raises(errors.CorruptArtifactError):
        cache.fetch("a").result()
    assert cache.fetch("a").result() == "mended"
    cache.close()


def test_many_threads_see_one_consistent_cache() -> None:
    cache = HostCache(lambda key: str(key) * 5, len, capacity_bytes=40, num_threads=4)
    with ThreadPoolExecutor(8) as pool:
        rng = np.random.default_rng(0)
        keys = [int(k) for k in rng.integers(0, 20, 2000)]
        for key, value in zip(keys, pool.map(lambda k: cache.fetch(k).result(), keys), strict=True):
            assert value == str(key) * 5
    assert cache.kept_bytes <= 40
    cache.close()


def test_an_adapter_of_a_bank_is_kept_in_half_the_bytes(tiny_base: Base, store: Store) -> None:
    bank = BankFile(pack_all(store, tiny_base), tiny_base.fingerprint)
    assert bank.load("alpha").packed.weights.dtype == np.uint16
    assert isinstance(bank.load("alpha").adapter, Adapter)
