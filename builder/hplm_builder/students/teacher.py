"""The teacher of students: a tenant's best model on dev. Students learn its representations and soft labels, computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hplm.adapters.tenant import Head, Tenant
from hplm.core.settings import REDUCTION_FACTOR
from hplm.engine.open_domain import Domain
from hplm.errors import ConfigError, DataError
from hplm.models.base import Base
from hplm.reporting.progress import Report
from hplm.tasks.classification import Classification
from hplm.tasks.regression import Regression
from hplm.tasks.task_loader import task_named
from hplm_builder.data.labelled import LabelledData
from hplm_builder.students.ensemble import answers_of, pooled_states
from hplm_builder.tenants.bodies import adapter_body
from hplm_builder.tenants.finetune import TRAINING_COST, TrainSettings, fine_tune
from hplm_builder.tenants.judging import dev_score_of
from hplm_builder.tenants.prepared import Prepared, Room, count_tokens, counted, prepare
from hplm_builder.tenants.pseudo_labels import TEACHER_RATE, upper_body
from hplm_builder.tenants.tenant_build import estimate_fine_tune, tune
from hplm_builder.tenants.trained_layers import trained_layers

# What a step of full fine-tuning costs beside a step of an adapter: all weights have gradients, not the inputs alone.
FULL_COST = 1.5
# The shares of one teacher's work, by step of its progress.
STEPS = {"features": 0.15, "fine-tune": 0.75, "represent": 0.1}


@dataclass(frozen=True)
class Taught:
    """The representations and soft labels that a teacher gives, by part (`train`, `dev`, `unlabelled`).

    `states` `[n, Ht]` are what its head reads, pooled. `outputs` are soft labels as `Task.loss` takes them: probabilities
    `[n, labels]` of a classification, values `[n]` of a regression. `head` is the teacher's. `about` has, in JSON values, its
    `name`, its `base`, its `dev_score`, and the dev scores of all `candidates`.
    """

    states: dict[str, Tensor]
    outputs: dict[str, Tensor]
    head: Head
    about: dict[str, Any]

    @property
    def dev_score(self) -> float:
        """The teacher's score on dev."""
        return float(self.about["dev_score"])


def check_task(task: str) -> None:
    """Raise DataError for a task that students cannot learn."""
    if not isinstance(task_named(task), Classification | Regression):
        raise DataError(
            f"students are for classifications and regressions, not for a {task}: create the tenant without students"
        )


@dataclass(frozen=True)
class Candidate:
    """A model that may teach: an adapter over a base, or all upper layers of the base, trained (`is_full`).

    `tenant` has the adapter, with the `number` of its version. Without it a new adapter is trained, with `reduction_factor`.
    """

    name: str
    base: Base
    lookup: Domain
    tenant: Tenant | None = None
    number: int = 0
    is_full: bool = False
    reduction_factor: int = REDUCTION_FACTOR

    @property
    def identity(self) -> list[Any]:
        """The name, the base and the version of the candidate, in JSON values."""
        return [self.name, self.base.fingerprint, self.number]

    def texts_computed(self, data: LabelledData, settings: TrainSettings) -> float:
        """Return how many texts `teach` computes, as predictions of a text; training costs more."""
        texts = sum(data.counts.values()) - len(data.test)
        if self.tenant is not None:
            return texts
        return texts + settings.epochs * (TRAINING_COST * len(data.train) + len(data.dev))

    def teach(self, data: LabelledData, settings: TrainSettings, report: Report) -> Taught:
        """Train the candidate if need be, and compute what it says of all texts of `data`.

        Raises ConfigError if the training diverges, DataError as `prepare` does, and what `report` raises.
        """
        encoder, room = self.base.load_text_encoder(), Room()
        upper, featurise, token_bytes = trained_layers(self.base, self.lookup, all_train=self.is_full)
        room.expect(data, encoder, token_bytes)
        named = {part: texts for part, texts in parts_of(data).items() if texts}
        tick = counted("features", sum(map(len, named.values())), report)
        prepared = {part: prepare(texts, data, encoder, featurise, tick, room) for part, texts in named.items()}
        labelled = prepared["train"], prepared["dev"], list[Prepared]()
        body: nn.Module
        if self.is_full:
            rate = replace(settings, learning_rates=(TEACHER_RATE,))
            trained = fine_tune(upper_body(self.base), self.base.config.hidden_size, data, labelled, rate, report)
            body, head, pooling = trained.body, trained.head, settings.pooling
        else:
            tenant = self.tenant
            if tenant is None:
                factors = (self.reduction_factor,)
                tenant, _ = tune(self.base, upper, "teacher", data, labelled, settings, report, factors=factors)
            body = adapter_body(upper, 1, tenant.adapter, at=tenant.card.adapter_at)()
            head, pooling = tenant.head, tenant.card.pooling
        about = {"name": self.name, "base": self.base.config.name}
        return _taught(about, body, head, pooling, data, prepared, report)


