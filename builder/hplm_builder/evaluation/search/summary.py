"""Rows of a benchmark result from the best runs of a search: mean and spread over seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.finished_runs import BestRun, BestRuns
from hplm_builder.evaluation.search.study import Study

Row = dict[str, Any]
AVERAGE = "average"
Model = TypeVar("Model")


@dataclass(frozen=True)
class Spread:
    """The mean of one score per seed, and its sample standard deviation, None for fewer than two seeds."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of `values`; the mean is NaN if there is no value."""
        if not values:
            return cls(math.nan, None)
        return cls(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)

    def columns(self, name: str) -> Row:
        return {name: self.mean, **({"spread": self.deviation} if self.deviation is not None else {})}


def result_rows(study: Study, best: BestRuns, column: str = "method") -> list[Row]:
    """Return a row for each task and variant, and for each variant the average over tasks. `column` holds the variant's name.

    `test` and `dev` are the task's metric, from 0 to 1. `at_end` counts the seeds whose rate is at an end of the grid.
    `test_by_seed` is in the order of the study's seeds, without the seeds that diverged, which `diverged` counts.
    """
    rows = [_row(task, name, best[task.name, name], column) for task in study.tasks for name in _names(study)]
    if len(study.tasks) > 1:
        rows += [_average(study, best, name, column) for name in _names(study)]
    return rows


def _names(study: Study) -> list[str]:
    return [variant.name for variant in study.variants]


def _row(task: EvalTask, name: str, best_runs: Sequence[BestRun], column: str) -> Row:
    runs = [best.run for best in best_runs if best.run is not None]
    tests = [run.test for run in runs if run.test is not None]
    row: Row = {"task": task.name, "metric": task.metric, column: name, **Spread.of(tests).columns("test")}
    row |= {
        "dev": Spread.of([run.dev for run in runs if run.dev is not None]).mean,
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
    means = [float(np.mean(scores)) for scores in complete_seeds(tests)]
    averaged = Spread.of(means).columns("test")
    return {"task": AVERAGE, column: name, **averaged, "test_by_seed": [round(mean, 4) for mean in means]}


def measurements_by_task(key: str, study: Study, best: BestRuns) -> dict[str, list[Any]]:
    """Return, by task, each seed's further measurements under `key`, None for a diverged seed. The study has one variant."""
    (variant,) = study.variants
    return {
        task.name: [
            None if best_run.run is None else best_run.run.more[key] for best_run in best[task.name, variant.name]
        ]
        for task in study.tasks
    }


def complete_seeds(by_task: Mapping[str, Sequence[Model | None]]) -> list[list[Model]]:
    """Return, for each seed that all tasks have, the models of the tasks."""
    by_seed = [[model for model in models if model is not None] for models in zip(*by_task.values(), strict=True)]
    return [models for models in by_seed if len(models) == len(by_task)]


def with_average(
    by_task: Mapping[str, Sequence[Model | None]], mean: Callable[[list[Model]], Model]
) -> list[tuple[str, list[Model]]]:
    """Return (task name, models) without diverged seeds, then (AVERAGE, the mean over tasks of each complete seed).

    A task without a model is left out. So is the average of a single task, or if each seed diverged on some task.
    """
    named = [(task, [model for model in models if model is not None]) for task, models in by_task.items()]
    if len(by_task) > 1:
        named.append((AVERAGE, [mean(models) for models in complete_seeds(by_task)]))
    return [(name, models) for name, models in named if models]


def training_summary(best: BestRuns) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by task and variant, how many parameters trained and the mean seconds of a seed's best run."""
    trained: dict[str, dict[str, dict[str, float]]] = {}
    for (task, name), best_runs in best.items():
        if runs := [best_run.run for best_run in best_runs if best_run.run is not None]:
            seconds = float(np.mean([run.seconds for run in runs]))
            trained.setdefault(task, {})[name] = {
                "parameters": runs[0].trained_parameters,
                "seconds": round(seconds, 1),
            }
    return trained


def test_scores(rows: Sequence[Mapping[str, Any]], column: str) -> dict[tuple[str, str], float]:
    """Return the `test` score of each (task, variant) in `rows`."""
    return {(str(row["task"]), str(row[column])): float(row["test"]) for row in rows}
