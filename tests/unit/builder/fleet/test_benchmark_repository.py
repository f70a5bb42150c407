"""Synthetic fleets: the given number of different tenants, the same for the same seed, loadable one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hplm_builder.fleet.benchmark_repository import BANK, make_benchmark_repository, make_fleet, make_pool_plot
from hplm_loadtest.benchmarks.served_repository import read_repository
from rich.progress import Progress

from hplm.adapters.bank_file import BankFile
from hplm.engine import reference
from hplm.engine.lower_layers import load_lower
from hplm.engine.open_domain import open_lookup
from hplm.errors import ConfigError
from hplm.models.base import Base
from hplm.store.layout import Store
from tests import tiny

QUIET = Progress(disable=True)


@pytest.fixture
def base(tmp_path: Path) -> Base:
    return tiny.make_base(Store(tmp_path), tiny.config())


def open_fleet(folder: Path, base: Base, count: int, seed: int = 0) -> BankFile:
    store = Store(folder)
    assert make_fleet(store, base, BANK, count, seed, QUIET) == count
    return BankFile(store.bank(BANK), base.fingerprint)


def test_no_two_tenants_are_equal_and_labels_are_2_to_20(tmp_path: Path, base: Base) -> None:
    bank = open_fleet(tmp_path, base, 200)
    members = [bank.load(name) for name in bank.names]
    assert bank.names[0] == "tenant-00000"
    assert len({member.packed.weights.tobytes() for member in members}) == 200
    assert len({member.version for member in members}) == 200
    assert {len(member.card.labels) for member in members} == set(range(2, 21))


def test_one_seed_gives_one_fleet_and_another_seed_another(tmp_path: Path, base: Base) -> None:
    first, again, other = (open_fleet(tmp_path / str(i), base, 5, seed) for i, seed in enumerate((1, 1, 2)))
    for name in first.names:
        assert first.load(name).version == again.load(name).version
        assert first.load(name).version != other.load(name).version


def test_a_fleet_has_adapters_of_the_given_width(tmp_path: Path, base: Base) -> None:
    store = Store(tmp_path)
    make_fleet(store, base, BANK, 2, 0, QUIET, reduction_factor=4)
    bank = BankFile(store.bank(BANK), base.fingerprint)
    assert {bank.load(name).packed.reduced_size for name in bank.names} == {base.config.hidden_size // 4}


def test_tenants_of_a_fleet_have_numbers_of_students_in_turn_and_students_differ(tmp_path: Path, base: Base) -> None:
    store = Store(tmp_path)
    make_fleet(store, base, BANK, 2, 0, QUIET, students=(2, 3))
    bank = BankFile(store.bank(BANK), base.fingerprint)
    adapters = [packed for name in bank.names for packed in bank.load(name).adapters]
    assert len({packed.weights.tobytes() for packed in adapters}) == len(adapters) == 5


def test_swapping_two_tenants_changes_the_hidden_states(tmp_path: Path, base: Base) -> None:
    bank = open_fleet(tmp_path, base, 2)
    hidden = reference.merged([2, 10, 11, 12, 3], base.config, [], load_lower(base))
    first, second = (reference.upper(base.load_upper(), hidden, bank.load(name)) for name in bank.names)
    assert float((first - second).abs().max()) > 0.01


def test_an_empty_fleet_is_refused(tmp_path: Path, base: Base) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        make_fleet(Store(tmp_path), base, BANK, 0, 0, QUIET)


def test_texts_of_the_pool_always_hit_and_other_texts_are_computed(tmp_path: Path, base: Base) -> None:
    store = Store(tmp_path)
    pool = tiny.sentences(20)
    make_pool_plot(store, base, pool, QUIET)
    lookup = open_lookup(store, base, "pool")
    for text, computed in ((pool[3], 0), ("zebra xylophone", 1)):
        encoded = base.load_text_encoder().encode([text])[0]
        lookup.hidden_states(encoded.ids, [len(encoded.ids)])
        assert (lookup.windows_by_level["computed"] > 0) == bool(computed)
    with pytest.raises(ConfigError, match="no unigrams to back off to"):
        open_lookup(store, base, "pool", miss="backoff")


def test_a_whole_fleet_has_no_tables_and_is_served_by_a_whole_base(tmp_path: Path) -> None:
    def build(**changed: bool) -> Path:
        return make_benchmark_repository(
            tmp_path, "minilm", "ngram-encoder", None, 3, 0, QUIET, None, "mean", 16, **changed
        )

    models = build(is_whole=True)
    served = read_repository(models)
    assert (served.base.config.upper_layers, served.base.config.adapted_layers) == (6, 3)
    assert [len(tenant.packed.weights) for tenant in served.load_tenants(3)] == [3] * 3
    assert not (tmp_path / "store" / "plots").exists()
    assert '"IDS"' in (models / "hbert_upper" / "config.pbtxt").read_text()
    assert len((tmp_path / "texts.txt").read_text().splitlines()) == 400
    before = (tmp_path / "store" / "banks").stat().st_mtime_ns
    build(is_whole=True)
    assert (tmp_path / "store" / "banks").stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match="choose another folder"):
        build()
