"""Students in a tenant's folder and in a bank: kept exactly, and refused if damaged, by the name of the tenant alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hplm.adapters import bank_file
from hplm.adapters import tenant as tenants
from hplm.adapters.bank_file import BankFile
from hplm.adapters.packed import NAN, from_bfloat16, to_bfloat16
from hplm.adapters.students import check_own_bytes, own_student_bytes
from hplm.adapters.tenant import Tenant
from hplm.errors import ConfigError, CorruptArtifactError
from hplm.models.base import Base
from hplm.store import artifact
from hplm.store.layout import Store
from tests import tiny
from tests.unit.hplm.adapters.place import Place

FORMS = pytest.mark.parametrize("form", ["shared", "own"])


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Publish a tenant's arrays again after a change, with checksums that fit."""
    meta, path = artifact.read(folder, tenants.KIND).meta, folder / "weights.safetensors"
    arrays = load_file(path)
    change(arrays)
    with artifact.publish(folder, tenants.KIND, meta) as partial:
        save_file(arrays, partial / path.name)


def check_same(got: Tenant, wanted: Tenant, rtol: float = 0) -> None:
    assert got.card == wanted.card
    assert got.students is not None
    assert wanted.students is not None
    assert got.students.scores == wanted.students.scores
    np.testing.assert_array_equal(got.students.alphas, wanted.students.alphas)
    for one, other in zip(got.students.packed, wanted.students.packed, strict=True):
        weights = from_bfloat16(one.weights) if one.weights.dtype == np.uint16 else one.weights
        np.testing.assert_allclose(weights, other.weights, rtol=rtol)
    for tensor, before in zip(*(t.students.own.tensors if t.students.own else () for t in (got, wanted)), strict=True):
        np.testing.assert_array_equal(tensor, before)


@FORMS
def test_a_tenant_keeps_its_students_in_its_folder(tmp_path: Path, tiny_base: Base, form: Any) -> None:
    made = tiny.students_of(tiny_base, "acme", 1, 3, form)
    tenants.save(tmp_path / "acme", made)
    got = tenants.load(tmp_path / "acme", fingerprint=tiny_base.fingerprint)
    check_same(got, made)
    assert got.is_finite
    arrays = load_file(tmp_path / "acme" / "weights.safetensors")
    # Scores are no weights.
    assert got.num_bytes == made.num_bytes == sum(array.nbytes for array in arrays.values()) - 3 * 8
    assert len({member.key for member in got.members}) == (3 if form == "shared" else 1)


def test_an_ordinary_card_does_not_speak_of_students(tiny_base: Base) -> None:
    assert not {"students", "student_form"} & tenants.card_meta(tiny.tenant_of(tiny_base, "alpha", 1).card).keys()
    card = tiny.students_of(tiny_base, "acme", 1, 3, "own").card
    assert tenants.parse_card(json.loads(json.dumps(tenants.card_meta(card))), "here") == card


@pytest.mark.parametrize(
    ("form", "change", "error"),
    [
        ("shared", lambda arrays: arrays.pop("students.2.adapter.up"), "students.2.adapter.up"),
        (
            "shared",
            lambda arrays: arrays.update({"students.1.adapter.up_bias": np.zeros((2, 5), np.float32)}),
            "student 1",
        ),
        ("shared", lambda arrays: arrays.update({"students.alphas": np.ones(2, np.float32)}), "alphas"),
        ("own", lambda arrays: arrays.update({"students.alphas": np.full(3, 0.5, np.float32)}), "alphas"),
        ("own", lambda arrays: arrays.update({"students.scores": np.ones(4)}), "scores"),
        ("own", lambda arrays: arrays.pop("own.qkv.weight"), "own.qkv.weight"),
        (
            "own",
            lambda arrays: arrays.update({"own.ffn_in.weight": arrays["own.ffn_in.weight"][:2]}),
            "own.ffn_in.weight",
        ),
        ("own", lambda arrays: arrays.update({"own.ffn_norm.bias": np.zeros((3, 2, 48), np.float32)}), "ffn_norm.bias"),
    ],
)
def test_students_that_do_not_fit_are_refused_with_the_folder_of_the_tenant_and_version(
    tmp_path: Path, tiny_base: Base, form: Any, change: Callable[[dict[str, Any]], Any], error: str
) -> None:
    folder = tmp_path / "tenants" / "acme" / "7"
    tenants.save(folder, tiny.students_of(tiny_base, "acme", 1, 3, form))
    rewrite(folder, change)
    with pytest.raises(CorruptArtifactError, match=f"acme/7: .*{error}"):
        tenants.load(folder, name="acme", fingerprint=tiny_base.fingerprint)


