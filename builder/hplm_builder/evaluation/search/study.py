"""A study: the variants, tasks, seeds and budget that an evaluation compares.

A variant is a row of the comparison. It names the source of its features and the body that trains on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hplm.adapters.packed import Place
from hplm.core.settings import REDUCTION_FACTOR
from hplm.errors import ConfigError
from hplm.models.base import Base
from hplm.reporting.progress import Report
from hplm.tasks.task_loader import task_named
from hplm_builder.data.labelled import LabelledData
from hplm_builder.evaluation.search.budget import Budget
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.tenants.bodies import ADAPTER_AT, adapter_body, fastest_format
from hplm_builder.tenants.finetune import Trained, TrainSettings
from hplm_builder.tenants.head_start import may_be_fitted
from hplm_builder.tenants.prepared import Featurise
from hplm_builder.tenants.pseudo_labels import TEACHER_RATE, upper_body
from hplm_builder.tenants.tenant_build import token_ids

MakeBody = Callable[[], nn.Module]
About = Callable[[EvalTask], Mapping[str, Any]]
# The middle of each method's grid of learning rates: training is neither slow nor unsteady there.
RATES: Mapping[str, float] = {
    "dedicated": 1e-4,
    "shared": 1e-2,
    "adapter": 2e-3,
    "plot": TEACHER_RATE,
    "hbert": 2e-3,
}


@dataclass(frozen=True)
class FeatureSource:
    """A source of features. Sources with the same `name` give the same features; `open` may first build what a task needs."""

    name: str
    open: Callable[[EvalTask, Report], Featurise]


TOKEN_IDS = FeatureSource("tokens", lambda task, report: token_ids)


@dataclass(frozen=True)
class Variant:
    """One row of a comparison.

    `body` is called after `source` is open. `rate` is the middle of the grid of learning rates. `about` returns, in JSON
    values, what a task's results depend on.
    `measure_more(task, data, trained)` measures a trained model further. It costs `extra_predictions` predictions of the
    test part. The time estimate measures `costs_as` instead of the variant, if it is given. A variant `with_pseudo_labels`
    also learns from as many unlabelled texts, see `hplm_builder.tenants.pseudo_labels`.
    """

    name: str
    base: Base
    source: FeatureSource
    body: Callable[[EvalTask], MakeBody]
    rate: float
    about: About
    measure_more: Callable[[EvalTask, LabelledData, Trained], dict[str, Any]] | None = None
    extra_predictions: int = 0
    costs_as: Variant | None = None
    with_pseudo_labels: bool = False


def hbert_body(
    base: Base, device: torch.device, at: Place = ADAPTER_AT, reduction_factor: int = REDUCTION_FACTOR
) -> Callable[[EvalTask], MakeBody]:
    """Return a body of adapters in the base's frozen upper layers."""
    return lambda task: adapter_body(base.load_upper(), reduction_factor, device=device, at=at)


def plot_body(base: Base) -> Callable[[EvalTask], MakeBody]:
    """Return a body in which all of the base's upper layers train."""
    return lambda task: upper_body(base)


def with_adapters(about: About, at: Place = ADAPTER_AT, reduction_factor: int = REDUCTION_FACTOR) -> About:
    """Return `about` with the place and the size of the adapters, on which results depend too.

    HMI's place and size are left out, because results from before there was a choice do not name them.
    """
    adapters: dict[str, Any] = {} if at == "attention" else {"adapter_at": at}
    if reduction_factor != REDUCTION_FACTOR:
        adapters["reduction_factor"] = reduction_factor
    return lambda task: {**about(task), **adapters}


@dataclass(frozen=True)
class Study:
    """The variants to compare on the tasks, within a budget, with each of the seeds."""

    tasks: Sequence[EvalTask]
    variants: Sequence[Variant]
    budget: Budget
    seeds: tuple[int, ...]
    pooling: str
    device: torch.device

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(
                f"--seed: give at least one, each only once; got {', '.join(map(str, self.seeds)) or 'none'}"
            )

    def about(self, task: EvalTask, variant: Variant) -> dict[str, Any]:
        """Return what results depend on besides seed and learning rate, in JSON values."""
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
            # Only present where it applies, so that older results stay valid if they were made in the same way.
            **task_named(task.data.task).training_notes,
            **({"head": "fitted first where it does well"} if may_be_fitted(task.data) else {}),
            **(
                {"unlabelled": f"as many, labelled by all upper layers at {TEACHER_RATE:g}"}
                if variant.with_pseudo_labels
                else {}
            ),
            **variant.about(task),
        }

    def data(self, task: EvalTask, variant: Variant, seed: int) -> LabelledData:
        """Return the examples that a run of the variant trains on and is judged by."""
        return task.sample(self.budget, seed, unlabelled=variant.with_pseudo_labels)

    def train_settings(self, seed: int, rate: float) -> TrainSettings:
        """Return the settings of one run. Raises ConfigError."""
        return TrainSettings(
            epochs=self.budget.epochs,
            learning_rates=(rate,),
            batch_examples=self.budget.batch_examples,
            pooling=self.pooling,
            seed=seed,
            patience=self.budget.patience,
        )

    @property
    def searched_seeds(self) -> tuple[int, ...]:
        """The seeds that have their own search over learning rates."""
        return self.seeds if self.budget.search_every_seed else self.seeds[:1]

    @property
    def runs_each(self) -> int:
        """The number of runs of a variant on a task, if no grid is widened."""
        searched = len(self.searched_seeds)
        return searched * len(self.budget.factors) + len(self.seeds) - searched

    def pairs(self) -> Iterator[tuple[EvalTask, Variant]]:
        """Yield every task with every variant, in the order of `variants`, so that neighbours can share features."""
        for task in self.tasks:
            for variant in self.variants:
                yield task, variant
