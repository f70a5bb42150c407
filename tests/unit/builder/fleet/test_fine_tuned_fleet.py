"""Fine-tuned fleets: tenants in proportion to the sizes of their tasks, each with its own sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from hplm_builder.fleet.benchmark_repository import ABOUT, check_same_fleet
from hplm_builder.fleet.fine_tuned_fleet import FineTunedFleet, fine_tune_fleet, proportional_counts
from hplm_builder.tenants.finetune import TrainSettings
from hypothesis import given
from hypothesis import strategies as st

from hplm.adapters.bank_file import BankFile
from hplm.engine.open_domain import open_lookup
from hplm.errors import ConfigError, CorruptArtifactError, DataError, TenantNameError
from hplm.models.base import Base
from hplm.reporting.progress import silent
from hplm.store.layout import Store
from hplm.tasks.tagging import WORD_WINDOW

FAST = TrainSettings(epochs=1, learning_rates=(1e-2,))


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=8), st.integers(0, 10_000))
def test_tenants_are_divided_in_proportion_and_every_task_has_one(sizes: list[int], more: int) -> None:
    count = len(sizes) + more
    tenants = proportional_counts(sizes, count)
    assert sum(tenants) == count
    assert min(tenants) >= 1
    shares = np.array(sizes) * count / sum(sizes)
    # A task whose share is below one tenant gets one. Larger tasks give up that many tenants.
    assert all(found <= max(1, share + 1) for found, share in zip(tenants, shares, strict=True))
    assert all(found > share - 1 - len(sizes) for found, share in zip(tenants, shares, strict=True))


def test_ten_thousand_tenants_are_divided_by_the_papers_sizes() -> None:
    # ChemProt, NCBI-disease, SciERC, SCI-Cite (Table 1).
    assert proportional_counts([4_169, 5_424, 1_861, 7_320], 10_000) == [2_221, 2_889, 991, 3_899]


def test_fewer_tenants_than_tasks_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 tenants for 2 tasks"):
        proportional_counts([10, 10], 1)


def write_task(folder: Path, count: int) -> Path:
    folder.mkdir()
    for part, size in (("train", count), ("dev", 10), ("test", 10)):
        rows = ({"text": f"the {'red' if i % 2 else 'blue'} cat", "label": f"{i % 2}"} for i in range(size))
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_fleet_has_fine_tuned_tenants_of_every_task_each_on_its_own_sample(
    tmp_path: Path, tiny_store: Store, tiny_base: Base
) -> None:
    folders = [write_task(tmp_path / "Large", 90), write_task(tmp_path / "small", 30)]
    fleet = FineTunedFleet.read(folders, 4, 40, FAST)
    assert [(task.name, task.tenants, task.samples) for task in fleet.tasks] == [("large", 3, 40), ("small", 1, 30)]
    stores = [Store(tmp_path / name) for name in ("first", "again")]
    for store in stores:
        # The sums differ by rounding, because windows are computed in another order.
        lookup = open_lookup(tiny_store, tiny_base, "general")
        assert fine_tune_fleet(store, tiny_base, lookup, "fleet", fleet, silent) == 4
    first, again = (BankFile(store.bank("fleet"), tiny_base.fingerprint) for store in stores)
    assert first.names == ["large-00000", "large-00001", "large-00002", "small-00000"]
    assert len({first.load(name).packed.weights.tobytes() for name in first.names}) == 4
    for name in first.names:
        assert first.load(name).version == again.load(name).version
        assert first.card(name).about["examples"]["train"] == (40 if name.startswith("large") else 30)
        assert 0 <= first.card(name).about["scores"]["test_accuracy"] <= 1
    assert json.loads(json.dumps(fleet.about)) == fleet.about


def test_a_fleet_of_taggings_with_an_older_word_window_is_another_fleet(tmp_path: Path) -> None:
    places = [{"text": "in Paris", "entities": [{"label": "PLACE", "start": 3, "end": 8}]}] * 20
    (tmp_path / "places").mkdir()
    for part in ("train", "dev"):
        (tmp_path / "places" / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in places))
    fleet = FineTunedFleet.read([write_task(tmp_path / "colours", 20), tmp_path / "places"], 4, 0, FAST)
    assert [task.get("word_window") for task in fleet.about["tasks"]] == [None, WORD_WINDOW]


def test_a_folder_with_a_fleet_of_other_data_is_refused_and_not_kept(tmp_path: Path) -> None:
    task, folder = write_task(tmp_path / "colours", 20), tmp_path / "fleet"

    def about() -> dict[str, Any]:
        return {"shape": "minilm", **FineTunedFleet.read([task], 4, 0, FAST).about}

    check_same_fleet(folder, about())
    check_same_fleet(folder, about())
    (task / "train.jsonl").write_text((task / "train.jsonl").read_text().replace("red cat", "red dog"))
    with pytest.raises(ConfigError, match=r"data_sha256.* choose another folder"):
        check_same_fleet(folder, about())


def test_an_interrupted_marking_of_a_fleet_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        full.setattr(Path, "rename", MagicMock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            check_same_fleet(tmp_path / "fleet", {"shape": "minilm", "seed": 0})
    assert not (tmp_path / "fleet" / ABOUT).exists()
    check_same_fleet(tmp_path / "fleet", {"shape": "minilm", "seed": 1})
    with pytest.raises(ConfigError, match="choose another folder"):
        check_same_fleet(tmp_path / "fleet", {"shape": "minilm", "seed": 0})


@pytest.mark.parametrize(
    "damaged", [b"", b'{"shape": "mini', b"\xff\xfe", b"\0" * 40], ids=["empty", "cut", "no-text", "nothing"]
)
def test_a_fleet_with_a_damaged_mark_is_named_and_kept(tmp_path: Path, damaged: bytes) -> None:
    mark = tmp_path / ABOUT
    mark.write_bytes(damaged)
    with pytest.raises(CorruptArtifactError, match=rf"{ABOUT} is damaged .*: remove the folder .* or choose another"):
        check_same_fleet(tmp_path, {"shape": "minilm", "seed": 0})
    assert mark.read_bytes() == damaged


def test_a_fleet_without_a_checksum_of_its_data_is_kept_unchanged(tmp_path: Path) -> None:
    about = FineTunedFleet.read([write_task(tmp_path / "colours", 20)], 4, 0, FAST).about
    before = json.loads(json.dumps(about))
    del before["tasks"][0]["data_sha256"]
    check_same_fleet(tmp_path / "fleet", before)
    check_same_fleet(tmp_path / "fleet", about)
    assert json.loads((tmp_path / "fleet" / ABOUT).read_text()) == before
    with pytest.raises(ConfigError, match="choose another folder"):
        check_same_fleet(tmp_path / "fleet", {**about, "seed": 1})


def test_a_task_whose_name_is_no_tenant_name_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / ("a" * 60)).mkdir()
    for name in ("a" * 60, "two words"):
        with pytest.raises(TenantNameError, match=f"{name}: tenants cannot be named after this folder"):
            FineTunedFleet.read([tmp_path / name], 4, 0, FAST)


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    folders = [write_task(tmp_path / "a", 20), write_task(tmp_path / "other" / "a", 20)]
    with pytest.raises(DataError, match="same name"):
        FineTunedFleet.read(folders, 4, 0, FAST)
