"""Measures what an encoder is worth to tenants: heads on frozen states of labelled examples, scored by cross-validation.

The adapters of a tenant would take minutes for each encoder. A linear head on the states of the upper layers takes seconds, and
both encoders get the same head, the same folds and the same examples, so that a difference is the encoder's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hplm.adapters.tenant import Head
from hplm.core.wire import LabelledSpan
from hplm.engine.open_domain import open_lineage
from hplm.errors import DataError
from hplm.models.base import Base
from hplm.models.device import in_dtype
from hplm.store.layout import Store
from hplm.tasks.task_loader import task_named
from hplm_builder.data.labelled import LabelledData, LabelledFile
from hplm_builder.data.labelled_checks import check_data
from hplm_builder.data.labelled_files import read_file
from hplm_builder.domains.verdict import DevResult, Rows, compare
from hplm_builder.tenants.bodies import UpperModel, fastest_format
from hplm_builder.tenants.finetune import TaskHead
from hplm_builder.tenants.head_start import minimise
from hplm_builder.tenants.judging import read_states, scores_of
from hplm_builder.tenants.prepared import Featurise, Prepared, counted, mean_tokens, prepare, sample_of
from hplm_builder.tenants.trained_layers import plot_features

FOLDS = 3  # more cost time, and both encoders get the same
# Fewer examples could show no difference between two encoders.
LEAST_EXAMPLES = 20
# Examples of a file that are used: more take minutes and hardly make the standard error smaller than half a point.
MOST_EXAMPLES = 2_000
POOLING = "mean"
# Steps in which a head is fitted. Each of a tagging's takes long, and both encoders' heads get as many.
FIT_STEPS = 50

Answers = list[list[LabelledSpan]]


@dataclass(frozen=True)
class DevSet:
    """The distinct labelled texts of one file. `data` holds them all as train. `repeats` says what was left out."""

    file: str
    data: LabelledData
    repeats: str = ""

    @classmethod
    def read(cls, file: LabelledFile) -> DevSet:
        """Read a file in a format of tenants' data. Raises DataError, also for fewer than LEAST_EXAMPLES."""
        rows = read_file(file)
        # The same rows as dev, so that none are split off, and each text counts once.
        found = check_data(rows, rows, [])
        examples = sample_of(found.dev, MOST_EXAMPLES)
        if len(examples) < LEAST_EXAMPLES:
            raise DataError(
                f"{file.name} holds {len(examples)} distinct texts: {LEAST_EXAMPLES} are needed to tell two encoders apart"
            )
        return cls(
            file.name, LabelledData(found.task, found.labels, list(examples), [], []), found.repeats.get("dev", "")
        )


@dataclass(frozen=True)
class Answered:
    """The examples of a dev set, and the answers that heads on one encoder's states gave to them."""

    dev: DevSet
    examples: list[Prepared]
    answers: list[list[LabelledSpan]]

    def score(self, rows: Rows) -> float:
        """Return the score of the examples with the given numbers by the task's metric."""
        data = self.dev.data
        scores = scores_of(data, [self.examples[i] for i in rows], [self.answers[i] for i in rows])
        return scores[task_named(data.task).metric]


@dataclass(frozen=True)
class DevExamples:
    """The dev sets of a domain's build, and what answering them needs."""

    store: Store
    base: Base
    sets: Sequence[DevSet]
    device: torch.device

    @property
    def num_tokens(self) -> int:
        """About how many tokens the examples have."""
        encoder = self.base.load_text_encoder() if self.sets else None
        parts = [dev.data.train for dev in self.sets]
        return round(sum(len(part) * mean_tokens(part, encoder) for part in parts if encoder is not None))

    def answer(self, lineage: Sequence[Path | str], report: Callable[[float], None]) -> list[Answered]:
        """Answer the examples of each dev set over a domain version, as it would be served with the miss mode `compute`.

        `report` is called often with the share that is done. If it raises, the answering ends. Without dev sets nothing is
        opened. Raises DataError for a text that cannot be read, and what `open_lineage` raises.
        """
        if not self.sets:
            return []
        lookup = open_lineage(self.store, self.base, lineage, device=self.device)
        body = UpperModel(in_dtype(self.base.load_upper().to(self.device), fastest_format(self.device)[0])).eval()
        # Each example is counted twice: when its features are taken, and when it is answered.
        tick = counted("", 2 * sum(len(dev.data.train) for dev in self.sets), lambda step, done: report(done))
        return [self._answer(dev, plot_features(lookup), body, tick) for dev in self.sets]

    def _answer(self, dev: DevSet, featurise: Featurise, body: nn.Module, tick: Callable[[int], None]) -> Answered:
        """Answer each example by a head that was fitted to the states of the other folds."""
        data, task = dev.data, task_named(dev.data.task)
        examples = prepare(data.train, data, self.base.load_text_encoder(), featurise, tick)
        by_place = dict(read_states(body, data, examples, POOLING, lambda tokens: tick(0), self.device))
        states = [by_place[place] for place in range(len(examples))]
        folds = np.random.default_rng(0).permutation(len(examples)) % FOLDS
        answers: list[list[LabelledSpan]] = [[] for _ in examples]
        for fold in range(FOLDS):
            others = np.flatnonzero(folds != fold).tolist()
            head = _fit([states[i] for i in others], [examples[i] for i in others], data, tick)
            weight, bias = torch.from_numpy(head.weight), torch.from_numpy(head.bias)
            own = np.flatnonzero(folds == fold).tolist()
            for i in own:
                outputs = (states[i] @ weight.T + bias).numpy()
                answers[i], _ = task.decode(outputs, data.labels, examples[i].tokens, head.transitions)
            tick(len(own))
        return Answered(dev, examples, answers)


def _fit(
    states: Sequence[Tensor], examples: Sequence[Prepared], data: LabelledData, tick: Callable[[int], None]
) -> Head:
    """Return a head that is fitted to the states of examples."""
    task = task_named(data.task)
    head = TaskHead(states[0].shape[1], data)
    # A head that starts at zero needs no random numbers. The problem is convex, so the start does not matter.
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    inputs, targets = torch.cat(list(states)), torch.cat([example.targets for example in examples])
    texts = [example.tokens for example in examples]
    scale = task.scale([example.source for example in examples])

    def loss() -> Tensor:
        transitions = None if head.transitions is None else head.transitions + head.forbidden
        return task.loss(head(inputs), targets, texts, scale, transitions)

    minimise(head, loss, tick, FIT_STEPS)
    return head.to_served(scale)


def compare_answers(before: Sequence[Answered], after: Sequence[Answered]) -> list[DevResult]:
    """Return for each dev set both scores, and how sure their difference is."""
    results = []
    for old, new in zip(before, after, strict=True):
        task, count = task_named(old.dev.data.task), len(old.examples)

        def score(rows: Rows, old: Answered = old, new: Answered = new) -> tuple[float, float]:
            return old.score(rows), new.score(rows)

        results.append(DevResult(old.dev.file, task.name, task.metric, count, compare(score, count), old.dev.repeats))
    return results