def parts_of(data: LabelledData) -> dict[str, Sequence[Any]]:
    """Return the parts of data that a teacher says something of, by name."""
    return {"train": data.train, "dev": data.dev, "unlabelled": data.unlabelled}


def _taught(
    about: dict[str, Any],
    body: nn.Module,
    head: Head,
    pooling: str,
    data: LabelledData,
    prepared: dict[str, list[Prepared]],
    report: Report,
) -> Taught:
    tick = counted("represent", sum(map(count_tokens, prepared.values())), report)
    states = {part: pooled_states(body, data, examples, pooling, tick) for part, examples in prepared.items()}
    outputs = {part: soft_labels(part_states, head, data.task) for part, part_states in states.items()}
    score = dev_score_of(data, prepared["dev"], answers_of(states["dev"], head, data, prepared["dev"]))
    return Taught(states, outputs, head, {**about, "dev_score": score.value})


def soft_labels(states: Tensor, head: Head, task: str) -> Tensor:
    """Return a head's soft labels for representations `[n, H]`, see `Taught.outputs`."""
    outputs = states @ torch.from_numpy(head.weight).T + torch.from_numpy(head.bias)
    return outputs.softmax(-1) if isinstance(task_named(task), Classification) else outputs[:, 0]


def best_teacher(
    candidates: Sequence[Candidate],
    data: LabelledData,
    settings: TrainSettings,
    report: Callable[[Candidate], Report],
) -> Taught:
    """Return what the candidate with the best dev score says; the first of equal ones.

    A candidate whose training diverges is left out, and `about` names it under `diverged`. Raises ConfigError if all diverge,
    and what `Candidate.teach` raises.
    """
    scores: dict[str, float] = {}
    diverged: list[str] = []
    best: Taught | None = None
    for candidate in candidates:
        try:
            taught = candidate.teach(data, settings, report(candidate))
        except ConfigError:
            diverged.append(candidate.name)
            continue
        scores[candidate.name] = taught.dev_score
        if best is None or taught.dev_score > best.dev_score:
            best = taught
    if best is None:
        raise ConfigError("the training of each possible teacher diverged: choose a lower learning rate")
    more = {"diverged": diverged} if diverged else {}
    return replace(best, about={**best.about, "candidates": scores, **more})


def estimate_teacher(candidate: Candidate, data: LabelledData, settings: TrainSettings) -> float:
    """Return the seconds that `Candidate.teach` would take on this machine now, if no training ends early."""
    labelled = replace(data, unlabelled=[])
    if candidate.tenant is not None:
        settings = replace(settings, epochs=1)  # a trained model only predicts, which costs less than an epoch
    factors = (candidate.reduction_factor,)
    seconds = estimate_fine_tune(labelled, settings, candidate.base, candidate.lookup, factors=factors)
    return FULL_COST * seconds if candidate.is_full else seconds
