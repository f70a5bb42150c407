"""Fine-tuning a tenant: adapters and a head over the PLOT features that serving will see (HMI 5.2).

The same loop trains the comparisons of the evaluation, see `hplm_builder.tenants.bodies`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hplm.adapters.tenant import Head, Pooling
from hplm.core.settings import REDUCTION_FACTOR, at_least
from hplm.engine.encode import pool
from hplm.errors import ConfigError
from hplm.models.device import CPU, computing_in
from hplm.reporting.progress import Report, silent
from hplm.tasks.decode import beginnings, word_ranges
from hplm_builder.convert.learning_rate import triangle
from hplm_builder.data.labelled import LabelledData
from hplm_builder.tenants.bodies import copy_state, fastest_format
from hplm_builder.tenants.crf import sequence_loss
from hplm_builder.tenants.head_start import LEAST_ACCURACY, examples_to_fit, fit_head, may_be_fitted
from hplm_builder.tenants.judging import mistakes_of, predict, scores_of
from hplm_builder.tenants.prepared import IGNORED, Parts, Prepared, count_tokens, packed_batches
from hplm_builder.tenants.scores import METRICS

# Training a token costs about three times what predicting it does: forward, and backward twice.
TRAINING_COST = 3
# Of a tagging's transitions, which start from no preference: full fine-tuning's rates would hardly move them.
TRANSITIONS_RATE = 1e-2
# Of how many words, one of them its own, a new tagging's head tells each tag: an odd number, MOST_WORDS at most.
WORD_WINDOW = 3
# For how many of a run's steps the learning rate goes up. With 0.1 one tagging of three over a base of 768 learned nothing:
# docs/decisions.md.
WARMUP_SHARE, TAGGING_WARMUP_SHARE = 0.1, 0.3
# By how many standard errors of its dev score an epoch of a tagging may be below the best one and still be kept for being
# later: later ones were trained at lower rates, and dev tells so few entities apart that the best of ten is one by chance.
CHANCE = 2.0


@dataclass(frozen=True)
class TrainSettings:
    """How to fine-tune. Of several learning rates the one with the best dev score stays.

    A batch is about `batch_examples` texts, see `packed_batches`. The best epoch's weights are kept, of a tagging those of the
    last one that is below the best by chance at most (CHANCE). A rate's run ends `patience` epochs after that one, once there
    is a score above 0. A new tenant's adapters have a bottleneck of the hidden size over `reduction_factor` (`fine_tune`,
    which is handed bodies, does not ask).
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

    `curve` has a row an epoch of each run: `learning_rate` (the run's), `epoch`, train `loss`, `dev` score, and the `rate` that
    the schedule had come to. `mistakes`, of dev and test: `confusion` of a classification, `types` of a tagging.
    """

    body: nn.Module
    head: Head
    scores: dict[str, float]
    learning_rate: float
    best_epoch: int
    curve: list[dict[str, float]]
    mistakes: dict[str, Any]


def fine_tune(
    make_body: Callable[[], nn.Module],
    hidden_size: int,
    data: LabelledData,
    parts: Parts,
    settings: TrainSettings,
    report: Report = silent,
    *,
    start: Head | None = None,
    device: torch.device = CPU,
) -> Trained:
    """Train once a learning rate on `device`, keep an epoch by its dev score, of the best rate, and score dev and test.

    `parts` are train, dev and test. The head of a new classification of many labels may be fitted before the body is trained,
    see `hplm_builder.tenants.head_start`. With `start`, the head goes on from it and what `make_body` starts from is epoch 0:
    nothing worse on dev is kept. Raises ConfigError where no rate trains, and what `report` raises.
    """
    train, dev, test = parts
    fitted = [*examples_to_fit(train, settings.seed), *dev] if start is None and may_be_fitted(data) else []
    before = [*dev] if start is not None else fitted
    ticker = _Ticker(report, settings, parts, count_tokens(before))
    best: _Run | None = None
    curve: list[dict[str, float]] = []
    for number, rate in enumerate(settings.learning_rates, 1):
        torch.manual_seed(settings.seed)
        body, head = make_body().to(device), TaskHead(hidden_size, data, start).to(device)
        run = _Run(data, settings, rate, body, head, Scale.of(data.task, train))
        run.train(train, dev, ticker, start)
        ticker.end_run(number)
        curve += run.curve
        if math.isfinite(run.best_score):
            # The others' weights are let go at once: a whole model a rate would add up.
            best = run if best is None or run.best_score > best.best_score else best
    if best is None:
        raise ConfigError(f"training diverged at learning rates {settings.learning_rates}: choose smaller ones")
    best.body.load_state_dict(best.best_body)
    scores: dict[str, float] = {}
    mistakes: dict[str, Any] = {}
    for name, part in (("dev", dev), ("test", test)):
        if part:
            answers = predict(best.body, best.best_head, data, part, settings.pooling, ticker.predicted, device)
            scores |= {f"{name}_{key}": value for key, value in scores_of(data, part, answers).items()}
            for kind, found in mistakes_of(data, part, answers).items():
                mistakes.setdefault(kind, {})[name] = found
    report("fine-tune", 1.0)
    return Trained(best.body, best.best_head, scores, best.rate, best.best_epoch, curve, mistakes)


class TaskHead(nn.Linear):
    """What a tenant's Head is while it is trained; `forbidden` are transitions that no tagging makes.

    One that goes on from `start` reads as many words as that one does.
    """

    forbidden: Tensor

    def __init__(self, hidden_size: int, data: LabelledData, start: Head | None = None) -> None:
        window = new_word_window(data.task) if start is None else start.word_window(data.labels)
        super().__init__(hidden_size, window * len(data.labels))
        self.word_window = window
        self.transitions: nn.Parameter | None = None
        if data.task == "tagging":
            forbidden = torch.from_numpy(beginnings(data.labels).copy())
            self.register_buffer("forbidden", forbidden, persistent=False)
            self.transitions = nn.Parameter(torch.zeros_like(forbidden))


def new_word_window(task: str) -> int:
    """How many words a new tenant's tags are told from: docs/decisions.md has what more than the first token gives."""
    return WORD_WINDOW if task == "tagging" else 1


def reduction_factor_of(task: str, of_slots: int) -> int:
    """A new tenant's, where slots have `of_slots`: more than the usual width helps named entities alone (docs/decisions.md)."""
    return of_slots if task == "tagging" else max(of_slots, REDUCTION_FACTOR)


class _Ticker:
    """Counts work in tokens, so that progress goes on evenly."""

    def __init__(self, report: Report, settings: TrainSettings, parts: Parts, before: int) -> None:
        """`before`: tokens that a run's head is fitted to and judged by before its first epoch."""
        train, dev, test = (count_tokens(part) for part in parts)
        self._report = report
        self._per_run = before + settings.epochs * (TRAINING_COST * train + dev)
        self._total = len(settings.learning_rates) * self._per_run + dev + test
        self._done = 0

    def trained(self, tokens: int) -> None:
        self.predicted(TRAINING_COST * tokens)

    def predicted(self, tokens: int) -> None:
        self._done += tokens
        self._report("fine-tune", min(1.0, self._done / self._total))

    def end_run(self, number: int) -> None:
        """Run `number`, from 1, has done its part, also where it stopped early."""
        self._done = number * self._per_run


@dataclass(frozen=True)
class Scale:
    """Of a regression's values: a head learns them with mean 0 and deviation 1."""

    mean: float = 0.0
    deviation: float = 1.0

    @classmethod
    def of(cls, task: str, train: Sequence[Prepared]) -> Scale:
        if task != "regression":
            return cls()
        values = np.array([one.source.value for one in train])
        return cls(float(values.mean()), float(values.std()) or 1.0)

    def to_served(self, head: TaskHead) -> Head:
        """What gives values as they came."""
        weight, bias = head.weight.detach().cpu().numpy(), head.bias.detach().cpu().numpy()
        moves = None if head.transitions is None else head.transitions.detach().cpu().numpy().copy()
        scale = np.float32(self.deviation)
        return Head(weight * scale, bias * scale + np.float32(self.mean), moves)

    def from_served(self, head: Head) -> dict[str, Tensor]:
        """The state of the layer that `to_served` makes `head` of."""
        bias = (head.bias - np.float32(self.mean)) / np.float32(self.deviation)
        state = {"weight": torch.tensor(head.weight / np.float32(self.deviation)), "bias": torch.tensor(bias)}
        return state if head.transitions is None else {**state, "transitions": torch.tensor(head.transitions)}


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
    ) -> None:
        self.rate = rate
        self.body = body
        self.curve: list[dict[str, float]] = []
        self.best_score = -math.inf
        self.best_epoch = 0
        self._start_score = self._highest = -math.inf
        self.best_body: dict[str, Tensor] = {}
        self.best_head = scale.to_served(head)
        self._data = data
        self._settings = settings
        self._head = head
        self._scale = scale
        self._trainer = Trainer(data.task, settings, rate, body, head, scale)

    def train(self, train: list[Prepared], dev: list[Prepared], ticker: _Ticker, start: Head | None) -> None:
        settings = self._settings
        rng = np.random.default_rng(settings.seed)
        if start is not None:
            # A tagging from before it had transitions begins with none.
            self._head.load_state_dict(self._scale.from_served(start), strict=self._data.task != "tagging")
            self._start_score = self._judge(0, dev, ticker)
        elif may_be_fitted(self._data):
            self._begin_with_a_fitted_head(train, dev, ticker)
        warmup = TAGGING_WARMUP_SHARE if self._data.task == "tagging" else WARMUP_SHARE
        steps = len(packed_batches(train, settings.batch_examples, rng)) * settings.epochs
        step = 0
        for epoch in range(1, settings.epochs + 1):
            loss = rate = 0.0
            for batch in packed_batches(train, settings.batch_examples, rng):
                rate = self.rate * triangle(step, steps, warmup)
                loss += self._trainer.step(batch, rate) * len(batch) / len(train)
                step += 1
                ticker.trained(count_tokens(batch))
            if not math.isfinite(loss):
                return
            score = self._judge(epoch, dev, ticker)
            row = {"loss": loss, "dev": score, "rate": rate}
            rounded = {key: float(f"{value:.5g}") for key, value in row.items()}
            self.curve.append({"learning_rate": self.rate, "epoch": epoch, **rounded})
            # A tagging may find nothing at all for some epochs, and no score is better than another then.
            if self.best_score > 0 and epoch - self.best_epoch >= settings.patience:
                return

    def _begin_with_a_fitted_head(self, train: list[Prepared], dev: list[Prepared], ticker: _Ticker) -> None:
        """Unless it does badly on dev: then the head stays as it was made."""
        made = copy_state(self._head)
        few = examples_to_fit(train, self._settings.seed)
        fit_head(self._head, self.body, self._data, few, self._settings.pooling, ticker.predicted)
        if self._score(self._scale.to_served(self._head), dev, ticker) < LEAST_ACCURACY:
            self._head.load_state_dict(made)

    def _judge(self, epoch: int, dev: list[Prepared], ticker: _Ticker) -> float:
        head = self._scale.to_served(self._head)
        score = self._score(head, dev, ticker)
        # One step with a gradient that is no number leaves none in the head either.
        if np.isfinite(head.weight).all() and self._is_kept(score, dev):
            self.best_score, self.best_epoch = score, epoch
            self.best_body, self.best_head = copy_state(self.body), head
        return score

    def _is_kept(self, score: float, dev: list[Prepared]) -> bool:
        """Whether an epoch takes the place of the one that was kept before it."""
        if self._data.task != "tagging":
            return score > self.best_score
        self._highest = max(self._highest, score)
        entities = max(1, sum(len(one.source.entities) for one in dev))
        chance = CHANCE * math.sqrt(self._highest * (1 - self._highest) / entities)
        # Of few entities chance would let one be that finds none.
        least = self._highest - chance if score > 0 else self._highest
        return score > self._start_score and score >= least

    def _score(self, head: Head, dev: list[Prepared], ticker: _Ticker) -> float:
        device = self._head.weight.device
        answers = predict(self.body, head, self._data, dev, self._settings.pooling, ticker.predicted, device)
        return scores_of(self._data, dev, answers)[METRICS[self._data.task]]


