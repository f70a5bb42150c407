"""Many tenants in one file: packed, checked and loaded."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm import errors
from hplm.adapters import bank_file, packed
from hplm.adapters.bank_file import BankFile
from hplm.adapters.packed import Adapter
from hplm.models.base import Base
from hplm.store.layout import Store
from tests import tiny
from tests.open_files import open_files
from tests.unit.hplm.adapters.place import pack_all


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_bfloat16_bits_round_to_nearest_and_come_back_exactly(values: list[float]) -> None:
    import torch

    array = np.array(values, np.float32)
    bits = packed.to_bfloat16(array)
    wanted = torch.from_numpy(array).to(torch.bfloat16)
    np.testing.assert_array_equal(packed.from_bfloat16(bits), wanted.float().numpy())


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF])
def test_no_nan_becomes_a_number_by_rounding(bits: int) -> None:
    rounded = packed.to_bfloat16(np.array([1.0, np.uint32(bits).view(np.float32)], np.float32))
    assert np.isnan(packed.from_bfloat16(rounded)).tolist() == [False, True]
    assert not packed.all_finite(rounded)


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
        assert set(got.head.arrays) == set(tenant.head.arrays)
        for part, array in tenant.head.arrays.items():
            np.testing.assert_array_equal(getattr(got.head, part), array)
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


@pytest.mark.parametrize("name", ["adapters.bin", "heads.bin"])
def test_a_bank_file_damaged_or_cut_short_after_it_was_opened_refuses_what_it_lacks_and_gives_it_again_when_repaired(
    tiny_base: Base, store: Store, name: str
) -> None:
    path = pack_all(store, tiny_base) / name
    bank = BankFile(path.parent, tiny_base.fingerprint)
    whole, last = path.read_bytes(), bank.names[-1]
    kept = bank.load(last)
    weights, head = kept.packed.weights.copy(), kept.head.weight.copy()
    for damaged in (whole[:-2], whole[:10], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        os.truncate(path, len(damaged))
        with path.open("r+b") as file:
            file.write(damaged)
        with pytest.raises(errors.CorruptArtifactError, match=f"{last} do not match"):
            bank.load(last)
        if len(damaged) > len(whole) - 3:
            assert bank.load(bank.names[0]).card.name == bank.names[0]
        # Tenants that were loaded before do not refer to the file.
        np.testing.assert_array_equal(kept.packed.weights, weights)
        np.testing.assert_array_equal(kept.head.weight, head)
    with path.open("r+b") as file:
        file.write(whole)
    np.testing.assert_array_equal(bank.load(last).packed.weights, weights)


@pytest.mark.parametrize("name", ["heads.bin", "cards.jsonl"])
def test_a_bank_file_that_cannot_be_opened_leaves_no_file_open(tiny_base: Base, store: Store, name: str) -> None:
    path = pack_all(store, tiny_base) / name
    path.write_bytes(path.read_bytes()[:-1])
    kept = []
    for _ in range(5):
        with pytest.raises(errors.CorruptArtifactError) as found:
            BankFile(path.parent, tiny_base.fingerprint)
        kept.append(found)
    assert not [one for one in open_files() if path.parent in one.parents]


def test_a_bank_takes_no_name_twice_and_no_other_base(tiny_base: Base, store: Store, tmp_path: Path) -> None:
    alpha = tiny.load_tenant(store, tiny_base, "alpha")
    for members, base in (([alpha, alpha], tiny_base.fingerprint), ([alpha], "another"), ([], tiny_base.fingerprint)):
        with pytest.raises(errors.ConfigError):
            bank_file.write(tmp_path / "bank", base, members)
        assert not (tmp_path / "bank").exists()


def test_an_adapter_of_a_bank_is_kept_in_half_the_bytes(tiny_base: Base, store: Store) -> None:
    bank = BankFile(pack_all(store, tiny_base), tiny_base.fingerprint)
    assert bank.load("alpha").packed.weights.dtype == np.uint16
    assert isinstance(bank.load("alpha").adapter, Adapter)
