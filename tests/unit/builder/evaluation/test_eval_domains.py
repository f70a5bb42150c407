"""`hplm eval domains`: domains are built once, root and branch have the same search, O1 and O2 train the right half."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hplm_builder.cli.evaluate import app
from hplm_builder.data.corpus_file import read_corpus
from hplm_builder.data.labelled_files import read_folder
from hplm_builder.domains.domain_build import DomainSettings
from hplm_builder.evaluation.search.eval_task import EvalTask, read_tasks
from hplm_builder.evaluation.search.run_store import BusyError, RunStore
from hplm_builder.evaluation.search.served_domain import ServedDomain, computed_features
from hplm_builder.evaluation.studies.domain_builder import DomainBuilder
from hplm_builder.evaluation.studies.domains import HALVES, with_gains
from hplm_builder.evaluation.studies.task_corpora import source_by_task, without_test_texts, write_corpus
from hplm_builder.tenants.bodies import ConvertedModel, fastest_format
from typer.testing import CliRunner

from hplm.engine.lower_layers import load_lower
from hplm.errors import ConfigError, DataError
from hplm.models.base import Base
from hplm.models.device import computing_in
from hplm.reporting.progress import silent
from tests import tiny
from tests.unit.builder.evaluation import evaluated
from tests.unit.builder.evaluation.evaluated import Place, report_of, reports_of_two, trained

SETTINGS = DomainSettings(total_tokens=2048, warmup_tokens=512, batch_tokens=128, min_corpus_tokens=0)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = evaluated.make_place(tmp_path_factory.mktemp("domains"))
    (place.folder / "corpus.txt").write_text("\n".join(tiny.sentences(200, seed=5)))
    return place


@pytest.fixture(scope="module")
def task(bench: Place) -> EvalTask:
    return EvalTask("colours", read_folder(bench.root / "colours"))


def builder_of(
    place: Place, folder: Path, sources: dict[str, str], settings: DomainSettings = SETTINGS
) -> DomainBuilder:
    return DomainBuilder(ServedDomain(place.store, place.base, tiny.PLOT), settings, sources, RunStore(folder), CPU)


def halves_of(base: Base) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return load_lower(base).state_dict(), base.load_upper().state_dict()


def changed(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in old if not torch.equal(old[name], new[name])}


def test_each_task_is_scored_over_the_root_and_over_its_own_domain(bench: Place, tmp_path: Path) -> None:
    report = report_of(bench, "domains", "--resume", str(tmp_path), "--tokens", "2000")
    rows = {(row["task"], row["variant"]): row for row in report["rows"]}
    assert set(rows) == {(task, name) for task in ("colours", "places", "average") for name in ("root", "branch")}
    for task in ("colours", "places", "average"):
        gain = 100 * (rows[task, "branch"]["test"] - rows[task, "root"]["test"])
        assert rows[task, "branch"]["points_over_root"] == pytest.approx(gain)
    rates = report["settings"]["learning_rates"]
    assert rates["root"] == rates["branch"]
    for name in ("colours", "places"):
        about = report["settings"]["domains"][name]
        assert about["from"] == "own"
        assert about["corpus"]["tokens"] > 0
        assert about["masked_lm"]["after"]["loss"] > 0
        assert about["branch_bytes"] > 0


def test_a_domain_is_built_once_and_stays(bench: Place, tmp_path: Path) -> None:
    arguments = ["--resume", str(tmp_path), "--tokens", "2000"]
    first = report_of(bench, "domains", *arguments)
    built = {path: path.stat().st_mtime_ns for path in tmp_path.glob("domains/*/1/branch/manifest.json")}
    assert len(built) == 2
    for path in trained(tmp_path):
        (tmp_path / path).unlink()
    second = report_of(bench, "domains", *arguments)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("domains/*/1/branch/manifest.json")} == built
    assert [row["test"] for row in first["rows"]] == [row["test"] for row in second["rows"]]
    assert not list(tmp_path.glob("domains/*/corpus.jsonl"))


def test_an_error_says_that_a_domain_was_removed_while_its_runs_remain(bench: Place, tmp_path: Path) -> None:
    arguments = [*bench.options("domains"), "--resume", str(tmp_path), "--tokens", "2000"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    shutil.rmtree(tmp_path / "domains")
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, DataError)
    assert "give --resume another folder" in str(done.exception)


def test_the_observations_train_every_half(bench: Place) -> None:
    corpus = str(bench.folder / "corpus.txt")
    report = report_of(bench, "domains", "--observations", "--corpus", corpus, "--tokens", "2000")
    found = {name: one["parameters"] for name, one in report["settings"]["trained"]["colours"].items()}
    assert list(found) == [
        "root", "branch", "pretrained-lower", "pretrained-higher", "pretrained-all",
        "tuned-higher", "tuned-lower", "tuned-all",
    ]  # fmt: skip
    assert len({found[name] for name in list(found)[:5]}) == 1  # adapters and a head
    head = 3 * (bench.base.config.hidden_size + 1)
    assert found["tuned-all"] - head == found["tuned-higher"] + found["tuned-lower"] - 2 * head


@pytest.mark.parametrize(
    ("halves", "moved"),
    [(("lower",), (True, False)), (("higher",), (False, True)), (("lower", "higher"), (True, True))],
)
def test_further_pretraining_changes_only_the_chosen_halves(
    bench: Place, task: EvalTask, tmp_path: Path, halves: Any, moved: tuple[bool, bool]
) -> None:
    builder = builder_of(bench, tmp_path, {"colours": str(bench.folder / "corpus.txt")})
    found = builder.pretrained(task, halves, silent)
    for old, new, is_moved in zip(halves_of(bench.base), halves_of(found), moved, strict=True):
        names = changed(old, new)
        assert bool(names) == is_moved
        assert "word_embeddings.weight" not in names
    assert builder.pretrained(task, halves, silent).fingerprint == found.fingerprint


def test_another_text_or_setting_gives_another_domain(bench: Place, task: EvalTask, tmp_path: Path) -> None:
    corpus = bench.folder / "corpus.txt"
    other = tmp_path / "corpus.txt"
    other.write_text(corpus.read_text() + "\none more line")
    settings = DomainSettings(total_tokens=4096, warmup_tokens=512, min_corpus_tokens=0)
    names = {
        builder_of(bench, tmp_path, {"colours": str(corpus)}).name(task),
        builder_of(bench, tmp_path, {"colours": str(other)}).name(task),
        builder_of(bench, tmp_path, {"colours": "own"}).name(task),
        builder_of(bench, tmp_path, {"colours": str(corpus)}, settings).name(task),
    }
    assert len(names) == 4
    # The same corpus without another task's test texts.
    elsewhere = replace(task, name="elsewhere", data=replace(task.data, test=task.data.test[:5]))
    names.add(builder_of(bench, tmp_path, {"elsewhere": str(corpus)}).name(elsewhere))
    assert len(names) == 5


def test_a_tasks_own_corpus_is_its_train_text_alone(task: EvalTask, tmp_path: Path) -> None:
    lines = write_corpus(tmp_path / "corpus.jsonl", task, "own").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == [example.text for example in task.data.train]


@pytest.mark.parametrize("between", [" ", "\n"], ids=["line", "paragraph"])
def test_long_documents_of_a_corpus_are_split_so_that_a_domain_accepts_them(
    task: EvalTask, tmp_path: Path, between: str
) -> None:
    # The line is short enough in UTF-8, but escaped to ASCII it would be three times as long.
    text = between.join(f"слово{number}" for number in range(45_000)) + "\n\nof another document\n"
    (tmp_path / "corpus.txt").write_text(text)
    written = write_corpus(tmp_path / "corpus.jsonl", task, str(tmp_path / "corpus.txt"))
    assert "".join("".join(read_corpus(written)).split()) == "".join(text.split())


def test_corpora_go_to_tasks_in_order_or_to_all(bench: Place) -> None:
    tasks = read_tasks([], bench.root)
    corpus = str(bench.folder / "corpus.txt")
    assert source_by_task(tasks, []) == {"colours": "own", "places": "own"}
    assert source_by_task(tasks, [corpus]) == {"colours": corpus, "places": corpus}
    assert source_by_task(tasks, ["own", corpus]) == {"colours": "own", "places": corpus}
    with pytest.raises(ConfigError, match="3 --corpus for 2 tasks"):
        source_by_task(tasks, ["own"] * 3)
    with pytest.raises(DataError, match="'nowhere' is neither a corpus file"):
        source_by_task(tasks, ["nowhere"])


def test_both_halves_over_token_ids_are_the_upper_layers_over_features(bench: Place) -> None:
    encoded = bench.base.load_text_encoder().encode(tiny.sentences(5, seed=3))
    lengths = [len(one.ids) for one in encoded]
    lower, upper = load_lower(bench.base), bench.base.load_upper()
    features = torch.cat(computed_features(lower)(encoded)).float()
    body = ConvertedModel(lower, upper, ("lower", "higher"))
    ids = torch.from_numpy(np.concatenate([one.ids for one in encoded]))
    with torch.no_grad(), computing_in(*fastest_format()):
        found, wanted = body(ids, lengths).float(), upper(features, lengths).float()
    torch.testing.assert_close(found, wanted, atol=0.1, rtol=0.1)


def test_a_domain_that_another_process_is_building_raises_busy_error(
    bench: Place, task: EvalTask, tmp_path: Path
) -> None:
    builder = builder_of(bench, tmp_path, {"colours": "own"})
    with RunStore(tmp_path).claim(f"domains/{builder.name(task)}"), pytest.raises(BusyError):
        builder.lineage(task, silent)
    assert builder.lineage(task, silent)


@pytest.mark.timeout(900)
def test_processes_that_share_a_folder_share_the_domains(bench: Place, tmp_path: Path) -> None:
    options = [*bench.options("domains"), "--resume", str(tmp_path / "runs"), "--tokens", "8000"]
    (first, second), _ = reports_of_two([sys.executable, "-m", "hplm_cli", "eval", *options], tmp_path)
    assert first["rows"] == second["rows"]
    assert first["settings"]["domains"] == second["settings"]["domains"]
    assert len(list((tmp_path / "runs" / "domains").glob("*/about.json"))) == 2


def test_gains_are_in_points_over_the_root() -> None:
    rows = [{"task": "t", "variant": "root", "test": 0.7}, {"task": "t", "variant": "branch", "test": 0.72}]
    root, branch = with_gains(rows)
    assert "points_over_root" not in root
    assert branch["points_over_root"] == pytest.approx(2.0)


def test_a_dry_run_builds_nothing(bench: Place, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*bench.options("domains"), "--resume", str(tmp_path), "--dry-run"])
    assert done.exit_code == 0
    assert "minutes of further pretraining" in done.stderr
    assert "minutes are left" in done.stderr
    assert not list(tmp_path.rglob("*.json"))


def test_an_estimate_counts_each_missing_model(bench: Place, task: EvalTask, tmp_path: Path) -> None:
    builder = builder_of(bench, tmp_path, {"colours": "own"})
    also = [HALVES["higher"], HALVES["all"]]
    builder.lineage(task, silent)
    assert not builder.estimate_s(task, [], silent)
    assert builder.estimate_s(task, also, silent) > 0
    for halves in also:
        builder.pretrained(task, halves, silent)
    assert not builder.estimate_s(task, also, silent)


def test_documents_that_hold_test_texts_are_left_out(bench: Place) -> None:
    task = next(iter(read_tasks((), bench.folder / "tasks")))
    test = replace(task.data.test[0], text="It's one two three four five six seven, eight nine!")
    seen = replace(task, data=replace(task.data, test=[test]))
    documents = [
        "x y ONE two three - four five six seven eight z",  # eight of its words in a row
        "it s one two three four five six",
        "one two three four five six seven",  # only seven
        "one two three four and five six seven eight nine",
        "",
    ]
    assert without_test_texts(documents, [seen]) == documents[2:]
