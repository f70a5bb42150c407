"""One search for all: every variant trains at its learning rates, the best on dev stays, seeds give the spread."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import Progress

from hplm.errors import ConfigError
from hplm_builder.bodies import CPU
from hplm_builder.evaluation.budget import Budget
from hplm_builder.evaluation.features import KeptFeatures, mean_tokens
from hplm_builder.evaluation.results import Results, Run, RunKey
from hplm_builder.evaluation.tasks import EvalTask
from hplm_builder.evaluation.variants import MakeBody, Variant
from hplm_builder.finetune import TrainSettings, fine_tune
from hplm_builder.tenants import encoder_of

POLL_S = 0.5


@dataclass(frozen=True)
class Study:
    """What to compare: variants on tasks, within a budget."""

    tasks: Sequence[EvalTask]
    variants: Sequence[Variant]
    budget: Budget
    seeds: tuple[int, ...]
    pooling: str = "mean"
    device: torch.device = CPU

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
            **variant.about,
        }

    def train_settings(self, task: EvalTask, variant: Variant, seed: int, rate: float) -> TrainSettings:
        tokens = mean_tokens(task.data.train, encoder_of(variant.base))
        return self.budget.train_settings(seed, rate, self.pooling, tokens)

    @property
    def searched_seeds(self) -> tuple[int, ...]:
        """Seeds with a search of their own."""
        return self.seeds if self.budget.search_every_seed else self.seeds[:1]

    @property
    def runs_each(self) -> int:
        """Trainings of a variant on a task."""
        searched = len(self.searched_seeds)
        return searched * len(self.budget.factors) + len(self.seeds) - searched

    def pairs(self) -> Iterator[tuple[EvalTask, Variant]]:
        """Every variant on every task; those that share features next to each other, where `variants` are in such an order."""
        for task in self.tasks:
            for variant in self.variants:
                yield task, variant


@dataclass(frozen=True)
class Chosen:
    """A seed's run at the learning rate that was best on dev; None where all diverged."""

    seed: int
    rate: float
    run: Run | None


# By the names of task and variant, a `Chosen` a seed.
Found = dict[tuple[str, str], list[Chosen]]


class Board:
    """What is finished of a study, whoever did it."""

    def __init__(self, study: Study, results: Results) -> None:
        self._study = study
        self._results = results
        self._runs: dict[RunKey, Run] = {}

    def run(self, task: EvalTask, variant: Variant, seed: int, rate: float) -> Run | None:
        key = RunKey(task.name, variant.name, seed, rate)
        if key not in self._runs:
            found = self._results.read(key, self._study.about(task, variant))
            if found is None:
                return None
            self._runs[key] = found
        return self._runs[key]

    def wanted(self, task: EvalTask, variant: Variant) -> list[RunKey]:
        """The runs of a variant on a task as far as they are known: a rate for the other seeds takes the first one's search."""
        study = self._study
        rates = study.budget.rates(variant.rate)
        pairs = [(seed, rate) for seed in study.searched_seeds for rate in rates]
        if others := study.seeds[len(study.searched_seeds) :]:
            first = self._best(task, variant, study.seeds[0], rates)
            pairs += [(seed, first.rate) for seed in others] if first else []
        return [RunKey(task.name, variant.name, seed, rate) for seed, rate in pairs]

    def open(self, task: EvalTask, variant: Variant) -> list[RunKey]:
        """Of `wanted`, those that are not finished."""
        return [key for key in self.wanted(task, variant) if self.run(task, variant, key.seed, key.rate) is None]

    def finished(self, task: EvalTask, variant: Variant) -> int:
        """How many of a variant's runs on a task are."""
        return len(self.wanted(task, variant)) - len(self.open(task, variant))

    def chosen(self, task: EvalTask, variant: Variant) -> list[Chosen]:
        """What a finished search came to."""
        rates = self._study.budget.rates(variant.rate)
        found = [self._best(task, variant, seed, rates) for seed in self._study.searched_seeds]
        assert found[0] is not None
        for seed in self._study.seeds[len(found) :]:
            run = self.run(task, variant, seed, found[0].rate)
            found.append(Chosen(seed, found[0].rate, run if run is not None and run.dev is not None else None))
        return [one for one in found if one is not None]

    def _best(self, task: EvalTask, variant: Variant, seed: int, rates: Sequence[float]) -> Chosen | None:
        """None while a rate's run is not finished."""
        runs = [(rate, self.run(task, variant, seed, rate)) for rate in rates]
        done = [(rate, run) for rate, run in runs if run is not None]
        if len(done) < len(runs):
            return None
        rate, run = max(done, key=lambda one: -math.inf if one[1].dev is None else one[1].dev)
        return Chosen(seed, rate, None if run.dev is None else run)


