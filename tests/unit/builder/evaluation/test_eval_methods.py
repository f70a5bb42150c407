"""`hplm eval methods`: every method gets the same search, no work is lost or done twice, goals follow from rows."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hplm_builder.cli.evaluate import app
from hplm_builder.convert.whole import make_whole_base
from hplm_builder.data.labelled import LabelledData
from hplm_builder.data.labelled_files import read_folder
from hplm_builder.evaluation.search.budget import BUDGETS, Budget
from hplm_builder.evaluation.search.eval_task import EvalTask, read_tasks
from hplm_builder.evaluation.search.finished_runs import BestRun
from hplm_builder.evaluation.search.original_model import OriginalModel
from hplm_builder.evaluation.search.run_store import RunKey, RunResult, RunStore
from hplm_builder.evaluation.search.search_loop import FeatureCache
from hplm_builder.evaluation.search.served_domain import ServedDomain
from hplm_builder.evaluation.search.study import RATES, Study
from hplm_builder.evaluation.studies.methods import METHODS, choose_widths, goals_of, method_variants
from hplm_builder.tenants.bodies import CPU, fastest_format
from hplm_builder.tenants.dev_scores import DevScore
from typer.testing import CliRunner

from hplm.errors import ConfigError, DataError, HplmError
from hplm.models.device import computing_in
from hplm.reporting.progress import silent
from hplm.tasks.examples import LabelledText
from tests import tiny
from tests.unit.builder.evaluation import evaluated
from tests.unit.builder.evaluation.evaluated import Place, report_of, reports_of_two, trained

BIN = Path(sys.executable).parent
KEY = RunKey("task", "hbert", 0, 0.001)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return evaluated.make_place(tmp_path_factory.mktemp("methods"))


@pytest.fixture(scope="module")
def task(bench: Place) -> EvalTask:
    return EvalTask("colours", read_folder(bench.root / "colours"))


def with_original(place: Place) -> list[str]:
    return ["--original", str(place.original)]


def test_a_report_has_every_method_on_every_task_and_the_goals(bench: Place) -> None:
    report = report_of(bench, "methods", *with_original(bench), "--seed", "0", "--seed", "1")
    rows = {(row["task"], row["method"]): row for row in report["rows"]}
    assert set(rows) == {(task, method) for task in ("colours", "places", "average") for method in METHODS}
    for row in rows.values():
        assert 0 <= row["test"] <= 1
        assert len(row["test_by_seed"]) == 2
        assert row["test"] == pytest.approx(np.mean(row["test_by_seed"]), abs=1e-4)
        assert row["spread"] == pytest.approx(np.std(row["test_by_seed"], ddof=1), abs=2e-4)
    assert {goal["id"] for goal in report["goals"]} == {"gap-to-dedicated", "worst-against-adapter"}
    assert report["settings"]["budget"]["name"] == "quick"
    assert report["settings"]["examples"]["colours"] == {"train": 48, "dev": 24, "test": 24}


def test_on_demand_adapters_are_placed_as_in_the_paper(bench: Place, task: EvalTask) -> None:
    methods = ("adapter", "adapter-attention", "hbert", "hbert-attention")
    asked = [option for method in methods for option in ("--method", method)]
    report = report_of(bench, "methods", *with_original(bench), *asked)
    trained = report["settings"]["trained"]["places"]
    assert len({one["parameters"] for one in trained.values()}) == 1
    original = OriginalModel(bench.base, bench.original)
    variants = method_variants(original, ServedDomain(bench.store, bench.base, "general"), CPU)
    places = {one.name: one.body(task)().at for one in variants if one.name in methods}
    assert places == {name: "attention" if name.endswith("-attention") else "input" for name in methods}


def test_on_demand_adapters_are_four_times_as_wide(bench: Place, tmp_path: Path) -> None:
    methods = ("adapter", "adapter-wide", "hbert", "hbert-wide")
    asked = [option for method in methods for option in ("--method", method)]
    report = report_of(bench, "methods", *with_original(bench), *asked, "--resume", str(tmp_path))
    trained = {name: one["parameters"] for name, one in report["settings"]["trained"]["colours"].items()}
    hidden, layers = bench.base.config.hidden_size, bench.base.config.upper_layers
    more = layers * (2 * hidden + 1) * (hidden // 4 - hidden // 16)
    assert trained == dict.fromkeys(("adapter", "hbert"), trained["hbert"]) | dict.fromkeys(
        ("adapter-wide", "hbert-wide"), trained["hbert"] + more
    )
    for method in methods:
        found = [json.loads(path.read_text())["about"] for path in tmp_path.glob(f"*/{method}/*.json")]
        assert {about.get("reduction_factor") for about in found} == {4 if method.endswith("-wide") else None}


def test_the_automatic_width_is_the_one_that_a_tenants_job_keeps_and_costs_no_runs(
    bench: Place, tmp_path: Path
) -> None:
    asked = ["--method", "hbert-auto", "--seed", "0", "--seed", "1", "--resume", str(tmp_path)]
    report = report_of(bench, "methods", *with_original(bench), *asked)
    rows = {(row["task"], row["method"]): row for row in report["rows"]}
    assert {method for _, method in rows} == {"hbert", "hbert-wide", "hbert-auto"}
    assert {path.parent.name for path in tmp_path.glob("*/*/*.json")} == {"hbert", "hbert-wide"}
    for task in ("colours", "places"):
        narrow, wide, auto = (rows[task, method]["test_by_seed"] for method in ("hbert", "hbert-wide", "hbert-auto"))
        assert all(kept in of_seed for kept, *of_seed in zip(auto, narrow, wide, strict=True))
        assert 0 <= rows[task, "hbert-auto"]["wide_seeds"] <= 2
    assert "wide_seeds" not in rows["average", "hbert-auto"]


def run_of(right: int, *, without: bool = True) -> BestRun:
    """A seed's run that is right on the first of 100 dev examples."""
    dev = DevScore.of(lambda numbers: float(np.mean([i < right for i in numbers])), 100)
    run = RunResult(dev=dev.value, test=dev.value, dev_without=list(dev.without) if without else [])
    return BestRun(0, 1e-3, run, at_end=False)