class Trainer:
    """Takes optimiser steps on a body and a head."""

    def __init__(
        self, task: str, settings: TrainSettings, rate: float, body: nn.Module, head: TaskHead, scale: Scale
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
        self._optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=settings.weight_decay, fused=True)

    def step(self, batch: list[Prepared], rate: float) -> float:
        """Train on a batch at learning rate `rate`; returns the loss before it."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["share"]
        loss = self._loss(batch)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self._params, 1.0)
        self._optimizer.step()
        return loss.item()

    def _loss(self, batch: list[Prepared]) -> Tensor:
        device = self._head.weight.device
        lengths = [len(one.tokens) for one in batch]
        features = torch.cat([one.features for one in batch]).to(device)
        with computing_in(*fastest_format(device)):
            hidden = self._body(features, lengths)
        parts = hidden.float().split(lengths)
        pooled = torch.cat([pool(self._task, self._settings.pooling, part) for part in parts])
        found = self._head(F.dropout(pooled, self._settings.dropout))
        targets = torch.cat([one.targets for one in batch]).to(device)
        if self._task == "regression":
            return F.mse_loss(found[:, 0], (targets - self._scale.mean) / self._scale.deviation)
        if self._head.transitions is not None:
            by_text = zip(found.split(lengths), batch, strict=True)
            of_words = [self._of_words(part, word_ranges(one.tokens)) for part, one in by_text]
            moves = self._head.transitions + self._head.forbidden
            counts = [len(one) for one in of_words]
            return sequence_loss(torch.cat(of_words), targets[targets != IGNORED], counts, moves)
        return F.cross_entropy(found, targets)

    def _of_words(self, found: Tensor, words: Sequence[tuple[int, int]]) -> Tensor:
        """As `hplm.tasks.decode.word_logits`, of one text's words alone: `[T, n * labels]` -> `[words, labels]`."""
        window = self._head.word_window
        if window == 1:
            return found[[first for first, _ in words]]
        sizes = torch.tensor([last - first for first, last in words], device=found.device)
        means = torch.segment_reduce(found[words[0][0] : words[-1][1]], "mean", lengths=sizes)
        # Nothing beyond the ends of the text.
        padded = F.pad(means.view(len(words), window, -1), (0, 0, 0, 0, window // 2, window // 2))
        return torch.stack([padded[place : place + len(words), place] for place in range(window)]).sum(0)
