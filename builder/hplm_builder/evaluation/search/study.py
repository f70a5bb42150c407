"""A study: the variants, tasks, seeds and budget that an evaluation compares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hplm.errors import ConfigError
from hplm.tasks.task_loader import task_named
from hplm_builder.data.labelled import LabelledData
from hplm_builder.evaluation.search.budget import Budget
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.variants import Variant
from hplm_builder.tenants.bodies import fastest_format
from hplm_builder.tenants.finetune import TrainSettings
from hplm_builder.tenants.head_start import may_be_fitted
from hplm_builder.tenants.pseudo_labels import TEACHER_RATE


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
        return self.budget.train_settings(seed, rate, self.pooling)

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