@dataclass(frozen=True)
class Workload:
    """How many seconds a run is thought to take, by the names of task and variant."""

    run_s: Mapping[tuple[str, str], float]


def search(study: Study, results: Results, workload: Workload, progress: Progress) -> tuple[Found, int]:
    """Do every run that nobody has done or is doing, wait for the others'; returns what was found, and how many were done here.

    Raises DataError, ConfigError.
    """
    work = _Work(study, results, workload, progress)
    while work.round():
        time.sleep(POLL_S)
    return {
        (task.name, variant.name): work.board.chosen(task, variant) for task, variant in study.pairs()
    }, work.done_here


class _Work:
    def __init__(self, study: Study, results: Results, workload: Workload, progress: Progress) -> None:
        self.board = Board(study, results)
        self.done_here = 0
        self._study = study
        self._results = results
        self._workload = workload
        self._progress = progress
        self._features = KeptFeatures()
        self._bodies: dict[str, MakeBody] = {}
        total_s = sum(study.runs_each * workload.run_s[task.name, variant.name] for task, variant in study.pairs())
        self._total = study.runs_each * sum(1 for _ in study.pairs())
        self._overall = progress.add_task("seconds of work", total=max(1, round(total_s)))
        self._current = progress.add_task("", total=100, visible=False)

    def round(self) -> bool:
        """Go once over everything; returns whether something is left that another process does."""
        left = 0
        for task, variant in self._study.pairs():
            while keys := self.board.open(task, variant):
                if not any(self._taken(task, variant, key) for key in keys):
                    left += len(keys)
                    break
        self._show_overall(0.0)
        if left:
            self._progress.update(self._current, visible=True, description=f"{left} runs are others'", completed=0)
        return left > 0

    def _taken(self, task: EvalTask, variant: Variant, key: RunKey) -> bool:
        """Do a run, unless another process is at it."""
        with self._results.claimed(key.path) as is_ours:
            if not is_ours:
                return False
            # Since it was found open, another may have finished it.
            if self.board.run(task, variant, key.seed, key.rate) is None:
                self._results.write(key, self._study.about(task, variant), self._do(task, variant, key))
                self.done_here += 1
            return True

    def _do(self, task: EvalTask, variant: Variant, key: RunKey) -> Run:
        study, cost_s = self._study, self._workload.run_s[task.name, variant.name]
        data = task.within(study.budget, key.seed)
        self._show_overall(0.0)

        def report(step: str, done: float) -> None:
            self._progress.update(
                self._current, visible=True, description=f"{key}: {step}", completed=round(100 * done)
            )
            if step == "fine-tune":
                self._show_overall(done * cost_s)

        parts = self._features.parts(task, variant, data, key.seed, report)
        if variant.name not in self._bodies:
            self._bodies = {variant.name: variant.body()}  # the one in use alone: each is a model
        settings = study.train_settings(task, variant, key.seed, key.rate)
        start_s = time.monotonic()
        hidden_size = variant.base.config.hidden_size
        try:
            trained = fine_tune(
                self._bodies[variant.name], hidden_size, data, parts, settings, report, device=study.device
            )
        except ConfigError:
            return Run(seconds=time.monotonic() - start_s)  # it diverged, which the search is there to find out
        head = trained.head
        return Run(
            dev=trained.scores[f"dev_{task.metric}"],
            test=trained.scores[f"test_{task.metric}"],
            scores=trained.scores,
            best_epoch=trained.best_epoch,
            epochs=len(trained.curve),
            trained_parameters=sum(p.numel() for p in trained.body.parameters() if p.requires_grad)
            + head.weight.size
            + head.bias.size,
            seconds=time.monotonic() - start_s,
            more=variant.more(task, data, trained) if variant.more else {},
        )

    def _show_overall(self, running_s: float) -> None:
        done = done_s = 0.0
        for task, variant in self._study.pairs():
            finished = self.board.finished(task, variant)
            done += finished
            done_s += finished * self._workload.run_s[task.name, variant.name]
        self._progress.update(
            self._overall,
            completed=round(done_s + running_s),
            description=f"{done:.0f} of {self._total} runs, seconds of work",
        )
