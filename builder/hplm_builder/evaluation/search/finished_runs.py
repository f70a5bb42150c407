"""The finished runs of a study, from all processes, and each seed's best run on dev."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.run_store import RunKey, RunResult, RunStore
from hplm_builder.evaluation.search.study import Study, Variant


@dataclass(frozen=True)
class BestRun:
    """A seed's run at the learning rate that was best on dev; `run` is None if all rates diverged.

    `at_end` says that the rate is the lowest or the highest that was tried.
    """

    seed: int
    rate: float
    run: RunResult | None
    at_end: bool


# By the names of task and variant, a `Chosen` a seed.
BestRuns = dict[tuple[str, str], list[BestRun]]


class FinishedRuns:
    """The finished runs of a study, whichever process did them, and the runs that are still needed."""

    def __init__(self, study: Study, store: RunStore) -> None:
        self._study = study
        self._store = store
        self._runs: dict[RunKey, RunResult] = {}
        self._about: dict[tuple[str, str], dict[str, Any]] = {}

    def about(self, task: EvalTask, variant: Variant) -> dict[str, Any]:
        """Return `Study.about`, cached because it may read files."""
        key = task.name, variant.name
        if key not in self._about:
            self._about[key] = self._study.about(task, variant)
        return self._about[key]

    def run(self, task: EvalTask, variant: Variant, seed: int, rate: float) -> RunResult | None:
        """Return a finished run, None if it is not finished. Raises DataError."""
        key = RunKey(task.name, variant.name, seed, rate)
        if key not in self._runs and (result := self._store.read(key, self.about(task, variant))):
            self._runs[key] = result
        return self._runs.get(key)

    def wanted(self, task: EvalTask, variant: Variant) -> list[RunKey]:
        """Return the runs that are known to be needed. Seeds without a search wait for the rate that the first seed's finds."""
        study = self._study
        pairs = [(seed, rate) for seed in study.searched_seeds for rate in self._rates(task, variant, seed)]
        if unsearched := study.seeds[len(study.searched_seeds) :]:
            first = self._best(task, variant, study.seeds[0])
            pairs += [(seed, first.rate) for seed in unsearched] if first else []
        return [RunKey(task.name, variant.name, seed, rate) for seed, rate in pairs]

    def open(self, task: EvalTask, variant: Variant) -> list[RunKey]:
        """Return the wanted runs that are not finished."""
        return [key for key in self.wanted(task, variant) if self.run(task, variant, key.seed, key.rate) is None]

    def count(self, task: EvalTask, variant: Variant) -> int:
        """Return how many of the wanted runs are finished."""
        return len(self.wanted(task, variant)) - len(self.open(task, variant))

    def best(self, task: EvalTask, variant: Variant) -> list[BestRun]:
        """Return each seed's best run, once all wanted runs are finished."""
        study = self._study
        runs = [best for seed in study.searched_seeds if (best := self._best(task, variant, seed)) is not None]
        for seed in study.seeds[len(study.searched_seeds) :]:
            run = self.run(task, variant, seed, runs[0].rate)
            runs.append(replace(runs[0], seed=seed, run=run if run is not None and run.dev is not None else None))
        return runs

    def total(self, task: EvalTask, variant: Variant) -> int:
        """Return how many runs a variant on a task takes, as far as that is known."""
        return max(self._study.runs_each, len(self.wanted(task, variant)))

    def _rates(self, task: EvalTask, variant: Variant, seed: int) -> tuple[float, ...]:
        """Return the learning rates to try, as far as they are known."""

        def best_of(rates: Sequence[float]) -> float | None:
            best = self._best_of(task, variant, seed, rates)
            return None if best is None else best.rate

        return self._study.budget.rates(variant.rate, best_of)

    def _best(self, task: EvalTask, variant: Variant, seed: int) -> BestRun | None:
        """Return the best run of a search, None while a run of the search is not finished."""
        return self._best_of(task, variant, seed, self._rates(task, variant, seed))

    def _best_of(self, task: EvalTask, variant: Variant, seed: int, rates: Sequence[float]) -> BestRun | None:
        runs = [(rate, self.run(task, variant, seed, rate)) for rate in rates]
        done = [(rate, run) for rate, run in runs if run is not None]
        if len(done) < len(runs):
            return None
        rate, run = max(done, key=lambda pair: -math.inf if pair[1].dev is None else pair[1].dev)
        return BestRun(seed, rate, None if run.dev is None else run, at_end=rate in (rates[0], rates[-1]))