def test_the_automatic_width_of_a_seed_follows_the_rule_of_the_job(task: EvalTask) -> None:
    tagging = EvalTask("tags", replace(task.data, task="tagging"))
    close, far = run_of(81), run_of(90)
    diverged = replace(close, run=None)
    base = run_of(80)
    for usual_first, kind in ((True, task), (False, tagging)):
        for other, kept in ((close, base), (far, far), (diverged, base)):
            narrow, wide = (base, other) if usual_first else (other, base)
            assert choose_widths(kind, [narrow], [wide]) == [kept]
    assert choose_widths(task, [diverged], [base]) == [base]
    with pytest.raises(ConfigError, match="colours: the finished runs of seed 0 are from before"):
        choose_widths(task, [run_of(80, without=False)], [base])


def test_the_wide_taught_method_is_wide_and_uses_pseudo_labels(bench: Place, task: EvalTask) -> None:
    original = OriginalModel(bench.base, bench.original)
    found = {one.name: one for one in method_variants(original, ServedDomain(bench.store, bench.base, "general"), CPU)}
    assert {name for name, one in found.items() if one.with_pseudo_labels} == {"hbert-taught", "hbert-wide-taught"}
    wide, both = (found[name] for name in ("hbert-wide", "hbert-wide-taught"))
    assert both.about(task) == wide.about(task) != found["hbert"].about(task)
    assert [p.shape for p in both.body(task)().parameters()] == [p.shape for p in wide.body(task)().parameters()]


