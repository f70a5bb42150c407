"""Small seeded trainings, one a task, give the same numbers as when their goldens were recorded.

A change that means to change what training gives records them anew: run this file as a program.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hplm_builder.data.labelled import LabelledData
from hplm_builder.tables.plot_tables import build_plot
from hplm_builder.tenants.finetune import TrainSettings
from hplm_builder.tenants.tenant_build import train_tenant
from rich.progress import Progress

from hplm.engine.open_domain import open_lineage
from hplm.models import device
from hplm.store.layout import Store
from tests import tiny
from tests.tasks import colour_data, count_data, place_data

GOLDENS = Path(__file__).with_name("goldens.json")
DATA: dict[str, LabelledData] = {
    "classification": colour_data(),
    "regression": count_data(),
    "tagging": place_data(),
}
SETTINGS = TrainSettings(epochs=3, learning_rates=(1e-2,), batch_examples=64, seed=1)


def numbers_of(task: str, folder: Path) -> dict[str, Any]:
    """Return scores, losses and sums over the trained weights of one task, from a base made anew."""
    store = Store(folder / "store")
    base = tiny.make_base(store, tiny.config(form="windows"))
    build_plot(store, "tiny", tiny.PLOT, tiny.sentences(50), 30.0, Progress(disable=True), dtype="float32")
    lookup = open_lineage(store, base, ["plots/general"], dtype=torch.float32)
    made = train_tenant(base, lookup, task, DATA[task], SETTINGS)
    weights = {**vars(made.adapter), **made.head.arrays}
    about = made.card.about
    return {
        "scores": about["scores"],
        "best_epoch": about["best_epoch"],
        "curve": [[row["loss"], row["dev"]] for row in about["curve"]],
        "weights": {name: sums_of(array) for name, array in weights.items()},
    }


def sums_of(array: npt.NDArray[np.float32]) -> list[float]:
    """Return mean, standard deviation and a weighted mean, which sees values that change places."""
    values = array.astype(np.float64).ravel()
    return [float(values.mean()), float(values.std()), float(values @ np.cos(np.arange(len(values)))) / len(values)]


@pytest.mark.parametrize("task", DATA)
def test_a_seeded_training_gives_the_recorded_numbers(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else what training gives depends on the processor.
    monkeypatch.setattr(device, "bfloat16_is_fast", lambda: False)
    golden = json.loads(GOLDENS.read_text())[task]
    numbers = numbers_of(task, tmp_path)
    assert numbers["best_epoch"] == golden["best_epoch"]
    assert numbers["scores"] == pytest.approx(golden["scores"], abs=1e-6)
    assert numbers["weights"].keys() == golden["weights"].keys()
    for name, sums in golden["weights"].items():
        assert numbers["weights"][name] == pytest.approx(sums, rel=1e-6, abs=1e-6), name
    for row, expected in zip(numbers["curve"], golden["curve"], strict=True):
        assert row == pytest.approx(expected, rel=1e-4)  # the curve keeps five digits


if __name__ == "__main__":
    device.bfloat16_is_fast = lambda: False
    with tempfile.TemporaryDirectory() as folder:
        GOLDENS.write_text(json.dumps({task: numbers_of(task, Path(folder, task)) for task in DATA}, indent=1) + "\n")
