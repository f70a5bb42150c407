"""Variants: the rows of a comparison. A variant names the source of its features and the body that trains on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hplm.adapters.packed import Place
from hplm.core.settings import REDUCTION_FACTOR
from hplm.models.base import Base
from hplm.reporting.progress import Report
from hplm_builder.data.labelled import LabelledData
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.tenants.bodies import ADAPTER_AT, adapter_body
from hplm_builder.tenants.finetune import Trained
from hplm_builder.tenants.prepared import Featurise
from hplm_builder.tenants.pseudo_labels import TEACHER_RATE, upper_body

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