def test_on_demand_hbert_learns_from_unlabelled_texts_too(bench: Place, task: EvalTask, tmp_path: Path) -> None:
    asked = ["--method", "dedicated", "--method", "hbert", "--method", "hbert-taught", "--resume", str(tmp_path)]
    report = report_of(bench, "methods", *with_original(bench), *asked)
    assert {row["method"] for row in report["rows"]} == {"dedicated", "hbert", "hbert-taught"}
    # The goals of hbert-taught have names of their own.
    assert {goal["id"] for goal in report["goals"]} == {"gap-to-dedicated", "gap-to-dedicated-taught"}
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*/hbert-taught/*.json"))]
    assert all("all upper layers at 0.0003" in one["about"]["unlabelled"] for one in found)
    alone = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*/hbert/*.json"))]
    assert len(found) == len(alone) == 4
    assert [one["run"]["scores"] for one in found] != [one["run"]["scores"] for one in alone]
    quick = BUDGETS["quick"]
    data = task.sample(quick, 0, unlabelled=True)
    labelled = {one.text for part in data.labelled.values() for one in part}
    assert 0 < len(data.unlabelled) <= len(data.train)
    assert not labelled & {one.text for one in data.unlabelled}
    assert all(one.label is None and not one.entities for one in data.unlabelled)
    assert data.unlabelled == task.sample(quick, 0, unlabelled=True).unlabelled
    with pytest.raises(DataError, match="colours: the budget takes all train examples"):
        task.sample(BUDGETS["full"], 0, unlabelled=True)


def test_features_of_unlabelled_texts_are_computed_after_a_run_without_them(bench: Place, task: EvalTask) -> None:
    original = OriginalModel(bench.base, bench.original)
    variants = {
        one.name: one for one in method_variants(original, ServedDomain(bench.store, bench.base, "general"), CPU)
    }
    kept, quick = FeatureCache(), BUDGETS["quick"]
    found = {}
    for name in ("hbert", "hbert-taught"):
        data = task.sample(quick, 0, unlabelled=variants[name].with_pseudo_labels)
        found[name] = kept.parts(task, variants[name], data, 0, silent)
    assert [one.source for one in found["hbert-taught"]["unlabelled"]] == data.unlabelled
    assert len(data.unlabelled) > 0
    # Features of the shared texts are computed once.
    assert found["hbert-taught"]["train"] is found["hbert"]["train"]


def test_each_method_trains_what_it_says(bench: Place) -> None:
    trained = report_of(bench, "methods", *with_original(bench))["settings"]["trained"]["colours"]
    found = {method: one["parameters"] for method, one in trained.items()}
    config = bench.base.config
    head = 3 * (config.hidden_size + 1)
    assert found["shared"] == head
    assert found["adapter"] == found["hbert"]
    assert found["hbert"] < found["plot"] < found["dedicated"]
    upper = sum(p.numel() for p in bench.base.load_upper().parameters())
    assert found["plot"] == head + upper


@pytest.mark.parametrize("name", BUDGETS)
def test_every_method_has_a_grid_of_the_same_size_and_span(name: str) -> None:
    grids = [BUDGETS[name].rates(rate, lambda tried: None) for rate in RATES.values()]
    assert len({len(set(grid)) for grid in grids}) == 1
    assert len(grids[0]) > 1
    spans = [max(grid) / min(grid) for grid in grids]
    assert max(spans) / min(spans) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(
    ("best", "grid"),
    [
        (1.0, (0.3, 1.0, 3.0)),
        (3.0, (0.3, 1.0, 3.0, 10.0)),
        (10.0, (0.3, 1.0, 3.0, 10.0, 30.0)),
        (30.0, (0.3, 1.0, 3.0, 10.0, 30.0)),
        (0.1, (0.03, 0.1, 0.3, 1.0, 3.0)),
    ],
)
def test_a_grid_is_widened_a_limited_number_of_times_while_the_best_is_at_its_end(
    best: float, grid: tuple[float, ...]
) -> None:
    def nearest(tried: Sequence[float]) -> float:
        return min(tried, key=lambda rate: abs(math.log(rate / best)))

    assert BUDGETS["cpu"].rates(1.0, nearest) == grid


def test_a_search_tries_the_declared_rates_and_other_seeds_take_the_best_on_dev(bench: Place, tmp_path: Path) -> None:
    report = report_of(
        bench, "methods", "--method", "hbert", "--resume", str(tmp_path), "--seed", "0", "--seed", "7",
        *with_original(bench),
    )  # fmt: skip
    for name in ("colours", "places"):
        by_rate = {
            float(path.stem.rpartition("rate-")[2]): json.loads(path.read_text())["run"]["dev"]
            for path in (tmp_path / name / "hbert").glob("seed-0-*.json")
        }
        assert len(by_rate) == 2
        # Of equally good rates, the smallest is chosen.
        best = max(sorted(by_rate), key=lambda rate: by_rate[rate])
        others = sorted(path.name for path in (tmp_path / name / "hbert").glob("seed-7-*.json"))
        assert others == [f"seed-7-rate-{best:g}.json"]
        row = next(row for row in report["rows"] if row["task"] == name)
        assert row["learning_rates"] == {f"{best:g}": 2}


def test_each_seed_has_its_own_search_with_search_every_seed(bench: Place, tmp_path: Path) -> None:
    arguments = ["--method", "hbert", "--resume", str(tmp_path), "--seed", "0", "--seed", "7", *with_original(bench)]
    report_of(bench, "methods", *arguments)
    first = trained(tmp_path)
    report = report_of(bench, "methods", *arguments, "--search-every-seed")
    # The first seed's search has the same runs as before.
    assert first.items() < trained(tmp_path).items()
    assert report["settings"]["searched_seeds"] == [0, 7]
    for name in ("colours", "places"):
        folder = tmp_path / name / "hbert"
        rates = [{path.stem.rpartition("rate-")[2] for path in folder.glob(f"seed-{seed}-*.json")} for seed in (0, 7)]
        assert rates[0] == rates[1]
        assert len(rates[0]) == 2


def test_resuming_gives_the_same_report_without_training_again(bench: Place, tmp_path: Path) -> None:
    arguments = [*with_original(bench), "--resume", str(tmp_path), "--seed", "0", "--seed", "1"]
    first = report_of(bench, "methods", *arguments)
    before = trained(tmp_path)
    assert len(before) == 2 * len(METHODS) * 3  # two rates, and the better one for the other seed
    lost = sorted(before)[4]
    (tmp_path / lost).unlink()
    second = report_of(bench, "methods", *arguments)
    after = trained(tmp_path)
    assert {path for path in before if before[path] != after[path]} == {lost}
    assert (first["rows"], first["goals"]) == (second["rows"], second["goals"])
    assert report_of(bench, "methods", *arguments)["rows"] != []
    assert trained(tmp_path) == after


@pytest.mark.timeout(900)
def test_processes_that_share_a_folder_repeat_no_work(bench: Place, tmp_path: Path) -> None:
    seeds = [word for seed in range(4) for word in ("--seed", str(seed))]
    command = [str(BIN / "hplm"), "eval", *bench.options("methods"), *with_original(bench), *seeds]
    command += ["--resume", str(tmp_path / "runs"), "--epochs", "4"]
    (first, second), said = reports_of_two(command, tmp_path)
    done = 0
    for errors in said:
        here, total = map(int, re.findall(r"(\d+) of (\d+) runs were done by this process", errors)[0])
        assert 0 < here < total
        done += here
    assert done == total == len(trained(tmp_path / "runs"))
    assert first["rows"] == second["rows"]


def test_a_run_locked_by_a_killed_process_is_free_again(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom hplm_builder.evaluation.search.run_store import RunStore\n"
        "with RunStore(Path(sys.argv[1])).claim('task/run') as ours:\n    print(ours, flush=True)\n    time.sleep(60)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "True\n"
    with RunStore(tmp_path).claim("task/run") as ours:
        assert not ours
    assert (tmp_path / "task" / "run.lock").read_text() == f"{other.pid}\n"
    other.send_signal(signal.SIGKILL)
    other.communicate()
    with RunStore(tmp_path).claim("task/run") as ours:
        assert ours


def test_a_result_of_other_settings_is_refused_by_name(bench: Place, tmp_path: Path) -> None:
    report_of(bench, "methods", *with_original(bench), "--method", "shared", "--resume", str(tmp_path))
    with pytest.raises(DataError, match=r"is of a run with epochs 1, here it is 2: give --resume another folder"):
        report_of(
            bench, "methods", *with_original(bench), "--method", "shared", "--resume", str(tmp_path), "--epochs", "2"
        )


@pytest.mark.parametrize("content", ["", "[]", '{"about": {}}', '{"about": {}, "run": {"guess": 1}}'])
def test_a_damaged_result_is_one_clear_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / f"{KEY.path}.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(DataError, match="is not the result of a run"):
        RunStore(tmp_path).read(KEY, {})


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "run.lock").mkdir()
    with pytest.raises(ConfigError, match="cannot be made"), RunStore(tmp_path / "file").claim("task/run"):
        pass
    with pytest.raises(ConfigError, match="cannot be written"), RunStore(tmp_path).claim("run"):
        pass


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    results, run = RunStore(tmp_path), RunResult(0.5, 0.25, {"test_f1": 0.25}, 1, 2, 3, 4.0, {"more": [1]})
    assert results.read(KEY, {"a": 1}) is None
    results.write(KEY, {"a": (1, 2)}, run)
    assert results.read(KEY, {"a": (1, 2)}) == run


def test_diverged_runs_are_counted_and_other_runs_are_kept(bench: Place, tmp_path: Path) -> None:
    arguments = [*with_original(bench), "--method", "hbert", "--resume", str(tmp_path), "--seed", "0", "--seed", "1"]
    report_of(bench, "methods", *arguments)
    for path in tmp_path.glob("colours/hbert/seed-1-*.json"):
        found = json.loads(path.read_text())
        path.write_text(json.dumps({**found, "run": {"seconds": 1.0}}))
    rows = {row["task"]: row for row in report_of(bench, "methods", *arguments)["rows"]}
    assert rows["colours"]["diverged"] == 1
    assert len(rows["colours"]["test_by_seed"]) == 1
    assert "diverged" not in rows["places"]
    assert len(rows["average"]["test_by_seed"]) == 1


def test_a_dry_run_tells_the_time_and_trains_nothing(bench: Place, tmp_path: Path) -> None:
    shutil.copytree(bench.root / "colours", odd := tmp_path / "hues [few]")
    folders = ["--resume", str(tmp_path / "runs"), "--data", str(odd)]
    done = CliRunner().invoke(app, [*bench.options("methods"), *with_original(bench), *folders, "--dry-run"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "hues [few]" in done.stderr
    assert "minutes are left" in done.stderr
    assert "train data too" not in done.stderr
    assert not trained(tmp_path)


def test_test_texts_in_the_train_data_give_a_warning(bench: Place, tmp_path: Path) -> None:
    shutil.copytree(bench.root / "colours", leaky := tmp_path / "leaky")
    train, test = (next(leaky.glob(f"{part}.*")) for part in ("train", "test"))
    test.write_text(2 * train.read_text())
    options = [*bench.options("methods"), *with_original(bench), "--data", str(leaky), "--method", "shared"]
    done = CliRunner().invoke(app, [*options, "--json", str(report := tmp_path / "report.json")])
    assert done.exit_code == 0, (done.output, done.exception)
    settings = json.loads(report.read_text())["settings"]
    leaks, repeats = settings["leaks"], settings["repeats"]["leaky"]["test"]
    assert re.match(r"120 test examples have \d+ distinct texts: each text counts once", repeats)
    assert f"leaky: {repeats}" in done.stderr
    # Counted over the sample, not over all 60 texts.
    (leak,) = [leak for leak in leaks["leaky"] if "train data" in leak and "test texts" in leak]
    assert re.fullmatch(r"\d+ of 24 test texts are in the train data too: test scores are too good", leak)
    assert f"leaky: {leak}" in done.stderr


def test_capped_parts_keep_the_shares_of_the_classes_and_follow_the_seed(task: EvalTask) -> None:
    budget = Budget("some", 30, 10, 15, 1, 1, (1.0,), search_every_seed=False)
    whole = Counter(example.label for example in task.data.train)
    first, again, other = (task.sample(budget, seed) for seed in (0, 0, 1))
    assert first == again
    assert first.train != other.train
    assert first.test == other.test
    assert [len(part) for part in (first.train, first.dev, first.test)] == [30, 10, 15]
    assert first.labels == task.data.labels
    for data in (first, other):
        part = Counter(example.label for example in data.train)
        assert all(abs(part[label] - count / 2) <= 1 for label, count in whole.items())


def test_a_class_called_nan_keeps_its_share_too() -> None:
    labels = np.random.default_rng(1).permutation(["0", "1", "2", "nan"] * 100).tolist()
    examples = [LabelledText(f"text {number}", label) for number, label in enumerate(labels)]
    task = EvalTask("numbers", LabelledData("classification", ("0", "1", "2", "nan"), examples, examples[:9], examples))
    part = Counter(example.label for example in task.sample(replace(BUDGETS["cpu"], most_train=100), 0).train)
    assert set(part.values()) == {25}


def test_a_part_within_the_budget_is_taken_whole(task: EvalTask) -> None:
    data = task.sample(BUDGETS["cpu"], 3)
    assert data.train is task.data.train
    assert data.dev is task.data.dev


def test_goals_follow_from_the_rows() -> None:
    tests = {
        "one": {"dedicated": 0.90, "adapter": 0.85, "hbert": 0.88},
        "two": {"dedicated": 0.80, "adapter": 0.81, "hbert": 0.795},
        "average": {"dedicated": 0.85, "adapter": 0.83, "hbert": 0.8375},
    }
    rows = [{"task": t, "method": m, "test": test} for t, found in tests.items() for m, test in found.items()]
    gap, worst = goals_of(rows)
    assert (gap.value, gap.met) == (pytest.approx(1.25), False)
    assert (worst.value, worst.met) == (pytest.approx(1.5), False)
    rows = [{**row, "test": row["test"] + 0.006 * (row["method"] == "hbert")} for row in rows]
    gap, worst = goals_of(rows)
    assert (gap.value, gap.met) == (pytest.approx(0.65), True)
    assert (worst.value, worst.met) == (pytest.approx(0.9), True)
    assert goals_of([row for row in rows if row["method"] != "hbert"]) == []
    for task in ("one", "two"):
        odd = [{**row, "test": math.nan} if (row["task"], row["method"]) == (task, "hbert") else row for row in rows]
        assert [goal.met for goal in goals_of(odd)] == [False, False]


def broken(root: Path, name: str, files: dict[str, str]) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    for file, text in files.items():
        (folder / file).write_text(text)
    return folder


ROW = '{"text": "a cat", "label": "x"}\n{"text": "a dog", "label": "y"}\n'
TAGS = "Rome B-CITY\n\na O\n\n"


def test_a_taggings_results_with_the_older_choice_of_epoch_are_refused(bench: Place, tmp_path: Path) -> None:
    broken(tmp_path, "tags", {"train.conll": TAGS * 4, "dev.conll": TAGS, "test.conll": TAGS})
    tasks = {one.name: one for one in read_tasks([tmp_path / "tags", bench.root / "colours"], None)}
    served = ServedDomain(bench.store, bench.base, "general")
    variants = method_variants(OriginalModel(bench.base, bench.original), served, CPU)
    study = Study([*tasks.values()], variants, BUDGETS["quick"], (0,), "mean", CPU)
    of_tags, of_colours = (study.about(tasks[name], variants[0]) for name in ("tags", "colours"))
    results = RunStore(tmp_path)
    results.write(KEY, {name: value for name, value in of_tags.items() if name != "kept"}, RunResult())
    with pytest.raises(DataError, match="is of a run with kept None"):
        results.read(KEY, of_tags)
    assert "kept" not in of_colours


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "train.jsonl cannot be read"),
        ({"train.jsonl": ROW, "dev.jsonl": ROW}, "bad has no test data"),
        ({"train.jsonl": ROW, "test.jsonl": "x\n"}, "test.jsonl, line 1 is not JSON"),
        ({"train.jsonl": ROW * 4, "test.jsonl": ROW.replace("y", "z")}, "bad: the test data has labels that"),
        ({"data_full.json": "{}"}, "expected an object with the lists train, val, test"),
        ({"train.conll": TAGS, "dev.conll": TAGS, "test.conll": "a O\n"}, "bad: the test data holds no entity"),
    ],
    ids=["empty", "no-test", "no-json", "other-labels", "no-parts", "no-entity"],
)
def test_a_broken_folder_is_one_clear_error_that_names_it(tmp_path: Path, files: dict[str, str], words: str) -> None:
    broken(tmp_path, "good", {"train.jsonl": ROW * 4, "dev.jsonl": ROW, "test.jsonl": ROW})
    broken(tmp_path, "bad", files)
    with pytest.raises(DataError, match=re.escape(words)) as caught:
        read_tasks([], tmp_path)
    assert "bad" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "guess"], "unknown method 'guess'"),
        (["--budget", "huge"], "--budget is one of cpu, full, quick"),
        (["--seed", "1", "--seed", "1"], "--seed: give at least one, each only once"),
        (["--pooling", "sum"], "pooling must be cls or mean"),
        (["--miss", "guess"], "--miss must be compute or backoff"),
    ],
)
def test_a_wrong_option_is_refused_by_name(bench: Place, arguments: list[str], words: str) -> None:
    given = [one for one in bench.options("methods") if "--budget" not in arguments or one != "--quick"]
    runner = evaluated.CliRunner()
    done = runner.invoke(evaluated.app, [*given, *with_original(bench), *arguments])
    assert isinstance(done.exception, HplmError)
    assert words in str(done.exception)


def test_no_task_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="no task: give --data FOLDER"):
        read_tasks([], None)


def test_two_folders_of_one_name_are_refused(bench: Place, tmp_path: Path) -> None:
    broken(tmp_path, "colours", {"train.jsonl": ROW * 4, "dev.jsonl": ROW, "test.jsonl": ROW})
    with pytest.raises(DataError, match="two folders are called 'colours'"):
        read_tasks([bench.root / "colours", tmp_path / "colours"], None)


def test_a_base_of_another_model_is_refused(tmp_path: Path) -> None:
    place = evaluated.make_place(tmp_path)
    other = tiny.make_base(place.store, tiny.config(name="wide", hidden_size=64))
    with pytest.raises(ConfigError, match="base wide was not converted from"):
        OriginalModel(other, place.original).check()


def test_untrained_adapters_over_the_original_cut_are_the_original(bench: Place, task: EvalTask) -> None:
    original = OriginalModel(bench.base, bench.original)
    encoded = bench.base.load_text_encoder().encode([example.text for example in task.data.test])
    served = ServedDomain(bench.store, bench.base, "general")
    adapter, shared = (
        next(one for one in method_variants(original, served, CPU) if one.name == name)
        for name in ("adapter", "shared")
    )
    cut, last = (variant.source.open(task, silent)(encoded) for variant in (adapter, shared))
    body = adapter.body(task)()
    lengths = [len(one.ids) for one in encoded]
    hidden = torch.cat(cut)
    with torch.no_grad(), computing_in(*fastest_format()):
        found = body(hidden, lengths).float()
    torch.testing.assert_close(found, torch.cat(last).float(), atol=0.06, rtol=0.06)


def test_methods_over_a_whole_base_adapt_the_upper_half_of_the_original(bench: Place, tmp_path: Path) -> None:
    shape = {"origin": "a test", "max_tokens": 40}
    for name in ("upper", "all"):
        whole = make_whole_base(bench.store, bench.original, name=name, adapters=name, **shape)
        assert whole.config.adapted_layers == {"upper": 2, "all": 4}[name]
    methods = ("dedicated", "adapter", "hbert", "plot")
    asked = [option for method in methods for option in ("--method", method)]
    parameters = {}
    for name in ("upper", "all"):
        options = ["--base", name, "--resume", str(tmp_path / name)]
        report = report_of(bench, "methods", *with_original(bench), *asked, *options)
        assert {row["method"] for row in report["rows"]} == set(methods)
        parameters[name] = {
            method: one["parameters"] for method, one in report["settings"]["trained"]["colours"].items()
        }
        assert parameters[name]["hbert"] == parameters[name]["adapter"]
        # All weights of the original train but its word embeddings.
        assert parameters[name]["hbert"] < parameters[name]["plot"] < parameters[name]["dedicated"]
    assert parameters["upper"]["hbert"] < parameters["all"]["hbert"]
