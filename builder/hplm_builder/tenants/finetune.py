"""Fine-tuning a tenant: adapters and a head over the PLOT features that serving will see (HMI 5.2).

The same loop trains the comparisons of the evaluation, see `hplm_builder.tenants.bodies`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hplm.adapters.tenant import Head, Pooling
from hplm.core.settings import REDUCTION_FACTOR, at_least
from hplm.core.wire import LabelledSpan
from hplm.engine.encode import pool
from hplm.errors import ConfigError
from hplm.models.device import CPU, computing_in
from hplm.reporting.progress import Report, silent
from hplm.tasks.task import Scale, Task
from hplm.tasks.task_loader import task_named
from hplm_builder.convert.checkpoint import Checkpoint, digest_of, random_state, set_random_state
from hplm_builder.convert.learning_rate import triangle
from hplm_builder.data.labelled import LabelledData
from hplm_builder.tenants.bodies import AdapterModel, copy_state, fastest_format
from hplm_builder.tenants.dev_scores import DevScore
from hplm_builder.tenants.head_start import LEAST_SCORE, examples_to_fit, fit_head, may_be_fitted
from hplm_builder.tenants.judging import dev_score_of, mistakes_of, predict, scores_of
from hplm_builder.tenants.prepared import Parts, Prepared, count_tokens, packed_batches

# Training a token costs about three times what predicting a token does: forward once, backward twice.
TRAINING_COST = 3
# The learning rate of transitions, which start at zero: the rates of full fine-tuning would hardly move them.
TRANSITIONS_RATE = 1e-2
# The share of a run's epochs from which on it ends if it is not ahead of its rival: docs/decisions.md says what that changed.
RACED_SHARE = 0.3


@dataclass(frozen=True)
class TrainSettings:
    """How to fine-tune. Of several learning rates, the rate with the best dev score is kept.

    A batch is about `batch_examples` texts, see `packed_batches`. The weights of the epoch with the best dev score are kept,
    or of a later epoch that the task allows (`Task.late_epoch_tolerance`). A run ends `patience` epochs after the epoch it
    keeps, once a score is above 0. The adapters of a new tenant have a bottleneck of the hidden size over `reduction_factor`;
    `fine_tune` does not read that, because it is handed bodies. Without `keeps_start`, an update keeps an epoch even if the
    version that it goes on from is better.
    """

    epochs: int = 10
    learning_rates: tuple[float, ...] = (2e-3,)
    batch_examples: int = 16
    weight_decay: float = 0.01
    dropout: float = 0.1
    pooling: str = "mean"
    seed: int = 0
    patience: int = 5
    reduction_factor: int = REDUCTION_FACTOR
    keeps_start: bool = True

    def __post_init__(self) -> None:
        if self.epochs < 1 or not self.learning_rates or min(self.learning_rates) <= 0:
            raise ConfigError("epochs must be at least 1 and learning rates above 0")
        if not all(map(math.isfinite, self.learning_rates)) or self.seed < 0:
            raise ConfigError("learning rates must be finite and the seed at least 0")
        at_least(self, 1, "patience", "reduction_factor", "batch_examples")
        if self.pooling not in get_args(Pooling):
            raise ConfigError(f"pooling must be cls or mean, got {self.pooling!r}")


@dataclass(frozen=True)
class Trained:
    """The best of the runs by dev score: `body` and `head` hold its weights.

    `curve` has a row for each epoch of each run: `learning_rate` (the run's), `epoch`, train `loss`, `dev` score, and `rate`,
    the last learning rate of the epoch's schedule. `mistakes` are those of `Task.mistakes`, each by part: dev and test.
    `dev` is the dev score with its chance. `is_beaten` says that the run ended early, not ahead of its rival, and has no test
    scores. `first_head` has the head's weights before the first epoch, which a rival begins with if they were fitted.
    """

    body: nn.Module
    head: Head
    scores: dict[str, float]
    learning_rate: float
    best_epoch: int
    curve: list[dict[str, float]]
    mistakes: dict[str, Any]
    dev: DevScore
    first_head: dict[str, Tensor]
    is_beaten: bool = False

    def highest_by(self, epoch: int) -> float:
        """Return the highest dev score of the kept run until the end of an epoch."""
        run = (row for row in self.curve if row["learning_rate"] == self.learning_rate)
        return max((row["dev"] for row in run if row["epoch"] <= epoch), default=-math.inf)


def fine_tune(
    make_body: Callable[[], nn.Module],
    hidden_size: int,
    data: LabelledData,
    parts: Parts,
    settings: TrainSettings,
    report: Report = silent,
    *,
    start: Head | None = None,
    rival: Trained | None = None,
    device: torch.device = CPU,
) -> Trained:
    """Train on `device` once for each learning rate, keep the best epoch of the best rate, and score dev and test.

    `parts` are train, dev and test. A new head may be fitted before the body is trained, see
    `hplm_builder.tenants.head_start`. With `start`, the head goes on from it, and the untrained body and head are epoch 0:
    nothing with a lower dev score is kept, unless the settings say so. After RACED_SHARE of its epochs a run ends as soon as
    its best dev score is not above that of the `rival` until then. Raises ConfigError if training diverges at every rate, and
    what `report` raises.
    """
    train, dev, test = parts
    fitted = [*examples_to_fit(train, settings.seed), *dev] if start is None and may_be_fitted(data) else []
    before = [*dev] if start is not None else fitted
    ticker = _Ticker(report, settings, parts, count_tokens(before))
    best: _Run | None = None
    curve: list[dict[str, float]] = []
    scale = task_named(data.task).scale([example.source for example in train])
    for number, rate in enumerate(settings.learning_rates, 1):
        torch.manual_seed(settings.seed)
        body, head = make_body().to(device), TaskHead(hidden_size, data, start).to(device)
        run = _Run(data, settings, rate, body, head, scale, [*train, *dev], rival)
        run.train(train, dev, ticker, start)
        ticker.end_run(number)
        curve += run.curve
        if math.isfinite(run.best_score):
            # The weights of the worse run are let go at once: a whole model for each rate would fill the memory.
            best = run if best is None or run.best_score > best.best_score else best
    if best is None:
        raise ConfigError(f"training diverged at learning rates {settings.learning_rates}: choose smaller ones")
    best.body.load_state_dict(best.best_body)
    scores: dict[str, float] = {}
    mistakes: dict[str, Any] = {}
    # A checkpoint holds no answers.
    on_dev = best.best_answers or predict(
        best.body, best.best_head, data, dev, settings.pooling, ticker.predicted, device
    )
    judged = [("dev", dev, on_dev)]
    if test and not best.is_beaten:
        on_test = predict(best.body, best.best_head, data, test, settings.pooling, ticker.predicted, device)
        judged.append(("test", test, on_test))
    for name, part, answers in judged:
        scores |= {f"{name}_{key}": value for key, value in scores_of(data, part, answers).items()}
        for kind, values in mistakes_of(data, part, answers).items():
            mistakes.setdefault(kind, {})[name] = values
    report("fine-tune", 1.0)
    chance = dev_score_of(data, dev, on_dev)
    return Trained(
        best.body,
        best.best_head,
        scores,
        best.rate,
        best.best_epoch,
        curve,
        mistakes,
        chance,
        best.first_head,
        best.is_beaten,
    )


class TaskHead(nn.Linear):
    """A tenant's head while it is trained; `forbidden` marks transitions that no answer makes.

    A head that goes on from `start` keeps the word window of `start`.
    """

    forbidden: Tensor

    def __init__(self, hidden_size: int, data: LabelledData, start: Head | None = None) -> None:
        task = task_named(data.task)
        window = task.new_word_window if start is None else start.word_window(data.labels)
        super().__init__(hidden_size, window * len(data.labels))
        self.transitions: nn.Parameter | None = None
        if task.has_transitions:
            forbidden = torch.from_numpy(task.forbidden_transitions(data.labels).copy())
            self.register_buffer("forbidden", forbidden, persistent=False)
            self.transitions = nn.Parameter(torch.zeros_like(forbidden))

    def to_served(self, scale: Scale) -> Head:
        """Return the head that gives values as they stand in the data."""
        weight, bias = self.weight.detach().cpu().numpy(), self.bias.detach().cpu().numpy()
        transitions = None if self.transitions is None else self.transitions.detach().cpu().numpy().copy()
        deviation = np.float32(scale.deviation)
        return Head(weight * deviation, bias * deviation + np.float32(scale.mean), transitions)

    def go_on_from(self, start: Head, scale: Scale) -> None:
        """Load the weights of which `to_served` makes `start`."""
        bias = (start.bias - np.float32(scale.mean)) / np.float32(scale.deviation)
        state = {"weight": torch.tensor(start.weight / np.float32(scale.deviation)), "bias": torch.tensor(bias)}
        if start.transitions is not None:
            state["transitions"] = torch.tensor(start.transitions)
        # A tagging from before taggings had transitions begins with zeros.
        self.load_state_dict(state, strict=self.transitions is None)


class _Ticker:
    """Counts work in tokens, so that progress is even."""

    def __init__(self, report: Report, settings: TrainSettings, parts: Parts, before: int) -> None:
        """`before`: tokens that a run's head is fitted to and judged by before the first epoch."""
        train, dev, test = (count_tokens(part) for part in parts)
        self._report = report
        self._per_run = before + settings.epochs * (TRAINING_COST * train + dev)
        self._total = len(settings.learning_rates) * self._per_run + test
        self._done = 0
        # Called between two steps, see `Checkpoint.reached`.
        self.reached: Callable[[], None] = lambda: None

    def trained(self, tokens: int) -> None:
        self.predicted(TRAINING_COST * tokens)

    def predicted(self, tokens: int) -> None:
        self._done += tokens
        self._report("fine-tune", min(1.0, self._done / self._total))
        self.reached()

    def end_run(self, number: int) -> None:
        """Count run `number`, from 1, as done, even if it stopped early."""
        self._done = number * self._per_run


class _Run:
    """Training at one learning rate."""

    def __init__(
        self,
        data: LabelledData,
        settings: TrainSettings,
        rate: float,
        body: nn.Module,
        head: TaskHead,
        scale: Scale,
        examples: Sequence[Prepared],
        rival: Trained | None,
    ) -> None:
        """`examples` are those that the run trains on and is judged by."""
        self.rate = rate
        self.body = body
        self.curve: list[dict[str, float]] = []
        self.best_score = -math.inf
        self.best_epoch = 0
        self._start_score = self._highest = -math.inf
        self.best_body: dict[str, Tensor] = {}
        self.best_head = head.to_served(scale)
        self.best_answers: list[list[LabelledSpan]] = []
        self.first_head: dict[str, Tensor] = {}
        self.is_beaten = False
        self._data = data
        self._task = task_named(data.task)
        self._settings = settings
        self._head = head
        self._scale = scale
        self._rival = rival
        self._trainer = Trainer(self._task, settings, rate, body, head, scale)
        self._step, self._loss, self._rate = 0, 0.0, 0.0
        self._checkpoint = Checkpoint.of("fine-tune", lambda: self._identity(examples))

    def train(self, train: list[Prepared], dev: list[Prepared], ticker: _Ticker, start: Head | None) -> None:
        """Train, from the run's checkpoint if there is one. The checkpoint of a run that has ended holds what it gives."""
        saved = self._checkpoint.load(self._head.weight.device)
        if saved is not None:
            self._restore(saved)
        elif start is not None:
            self._head.go_on_from(start, self._scale)
            if self._settings.keeps_start:
                self._start_score = self._judge(0, dev, ticker)
        elif may_be_fitted(self._data):
            if self._rival is None:
                self._begin_with_a_fitted_head(train, dev, ticker)
            else:
                # Untrained adapters of every width change nothing, so that the same head fits.
                self._head.load_state_dict(self._rival.first_head)
        if saved is None:
            self.first_head = copy_state(self._head)
        if saved is None or "body" in saved:
            ticker.reached = self._checkpoint.reached
            with self._checkpoint.keeping(self._state):
                self._descend(train, dev, ticker)
            self._checkpoint.save({"kept": self._kept(), "curve": self.curve})

    def _descend(self, train: list[Prepared], dev: list[Prepared], ticker: _Ticker) -> None:
        settings = self._settings
        rng = np.random.default_rng(settings.seed)
        steps = len(packed_batches(train, settings.batch_examples, rng)) * settings.epochs
        step, done_before = 0, self._step
        for epoch in range(1, settings.epochs + 1):
            batches = packed_batches(train, settings.batch_examples, rng)
            is_judged = step + len(batches) < done_before
            if step >= done_before:
                self._loss = 0.0
            for batch in batches:
                if step >= done_before:
                    self._rate = self.rate * triangle(step, steps, self._task.warmup_share)
                    self._loss += self._trainer.step(batch, self._rate) * len(batch) / len(train)
                    self._step = step + 1
                step += 1
                ticker.trained(count_tokens(batch))
            if is_judged:
                continue
            if not math.isfinite(self._loss):
                return
            score = self._judge(epoch, dev, ticker)
            row = {"loss": self._loss, "dev": score, "rate": self._rate}
            rounded = {key: float(f"{value:.5g}") for key, value in row.items()}
            self.curve.append({"learning_rate": self.rate, "epoch": epoch, **rounded})
            # A tagging may find nothing at all in its first epochs, whose scores are all 0.
            if self.best_score > 0 and epoch - self.best_epoch >= settings.patience:
                return
            if self._rival is not None and math.ceil(RACED_SHARE * settings.epochs) <= epoch < settings.epochs:
                # If the rival had learned nothing by then, the race says nothing.
                self.is_beaten = 0 < self._rival.highest_by(epoch) >= max(row["dev"] for row in self.curve)
                if self.is_beaten:
                    return

    def _identity(self, examples: Sequence[Prepared]) -> dict[str, Any]:
        """Return what the run depends on, in JSON values."""
        frozen = self.body.upper.state_dict() if isinstance(self.body, AdapterModel) else {}
        weights = [*self.body.state_dict().values(), *self._head.state_dict().values(), *frozen.values()]
        values = [tensor for example in examples for tensor in (example.features, example.targets)]
        settings = {**asdict(self._settings), "learning_rates": self.rate}
        return {
            **settings,
            "labels": [*self._data.labels],
            "raced": self._rival is not None,
            "start": digest_of([*weights, *values]),
        }

    def _kept(self) -> dict[str, Any]:
        head = {name: torch.from_numpy(array) for name, array in self.best_head.arrays.items()}
        scores = [self.best_score, self._start_score, self._highest]
        return {
            "body": self.best_body,
            "head": head,
            "scores": scores,
            "epoch": self.best_epoch,
            "first_head": self.first_head,
            "is_beaten": self.is_beaten,
        }

    def _state(self) -> dict[str, Any]:
        """Return the state between two steps, of tensors and plain values."""
        return {
            "step": self._step,
            "loss": self._loss,
            "rate": self._rate,
            "kept": self._kept(),
            "curve": self.curve,
            "body": self.body.state_dict(),
            "head": self._head.state_dict(),
            "optimizer": self._trainer.optimizer.state_dict(),
            "random": random_state(self._head.weight.device),
        }

    def _restore(self, saved: dict[str, Any]) -> None:
        kept, self.curve = saved["kept"], saved["curve"]
        self.best_body, self.best_epoch = kept["body"], kept["epoch"]
        self.best_score, self._start_score, self._highest = kept["scores"]
        self.first_head, self.is_beaten = kept["first_head"], kept["is_beaten"]
        self.best_head = Head(**{name: value.cpu().numpy() for name, value in kept["head"].items()})
        if "body" in saved:
            self._step, self._loss, self._rate = saved["step"], saved["loss"], saved["rate"]
            self.body.load_state_dict(saved["body"])
            self._head.load_state_dict(saved["head"])
            self._trainer.optimizer.load_state_dict(saved["optimizer"])
            set_random_state(saved["random"], self._head.weight.device)

    def _begin_with_a_fitted_head(self, train: list[Prepared], dev: list[Prepared], ticker: _Ticker) -> None:
        """Fit the head; if it then scores badly on dev, restore it."""
        made = copy_state(self._head)
        few = examples_to_fit(train, self._settings.seed)
        fit_head(self._head, self.body, self._data, few, self._settings.pooling, ticker.predicted)
        if self._score(self._answer(self._head.to_served(self._scale), dev, ticker), dev) < LEAST_SCORE:
            self._head.load_state_dict(made)

    def _judge(self, epoch: int, dev: list[Prepared], ticker: _Ticker) -> float:
        head = self._head.to_served(self._scale)
        answers = self._answer(head, dev, ticker)
        score = self._score(answers, dev)
        # After one step with a gradient that is NaN, the head's weights are NaN too.
        if np.isfinite(head.weight).all() and self._is_kept(score, dev):
            self.best_score, self.best_epoch = score, epoch
            self.best_body, self.best_head, self.best_answers = copy_state(self.body), head, answers
        return score

    def _is_kept(self, score: float, dev: list[Prepared]) -> bool:
        """Return whether an epoch replaces the epoch that was kept before it."""
        self._highest = max(self._highest, score)
        tolerance = self._task.late_epoch_tolerance(self._highest, [example.source for example in dev])
        if tolerance is None:
            return score > self.best_score
        # With few entities, the tolerance alone would keep an epoch that finds none.
        least = self._highest - tolerance if score > 0 else self._highest
        return score > self._start_score and score >= least

    def _answer(self, head: Head, dev: list[Prepared], ticker: _Ticker) -> list[list[LabelledSpan]]:
        device = self._head.weight.device
        return predict(self.body, head, self._data, dev, self._settings.pooling, ticker.predicted, device)

    def _score(self, answers: list[list[LabelledSpan]], dev: list[Prepared]) -> float:
        return scores_of(self._data, dev, answers)[self._task.metric]


class Trainer:
    """Takes optimiser steps on a body and a head."""

    def __init__(
        self, task: Task, settings: TrainSettings, rate: float, body: nn.Module, head: TaskHead, scale: Scale
    ) -> None:
        self._task = task
        self._settings = settings
        self._body = body
        self._head = head
        self._scale = scale
        self._params = [p for p in [*body.parameters(), *head.parameters()] if p.requires_grad]
        groups = [{"params": [p for p in self._params if p is not head.transitions], "share": 1.0}]
        if head.transitions is not None:
            groups.append({"params": [head.transitions], "share": TRANSITIONS_RATE / rate})
        self.optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=settings.weight_decay, fused=True)

    def step(self, batch: list[Prepared], rate: float) -> float:
        """Train on a batch at learning rate `rate`; return the loss before the step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["share"]
        loss = self._loss(batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self._params, 1.0)
        self.optimizer.step()
        return loss.item()

    def _loss(self, batch: list[Prepared]) -> Tensor:
        device = self._head.weight.device
        texts = [example.tokens for example in batch]
        lengths = [len(tokens) for tokens in texts]
        features = torch.cat([example.features for example in batch]).to(device)
        with computing_in(*fastest_format(device)):
            hidden = self._body(features, lengths)
        parts = hidden.float().split(lengths)
        states = torch.cat([pool(self._task, self._settings.pooling, part) for part in parts])
        outputs = self._head(F.dropout(states, self._settings.dropout))
        targets = torch.cat([example.targets for example in batch]).to(device)
        transitions = None if self._head.transitions is None else self._head.transitions + self._head.forbidden
        return self._task.loss(outputs, targets, texts, self._scale, transitions)
