"""What an evaluation compares, and what of it is finished, whoever did it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hplm.errors import ConfigError
from hplm_builder.data.labelled import LabelledData
from hplm_builder.evaluation.search.budget import Budget
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.run_store import RunKey, RunResult, RunStore
from hplm_builder.evaluation.search.variants import Variant
from hplm_builder.tenants.bodies import fastest_format
from hplm_builder.tenants.finetune import CHANCE, TAGGING_WARMUP_SHARE, WORD_WINDOW, TrainSettings
from hplm_builder.tenants.head_start import may_be_fitted
from hplm_builder.tenants.pseudo_labels import TEACHER_RATE


@dataclass(frozen=True)
class Study:
    """What to compare: variants on tasks, within a budget."""

    tasks: Sequence[EvalTask]
    variants: Sequence[Variant]
    budget: Budget
    seeds: tuple[int, ...]
    pooling: str
    device: torch.device

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"--seed: at least one, and each once; got {', '.join(map(str, self.seeds)) or 'none'}")

    def about(self, task: EvalTask, variant: Variant) -> dict[str, Any]:
        """What the results of a variant on a task depend on besides seed and learning rate, in JSON values."""
        budget = self.budget
        return {
            "data": task.digest,
            "train examples": budget.most_train,
            "dev examples": budget.most_dev,
            "test examples": budget.most_test,
            "epochs": budget.epochs,
            "patience": budget.patience,
            "batch examples": budget.batch_examples,
            "pooling": self.pooling,
            "device": self.device.type,
            "computed in": str(fastest_format(self.device)[0]),
            # Results from before it was so are of other heads.
            **(
                {
                    "head": f"with transitions, over {WORD_WINDOW} words",
                    "warm-up": TAGGING_WARMUP_SHARE,
                    "kept": f"the last epoch within {CHANCE:g} standard errors of the best",
                }
                if task.data.task == "tagging"
                else {}
            ),
            **({"head": "fitted first where it does well"} if may_be_fitted(task.data) else {}),
            **({"unlabelled": f"as many, labelled by all upper layers at {TEACHER_RATE:g}"} if variant.taught else {}),
            **variant.about(task),
        }

    def data(self, task: EvalTask, variant: Variant, seed: int) -> LabelledData:
        """What a run of the variant trains on and is judged by."""
        return task.sample(self.budget, seed, unlabelled=variant.taught)

    def train_settings(self, seed: int, rate: float) -> TrainSettings:
        return self.budget.train_settings(seed, rate, self.pooling)

    @property
    def searched_seeds(self) -> tuple[int, ...]:
        """Seeds with a search of their own."""
        return self.seeds if self.budget.search_every_seed else self.seeds[:1]

    @property
    def runs_each(self) -> int:
        """Trainings of a variant on a task, where no grid is widened."""
        searched = len(self.searched_seeds)
        return searched * len(self.budget.factors) + len(self.seeds) - searched

    def pairs(self) -> Iterator[tuple[EvalTask, Variant]]:
        """Every variant on every task; those that share features next to each other, where `variants` are in such an order."""
        for task in self.tasks:
            for variant in self.variants:
                yield task, variant


@dataclass(frozen=True)
class BestRun:
    """A seed's run at the learning rate that was best on dev; None where all diverged.

    `at_end`: that rate is the lowest or highest that was tried.
    """

    seed: int
    rate: float
    run: RunResult | None
    at_end: bool


# By the names of task and variant, a `Chosen` a seed.
BestRuns = dict[tuple[str, str], list[BestRun]]


class FinishedRuns:
    """What is finished of a study, whoever did it."""

    def __init__(self, study: Study, results: RunStore) -> None:
        self._study = study
        self._results = results
        self._runs: dict[RunKey, RunResult] = {}
        self._about: dict[tuple[str, str], dict[str, Any]] = {}

    def about(self, task: EvalTask, variant: Variant) -> dict[str, Any]:
        """As the study's; finding it out may mean to read files, so once is enough."""
        key = task.name, variant.name
        if key not in self._about:
            self._about[key] = self._study.about(task, variant)
        return self._about[key]

    def run(self, task: EvalTask, variant: Variant, seed: int, rate: float) -> RunResult | None:
        key = RunKey(task.name, variant.name, seed, rate)
        if key not in self._runs:
            found = self._results.read(key, self.about(task, variant))
            if found is None:
                return None
            self._runs[key] = found
        return self._runs[key]

    def wanted(self, task: EvalTask, variant: Variant) -> list[RunKey]:
        """The runs of a variant on a task as far as they are known: a rate for the other seeds takes the first one's search."""
        study = self._study
        pairs = [(seed, rate) for seed in study.searched_seeds for rate in self._rates(task, variant, seed)]
        if others := study.seeds[len(study.searched_seeds) :]:
            first = self._best(task, variant, study.seeds[0])
            pairs += [(seed, first.rate) for seed in others] if first else []
        return [RunKey(task.name, variant.name, seed, rate) for seed, rate in pairs]

    def open(self, task: EvalTask, variant: Variant) -> list[RunKey]:
        """Of `wanted`, those that are not finished."""
        return [key for key in self.wanted(task, variant) if self.run(task, variant, key.seed, key.rate) is None]

    def finished(self, task: EvalTask, variant: Variant) -> int:
        """How many of a variant's runs on a task are."""
        return len(self.wanted(task, variant)) - len(self.open(task, variant))

    def chosen(self, task: EvalTask, variant: Variant) -> list[BestRun]:
        """What a finished search came to."""
        found = [self._best(task, variant, seed) for seed in self._study.searched_seeds]
        assert found[0] is not None
        for seed in self._study.seeds[len(found) :]:
            run = self.run(task, variant, seed, found[0].rate)
            found.append(replace(found[0], seed=seed, run=run if run is not None and run.dev is not None else None))
        return [one for one in found if one is not None]

    def total(self, task: EvalTask, variant: Variant) -> int:
        """How many runs a variant on a task takes, as far as that is known."""
        return max(self._study.runs_each, len(self.wanted(task, variant)))

    def _rates(self, task: EvalTask, variant: Variant, seed: int) -> tuple[float, ...]:
        """The learning rates to try, as far as they are known."""

        def best_of(rates: Sequence[float]) -> float | None:
            best = self._best_of(task, variant, seed, rates)
            return None if best is None else best.rate

        return self._study.budget.rates(variant.rate, best_of)

    def _best(self, task: EvalTask, variant: Variant, seed: int) -> BestRun | None:
        """None while a rate's run is not finished."""
        return self._best_of(task, variant, seed, self._rates(task, variant, seed))

    def _best_of(self, task: EvalTask, variant: Variant, seed: int, rates: Sequence[float]) -> BestRun | None:
        runs = [(rate, self.run(task, variant, seed, rate)) for rate in rates]
        done = [(rate, run) for rate, run in runs if run is not None]
        if len(done) < len(runs):
            return None
        rate, run = max(done, key=lambda one: -math.inf if one[1].dev is None else one[1].dev)
        return BestRun(seed, rate, None if run.dev is None else run, at_end=rate in (rates[0], rates[-1]))