@FORMS
def test_students_that_hold_nan_or_a_damaged_file_are_refused_alone(
    place: Place, store: Store, tiny_base: Base, form: Any
) -> None:
    made = tiny.students_of(tiny_base, "acme", 1, 3, form)
    assert made.students is not None
    if made.students.own is None:
        made.students.packed[2].weights.flat[-1] = np.nan
    else:
        made.students.own.tensors[-1].flat[-1] = NAN
    tiny.publish(store, tiny_base, tiny.PLOT, made)
    with pytest.raises(CorruptArtifactError, match="acme/1: the weights of acme hold NaN or infinity"):
        place.load("acme")
    tiny.publish(store, tiny_base, tiny.PLOT, tiny.students_of(tiny_base, "acme", 2, 3, form))
    tiny.flip_last_byte(tiny.folder_of(store, "acme") / "weights.safetensors")
    with pytest.raises(CorruptArtifactError, match=r"acme/2/weights.safetensors does not match the checksum"):
        place.load("acme")
    assert place.load("alpha").is_finite


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"students": 0}, "0 students"),
        ({"student_form": "mixed"}, "mixed"),
        ({"task": "tagging"}, "students of a tagging"),
    ],
)
def test_a_card_whose_students_no_engine_can_run_is_refused(
    tiny_base: Base, changed: dict[str, Any], error: str
) -> None:
    meta = tenants.card_meta(tiny.students_of(tiny_base, "acme", 1, 3).card)
    with pytest.raises(CorruptArtifactError, match=f"here: .*{error}"):
        tenants.parse_card(meta | changed, "here")


def test_tenants_of_one_bank_may_have_different_numbers_of_students(tmp_path: Path, tiny_base: Base) -> None:
    made = [
        tiny.tenant_of(tiny_base, "alpha", 1),
        tiny.students_of(tiny_base, "three", 2, 3),
        tiny.students_of(tiny_base, "two", 3, 2, like="beta"),
        tiny.tenant_of(tiny_base, "gamma", 4),
    ]
    bank_file.write(tmp_path / "bank", tiny_base.fingerprint, made)
    bank = BankFile(tmp_path / "bank", tiny_base.fingerprint)
    for tenant in made[1:3]:
        check_same(bank.load(tenant.card.name), tenant, rtol=2**-8)
    for tenant in (made[0], made[3]):
        got = bank.load(tenant.card.name)
        assert got.students is None
        np.testing.assert_array_equal(got.packed.weights, to_bfloat16(tenant.packed.weights))


def test_in_a_bank_a_damaged_student_is_refused_alone(tmp_path: Path, tiny_base: Base) -> None:
    made = [tiny.tenant_of(tiny_base, "alpha", 1), tiny.students_of(tiny_base, "acme", 2, 3)]
    bank_file.write(tmp_path / "bank", tiny_base.fingerprint, made)
    # The last byte of the file is of the last student.
    tiny.flip_last_byte(tmp_path / "bank" / "adapters.bin")
    bank = BankFile(tmp_path / "bank", tiny_base.fingerprint)
    with pytest.raises(CorruptArtifactError, match="bank: the weights of acme do not match their checksum"):
        bank.load("acme")
    assert bank.load("alpha").is_finite


def test_students_with_own_layers_want_a_folder_of_their_own_and_at_most_8_mb(tmp_path: Path, tiny_base: Base) -> None:
    with pytest.raises(ConfigError, match="acme has students with own layers: publish it in a folder of its own"):
        bank_file.write(tmp_path / "bank", "", [tiny.students_of(tiny_base, "acme", 1, 2, "own")])
    # Two layers of MiniLM fit, a layer of BERT-base does not.
    check_own_bytes(2, 384, 1536)
    with pytest.raises(ConfigError, match=r"14.2 MB, at most 8 MB are allowed: choose the form shared"):
        check_own_bytes(1, 768, 3072)
    own = tiny.students_of(tiny_base, "acme", 1, 2, "own").students
    config = tiny_base.config
    assert own is not None
    assert own.num_bytes == own.alphas.nbytes + 2 * own_student_bytes(
        config.upper_layers, config.hidden_size, config.intermediate_size
    )


def test_students_in_another_format_are_the_same_tenant(tiny_base: Base) -> None:
    made = tiny.students_of(tiny_base, "acme", 1, 3)
    changed = made.with_adapters([replace(packed, weights=to_bfloat16(packed.weights)) for packed in made.adapters])
    assert changed.packed is changed.adapters[0]
    assert [member.key for member in changed.members] == [member.key for member in made.members]
    own = tiny.students_of(tiny_base, "acme", 1, 3, "own")
    assert own.with_adapters(own.adapters) is own
