"""A task of a third party, in one file, is trained and served like those of hplm."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from hplm_builder.data.labelled_files import read_data
from hplm_builder.tenants.finetune import TrainSettings
from hplm_builder.tenants.tenant_build import train_tenant
from hplm_client import Client

from hplm.engine.open_domain import open_lineage
from hplm.tasks.task_loader import task_named, task_names
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from tests import tiny
from tests.managed import expected_logits
from tests.plugins.install import install

pytestmark = [pytest.mark.triton, pytest.mark.timeout(300)]
SOURCE = Path(__file__).with_name("topics.py")
PARTS = {"train": 220, "dev": 40, "test": 40}
SETTINGS = TrainSettings(epochs=30, learning_rates=(1e-2,), batch_examples=64, dropout=0.0, patience=30)


def rows_in(path: Path, count: int, seed: int) -> Path:
    """Write texts whose topics are the colours and animals that they name."""
    rng = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for _ in range(count):
            words = rng.choice(["the", "red", "blue", "cat", "runs", "over"], 5)
            rows.writerow([" ".join(words), "|".join(sorted({"red", "blue", "cat"} & {*words})) or "none"])
    return path


def test_a_third_partys_task_is_trained_and_its_answers_are_its_own_decode_of_the_reference_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "environment"
    site_packages = install(folder, "topics", SOURCE.read_text(), "[hplm.tasks]\ntopics = topics:Topics\n", monkeypatch)
    monkeypatch.syspath_prepend(site_packages)
    assert task_names() == ["classification", "regression", "tagging", "topics"]
    models = tiny.make_repository(tmp_path)
    store, base = tiny.opened(tmp_path)
    parts = [rows_in(tmp_path / f"{name}.csv", count, seed) for seed, (name, count) in enumerate(PARTS.items())]
    data = read_data(*parts, task="topics")
    lookup = open_lineage(store, base, ["plots/general"], dtype=torch.float32)
    made = train_tenant(base, lookup, "mixed", data, SETTINGS)
    assert (made.card.task, made.card.labels) == ("topics", ("blue", "cat", "red"))
    assert made.card.about["scores"]["test_micro_f1"] > 0.9
    tiny.publish(store, base, tiny.PLOT, made)
    task, encoder = task_named("topics"), base.load_text_encoder()
    with TritonServer(models, free_ports(), log=tmp_path / "log") as server:
        server.wait_ready()
        with Client(server.ports.grpc_url) as client:
            for example in data.test[:20]:
                answer = client.predict("mixed", example.text, logits=True)
                logits = expected_logits(store, base, "mixed", example.text)
                np.testing.assert_allclose(answer.logits, logits, atol=0.05, rtol=0.02)
                spans, _ = task.decode(logits, made.card.labels, encoder.encode([example.text])[0].tokens)
                assert [(one.label, one.start, one.end) for one in answer.spans] == [
                    (one.label, one.start, one.end) for one in spans
                ]
