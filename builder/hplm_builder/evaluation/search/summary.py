"""Rows of a benchmark result from the best runs of a search: mean and spread over seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, TypeVar

from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.finished_runs import BestRun, BestRuns
from hplm_builder.evaluation.search.study import Study

Row = dict[str, Any]
AVERAGE = "average"
Model = TypeVar("Model")


def mean_and_spread(name: str, values: Sequence[float]) -> Row:
    """Return the mean of one score per seed, NaN without seeds, and `spread`, the deviation of a sample of two or more."""
    row = {name: fmean(values) if values else math.nan}
    return {**row, "spread": stdev(values)} if len(values) > 1 else row


def result_rows(study: Study, best: BestRuns, column: str = "method") -> list[Row]:
    """Return a row for each task and variant, and for each variant the average over tasks. `column` holds the variant's name.

    `test` and `dev` are the task's metric, from 0 to 1. `at_end` counts the seeds whose rate is at an end of the grid.
    `test_by_seed` is in the order of the study's seeds, without the seeds that diverged, which `diverged` counts.
    """
    names = [variant.name for variant in study.variants]
    rows = [_row(task, name, best[task.name, name], column) for task in study.tasks for name in names]
    if len(study.tasks) > 1:
        rows += [_average(study, best, name, column) for name in names]
    return rows


def _row(task: EvalTask, name: str, best_runs: Sequence[BestRun], column: str) -> Row:
    runs = [best.run for best in best_runs if best.run is not None]
    tests = [run.test for run in runs if run.test is not None]
    devs = [run.dev for run in runs if run.dev is not None]
    row: Row = {"task": task.name, "metric": task.metric, column: name, **mean_and_spread("test", tests)}
    row |= {
        "dev": mean_and_spread("dev", devs)["dev"],
        "learning_rates": {f"{rate:g}": count for rate, count in Counter(best.rate for best in best_runs).items()},
        "at_end": sum(best.at_end for best in best_runs),
        "best_epochs": [run.best_epoch for run in runs],
        "test_by_seed": [round(test, 4) for test in tests],
    }
    if len(runs) < len(best_runs):
        row["diverged"] = len(best_runs) - len(runs)
    return row


def _average(study: Study, best: BestRuns, name: str, column: str) -> Row:
    """Return the row of averages over tasks, from the seeds that diverged on no task."""
    tests = {
        task.name: [best_run.run.test if best_run.run else None for best_run in best[task.name, name]]
        for task in study.tasks
    }
    means = [fmean(scores) for scores in complete_seeds(tests)]
    by_seed = [round(mean, 4) for mean in means]
    return {"task": AVERAGE, column: name, **mean_and_spread("test", means), "test_by_seed": by_seed}


def complete_seeds(by_task: Mapping[str, Sequence[Model | None]]) -> list[list[Model]]:
    """Return, for each seed that all tasks have, the models of the tasks."""
    by_seed = [[model for model in models if model is not None] for models in zip(*by_task.values(), strict=True)]
    return [models for models in by_seed if len(models) == len(by_task)]


def training_summary(best: BestRuns) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by task and variant, how many parameters trained and the mean seconds of a seed's best run."""
    trained: dict[str, dict[str, dict[str, float]]] = {}
    for (task, name), best_runs in best.items():
        if runs := [best_run.run for best_run in best_runs if best_run.run is not None]:
            seconds = round(fmean(run.seconds for run in runs), 1)
            trained.setdefault(task, {})[name] = {"parameters": runs[0].trained_parameters, "seconds": seconds}
    return trained


def test_scores(rows: Sequence[Mapping[str, Any]], column: str) -> dict[tuple[str, str], float]:
    """Return the `test` score of each (task, variant) in `rows`."""
    return {(str(row["task"]), str(row[column])): float(row["test"]) for row in rows}
