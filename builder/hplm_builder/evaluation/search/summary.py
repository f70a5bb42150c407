"""Rows of a report from what a search found: mean and spread over seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.study import BestRun, BestRuns, Study

Row = dict[str, Any]
AVERAGE = "average"
Model = TypeVar("Model")


@dataclass(frozen=True)
class Spread:
    """Of one score a seed: `mean`, and the sample standard deviation, None of fewer than two."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """NaN where there is no value at all."""
        if not values:
            return cls(math.nan, None)
        return cls(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)

    def columns(self, name: str) -> Row:
        return {name: self.mean, **({"spread": self.deviation} if self.deviation is not None else {})}


def result_rows(study: Study, found: BestRuns, column: str = "method") -> list[Row]:
    """A row for each task and variant, and for each variant the average over tasks. `column` is what variants are called.

    `test` and `dev` are the task's metric, 0 to 1; `at_end` counts seeds whose rate is at an end of the grid; `test_by_seed` is
    in the order of the study's seeds, without those that diverged, of which `diverged` tells.
    """
    rows = [_row(task, name, found[task.name, name], column) for task in study.tasks for name in _names(study)]
    if len(study.tasks) > 1:
        rows += [_average(study, found, name, column) for name in _names(study)]
    return rows


def _names(study: Study) -> list[str]:
    return [variant.name for variant in study.variants]


def _row(task: EvalTask, name: str, chosen: Sequence[BestRun], column: str) -> Row:
    runs = [one.run for one in chosen if one.run is not None]
    tests = [run.test for run in runs if run.test is not None]
    row: Row = {"task": task.name, "metric": task.metric, column: name, **Spread.of(tests).columns("test")}
    row |= {
        "dev": Spread.of([run.dev for run in runs if run.dev is not None]).mean,
        "learning_rates": {f"{rate:g}": count for rate, count in Counter(one.rate for one in chosen).items()},
        "at_end": sum(one.at_end for one in chosen),
        "best_epochs": [run.best_epoch for run in runs],
        "test_by_seed": [round(test, 4) for test in tests],
    }
    if len(runs) < len(chosen):
        row["diverged"] = len(chosen) - len(runs)
    return row


def _average(study: Study, found: BestRuns, name: str, column: str) -> Row:
    """Over tasks, of each seed; a seed that diverged on a task has none."""
    tests = {task.name: [one.run.test if one.run else None for one in found[task.name, name]] for task in study.tasks}
    means = [float(np.mean(of_seed)) for of_seed in complete_seeds(tests)]
    averaged = Spread.of(means).columns("test")
    return {"task": AVERAGE, column: name, **averaged, "test_by_seed": [round(mean, 4) for mean in means]}


def measurements_by_task(key: str, study: Study, found: BestRuns) -> dict[str, list[Any]]:
    """By task of a study of one variant: what a judge said of each seed's model under `key`, None of one that diverged."""
    (variant,) = study.variants
    return {
        task.name: [None if one.run is None else one.run.more[key] for one in found[task.name, variant.name]]
        for task in study.tasks
    }


def complete_seeds(judged: Mapping[str, Sequence[Model | None]]) -> list[list[Model]]:
    """Of each seed that no task lacks its models, one a task."""
    by_seed = [[one for one in of_seed if one is not None] for of_seed in zip(*judged.values(), strict=True)]
    return [of_seed for of_seed in by_seed if len(of_seed) == len(judged)]


def training_summary(found: BestRuns) -> dict[str, dict[str, dict[str, float]]]:
    """By task and variant: parameters that trained, and seconds that the chosen run of a seed took on average."""
    trained: dict[str, dict[str, dict[str, float]]] = {}
    for (task, name), chosen in found.items():
        if runs := [one.run for one in chosen if one.run is not None]:
            seconds = float(np.mean([run.seconds for run in runs]))
            trained.setdefault(task, {})[name] = {
                "parameters": runs[0].trained_parameters,
                "seconds": round(seconds, 1),
            }
    return trained


def test_scores(rows: Sequence[Mapping[str, Any]], column: str) -> dict[tuple[str, str], float]:
    """`test` by task and variant, as rows have it."""
    return {(str(row["task"]), str(row[column])): float(row["test"]) for row in rows}
