"""Estimating how long an evaluation takes, from a few measured steps of each variant."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hplm.reporting.progress import Report, silent
from hplm.tasks.task_loader import task_named
from hplm_builder.data.data_warnings import leak_warnings
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.finished_runs import FinishedRuns
from hplm_builder.evaluation.search.run_store import RunStore
from hplm_builder.evaluation.search.study import Study, Variant, plot_body
from hplm_builder.tenants.finetune import TaskHead, Trainer
from hplm_builder.tenants.judging import predict
from hplm_builder.tenants.prepared import count_tokens, mean_tokens, packed_batches, prepare, sample_of

MEASURED_EXAMPLES = 32  # examples that a cost is measured on: about a second a variant


@dataclass(frozen=True)
class TokenCost:
    """Seconds per token: to compute its features, to train on it, to predict with it."""

    feature_s: float
    train_s: float
    predict_s: float


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds: `run_s` of one run by (task name, variant name), `left_s` of all unfinished work with its features."""

    run_s: Mapping[tuple[str, str], float]
    left_s: float

    def show(self, study: Study, console: Console) -> None:
        """Print a table of the runs, warnings about leaked texts, and the time that is left."""
        names = [variant.name for variant in study.variants]
        table = Table(
            "task",
            "train / dev / test",
            *map(escape, names),
            title=f"Estimated minutes for {study.runs_each} runs each",
        )
        for task in study.tasks:
            data = task.sample(study.budget, study.seeds[0])
            sizes = " / ".join(f"{len(part):,}" for part in (data.train, data.dev, data.test))
            minutes = (f"{study.runs_each * self.run_s[task.name, name] / 60:.1f}" for name in names)
            table.add_row(escape(task.name), sizes, *minutes)
        console.print(table)
        drawn = {task.name: task.sample(study.budget, study.seeds[0]) for task in study.tasks}
        show_warnings(console, {name: [*data.repeats.values(), *leak_warnings(data)] for name, data in drawn.items()})
        threads = torch.get_num_threads()
        console.print(
            f"about {self.left_s / 60:,.0f} minutes are left for one process with {threads} thread{'s' * (threads > 1)}; "
            "several processes with the same --resume folder and --threads 1 share them, a core each",
            highlight=False,
        )


def show_warnings(console: Console, warnings: Mapping[str, Sequence[str]]) -> None:
    """Print the sentences about the data of each task or tenant by name."""
    for name, sentences in warnings.items():
        for sentence in sentences:
            console.print(f"{name}: {sentence}", style="yellow", markup=False, soft_wrap=True)


def estimate(study: Study, store: RunStore, report: Report) -> Estimate:
    """Measure a few steps of every variant on every task and estimate the time. Early stopping takes less."""
    finished, budget = FinishedRuns(study, store), study.budget
    run_s: dict[tuple[str, str], float] = {}
    left_s = 0.0
    costs: dict[tuple[str, str], TokenCost] = {}
    for number, task in enumerate(study.tasks):
        sources: set[str] = set()
        for variant in study.variants:
            report("estimate the time", (number + len(sources) / len(study.variants)) / len(study.tasks))
            measured, encoder = variant.costs_as or variant, variant.base.load_text_encoder()
            data = study.data(task, variant, study.seeds[0])
            if (cost := costs.get((task.name, measured.name))) is None:
                cost = costs[task.name, measured.name] = measure(study, task, measured)
            # The numbers of tokens in each part.
            train, dev, test = (len(part) * mean_tokens(part, encoder) for part in data.labelled.values())
            unlabelled = len(data.unlabelled) * mean_tokens(data.unlabelled, encoder) if data.unlabelled else 0.0
            one_run_s = budget.epochs * ((train + unlabelled) * cost.train_s + dev * cost.predict_s)
            one_run_s += (dev + test + variant.extra_predictions * test) * cost.predict_s
            run_s[task.name, variant.name] = one_run_s
            if unfinished := finished.total(task, variant) - finished.count(task, variant):
                left_s += unfinished * one_run_s + variant.extra_predictions * test * cost.feature_s
                if variant.source.name not in sources:
                    left_s += (test + len(study.seeds) * (train + dev)) * cost.feature_s
                    sources.add(variant.source.name)
                if variant.with_pseudo_labels:
                    teacher = measure(study, task, replace(variant, body=plot_body(variant.base)))
                    teacher_s = budget.epochs * (train * teacher.train_s + dev * teacher.predict_s)
                    left_s += len(study.seeds) * (teacher_s + unlabelled * (teacher.predict_s + cost.feature_s))
    report("estimate the time", 1.0)
    return Estimate(run_s, left_s)


def measure(study: Study, task: EvalTask, variant: Variant) -> TokenCost:
    """Measure the seconds per token of a variant on this machine."""
    data, encoder, featurise = task.data, variant.base.load_text_encoder(), variant.source.open(task, silent)
    settings = study.train_settings(study.seeds[0], variant.rate)
    examples = sample_of(data.train, MEASURED_EXAMPLES)
    prepare(examples[:2], data, encoder, featurise)  # warm up, so that the measurement is of the steady state
    start_s = time.perf_counter()
    sample = prepare(examples[2:] or examples, data, encoder, featurise)
    feature_s = (time.perf_counter() - start_s) / count_tokens(sample)
    body = variant.body(task)().to(study.device)
    head = TaskHead(variant.base.config.hidden_size, data).to(study.device)
    kind = task_named(data.task)
    scale = kind.scale([example.source for example in sample])
    trainer = Trainer(kind, settings, variant.rate, body, head, scale)
    batch, *_ = packed_batches(sample, settings.batch_examples, np.random.default_rng(0))
    seconds = []
    for _ in range(2):
        start_s = time.perf_counter()
        trainer.step(batch, variant.rate)
        middle_s = time.perf_counter()
        predict(body, head.to_served(scale), data, batch, study.pooling, device=study.device)
        seconds.append((middle_s - start_s, time.perf_counter() - middle_s))
    train_s, predict_s = (min(column) / count_tokens(batch) for column in zip(*seconds, strict=True))
    return TokenCost(feature_s, train_s, predict_s)
