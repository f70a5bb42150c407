"""`hplm eval cascade`: all tables from tenants that a store has already."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hplm_builder.cascade.cascade_build import numbered, select_again
from hplm_builder.cascade.outputs import load_outputs
from hplm_builder.cli.evaluate import app
from hplm_builder.data.labelled_files import read_folder
from hplm_builder.evaluation.cascade.cascades import shown_plan
from hplm_builder.evaluation.cascade.exit_heads import exits_of, fit_heads, layer_states
from hplm_builder.evaluation.studies.cascade import goals_of
from hplm_builder.jobs.local_builds import build_tenant
from hplm_builder.tables.plot_tables import build_plot
from hplm_builder.tenants.finetune import TrainSettings
from hplm_builder.tenants.prepared import prepare
from hplm_builder.tenants.tenant_build import load_version
from hplm_builder.tenants.trained_layers import plot_features
from rich.progress import Progress
from typer.testing import CliRunner

from hplm.cascade.selection import CascadeTarget
from hplm.core.settings import WHOLE
from hplm.engine.encode import EncodeEngine, EngineRequest
from hplm.engine.open_domain import open_features
from hplm.errors import ConfigError, DataError
from hplm.models.device import CPU
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests import tiny
from tests.unit.builder.evaluation.evaluated import write_part
from tests.unit.builder.evaluation.test_cascades import PerToken

NAME = "colours-0"
POLICIES = ["single small", "single large", "INFaaS", "Cocktail", "early exit", "cascade"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a store with a tenant over two bases, and the tenant's data."""
    folder = tmp_path_factory.mktemp("cascades")
    store = Store(folder / "store")
    tiny.make_base(store, tiny.config())
    build_plot(store, "tiny", tiny.PLOT, tiny.sentences(50), 30.0, Progress(disable=True))
    tiny.make_base(store, tiny.config(name="whole", form=WHOLE), seed=1)
    for seed, (part, count) in enumerate({"train": 120, "dev": 60, "proof": 80, "test": 60}.items()):
        write_part(folder / "written", part, seed, count)
    data = folder / "data" / NAME
    shutil.copytree(folder / "written" / "colours", data)
    for base, epochs in (("tiny", 1), ("whole", 4)):
        settings = TrainSettings(epochs=epochs, learning_rates=(2e-3,), batch_examples=16)
        build_tenant(store, base, None, NAME, read_folder(data), settings, Progress(disable=True))
    return folder


def run(place: Path, *more: str) -> dict[str, Any]:
    path = place / "report.json"
    data, store, resume = (str(place / name) for name in ("data", "store", "runs"))
    options = ["cascade", "--root", data, "--store", store, "--resume", resume, "--json", str(path), *more]
    done = CliRunner().invoke(app, options, catch_exceptions=False, standalone_mode=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def report(place: Path) -> dict[str, Any]:
    pictures, requests = place / "pictures", place / "requests.jsonl"
    return run(place, "--resamples", "2", "--pictures", str(pictures), "--requests", str(requests))


def with_column(report: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if name in row]


def test_every_policy_is_judged_on_the_same_texts(report: dict[str, Any]) -> None:
    rows = {row["policy"]: row for row in with_column(report, "policy")}
    assert list(rows) == POLICIES
    for row in rows.values():
        assert 0 <= row["accuracy"] <= 100
        assert 0 < row["p50_ms"] <= row["p75_ms"] <= row["p99_ms"]
        assert row["cost"] > 0
    assert rows["Cocktail"]["mean_ms"] >= rows["single large"]["mean_ms"] >= rows["single small"]["mean_ms"]
    assert {goal["id"] for goal in report["goals"]} == {
        "cascade-mean",
        "cascade-accuracy",
        "cascade-p99",
        "cascade-calibration",
        "cascade-promise",
    }


def test_settings_levels_calibration_and_promise_have_their_tables(report: dict[str, Any]) -> None:
    assert len(with_column(report, "cut_off")) >= 10
    assert {row["levels"] for row in with_column(report, "levels")} == {1, 2}
    assert [row["calibrated"] for row in with_column(report, "calibrated")][-1] == "cascade"
    promises = with_column(report, "promised")
    assert [row["target"] == "none" for row in promises] == [True, False]
    assert promises[0]["promised"] == promises[0]["resamples"] == 2
    sizes = report["settings"]["tenants"][NAME]
    assert promises[0]["select"] == sizes["dev"]
    assert promises[0]["prove"] == sizes["proof"]
    assert promises[0]["judge"] == sizes["test"] == 60


def test_pictures_and_requests_are_written(place: Path, report: dict[str, Any]) -> None:
    drawn = {path.name for path in (place / "pictures").iterdir()}
    assert drawn >= {"cascade-policies.svg", "cascade-cut-off.svg", "cascade-reliability.svg"}
    lines = [json.loads(line) for line in (place / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == 60
    assert {(line["task"], line["tenant"]) for line in lines} == {("colours", NAME)}


def test_what_levels_answer_is_computed_once(place: Path, report: dict[str, Any]) -> None:
    kept = {path: path.stat().st_mtime_ns for path in (place / "runs" / NAME).rglob("*.safetensors")}
    kept |= {path: path.stat().st_mtime_ns for path in (place / "runs" / NAME).glob("*.npz")}
    assert len(kept) == 3
    again = run(place, "--resamples", "0")
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    levels = [
        [row for row in with_column(one, "calibrated") if row["calibrated"] != "cascade"] for one in (report, again)
    ]
    assert levels[0] == levels[1]


def test_a_plan_in_force_is_what_is_evaluated(place: Path, report: dict[str, Any]) -> None:
    store = Store(place / "store")
    outputs = load_outputs(place / "runs" / NAME / "dev")
    built = select_again(outputs, CascadeTarget(), {"tiny": PerToken(1.0), "whole": PerToken(2.0)})
    with closing(Registry.open(store)) as registry:
        expected = dict(registry.tenant(NAME).bases)
        number = registry.next_number(NAME)
        plan = numbered(built.plan, {**expected, built.plan.levels[-1].base: number})
        registry.retarget_tenant(NAME, plan, 0.0, about={}, number=number, expected=expected)
    found = run(place, "--resamples", "0")
    assert found["settings"]["tenants"][NAME]["plan"] == f"version {number}"
    (row,) = [row for row in with_column(found, "policy") if row["policy"] == "cascade"]
    assert row["chosen"] == [shown_plan(plan)]


def test_outputs_of_other_data_are_refused(place: Path, report: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(place / "data", tmp_path / "data")
    path = tmp_path / "data" / NAME / "test.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[1:]) + "\n")
    options = ["cascade", "--root", str(tmp_path / "data"), "--store", str(place / "store")]
    with pytest.raises(DataError, match="give --resume another folder"):
        CliRunner().invoke(app, [*options, "--resume", str(place / "runs")], catch_exceptions=False)


def test_a_folder_without_a_seed_in_its_name_is_refused(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "data" / NAME, tmp_path / "colours")
    options = ["cascade", "--data", str(tmp_path / "colours"), "--store", str(place / "store")]
    with pytest.raises(ConfigError, match="TASK-SEED"):
        CliRunner().invoke(app, options, catch_exceptions=False)


def test_the_head_of_the_last_layer_answers_as_served_and_earlier_heads_learn(place: Path) -> None:
    store = Store(place / "store")
    with closing(Registry.open_read_only(store)) as registry:
        current = registry.tenant(NAME, "whole").current
    base = tiny.bases.load(store.base("whole"))
    tenant, data = load_version(store, current, base), read_folder(place / "data" / NAME)
    domain = open_features(store, base, [])
    parts = [prepare(part, data, base.load_text_encoder(), plot_features(domain)) for part in (data.train, data.test)]
    gold = [np.array([int(example.targets[0]) for example in part]) for part in parts]
    train, test = (layer_states(base, tenant, part) for part in parts)
    heads = fit_heads(train, gold[0], train, gold[0], len(data.labels), (tenant.head.weight, tenant.head.bias))
    answers, confidence = exits_of(test, heads)
    assert answers.shape == confidence.shape == (4, len(data.test))
    # A colour is one word, which the first layer sees already.
    assert (answers[0] == gold[1]).mean() > 0.9
    engine = EncodeEngine(
        base.config,
        base.load_upper(),
        num_slots=2,
        reduced_size=tenant.packed.reduced_size,
        device=CPU,
        dtype=torch.float32,
    )
    served = engine.run([EngineRequest(tenant, example.features.numpy()) for example in parts[1]])
    engine.close()
    assert (answers[-1] == [logits[0].argmax() for logits in served]).mean() > 0.98


def test_goals_are_of_the_cascade_against_the_large_level() -> None:
    def policy(name: str, accuracy: float, mean_ms_less: float, p99_ms: float) -> dict[str, Any]:
        return {
            "task": "t",
            "policy": name,
            "accuracy": accuracy,
            "mean_ms_less": mean_ms_less,
            "p99_ms": p99_ms,
        }

    rows = [
        policy("single large", 90.0, 0.0, 40.0),
        policy("cascade", 89.5, 30.0, 50.0),
        {"calibrated": "large", "task": "t", "excess": 0.01},
        {"calibrated": "cascade", "task": "t", "excess": 0.05},
    ]
    values = {goal.id: (goal.value, goal.met) for goal in goals_of(rows)}
    assert values == {
        "cascade-mean": (30.0, True),
        "cascade-accuracy": (0.5, True),
        "cascade-p99": (1.25, True),
        "cascade-calibration": (0.01, True),
    }
