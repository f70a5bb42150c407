"""Baselines that a tenant must beat on its dev examples: one answer to everything, and a head alone over frozen layers."""

from __future__ import annotations

import torch

from hplm.core.settings import REDUCTION_FACTOR
from hplm.models.layers import UpperLayers
from hplm.reporting.progress import Report
from hplm.tasks.task_loader import task_named
from hplm_builder.data.labelled import LabelledData
from hplm_builder.tenants.bodies import adapter_body
from hplm_builder.tenants.dev_scores import DevScore
from hplm_builder.tenants.finetune import TaskHead, TrainSettings
from hplm_builder.tenants.head_start import examples_to_fit, fit_head
from hplm_builder.tenants.judging import dev_score_of, predict
from hplm_builder.tenants.prepared import Parts, count_tokens, counted


def constant_baseline(data: LabelledData) -> DevScore | None:
    """Return the dev score of the best single answer to everything; None if no model could be better."""
    task = task_named(data.task)
    if task.constant_score(data.dev) is None:
        return None

    def score(numbers: list[int]) -> float:
        part = task.constant_score([data.dev[i] for i in numbers])
        # Nothing can be better than one answer to examples that are all alike.
        return 1.0 if part is None else part

    return DevScore.of(score, len(data.dev))


def head_baseline(
    upper: UpperLayers, data: LabelledData, parts: Parts, settings: TrainSettings, report: Report
) -> DevScore | None:
    """Return the dev score of a head that is fitted alone, over the frozen layers `upper` without an adapter.

    Returns None for a head that reads every token, which would take a training of its own. `report` is called for the step
    "baseline". Raises what `report` raises.
    """
    task = task_named(data.task)
    if task.reads_tokens:
        return None
    train, dev, _ = parts
    examples = examples_to_fit(train, settings.seed)
    tick = counted("baseline", count_tokens([*examples, *dev]), report)
    scale = task.scale([example.source for example in train])
    torch.manual_seed(settings.seed)
    body, head = adapter_body(upper, REDUCTION_FACTOR)(), TaskHead(upper.config.hidden_size, data)
    fit_head(head, body, data, examples, settings.pooling, tick, scale)
    return dev_score_of(data, dev, predict(body, head.to_served(scale), data, dev, settings.pooling, tick))


def baseline_scores(**baselines: DevScore | None) -> dict[str, float]:
    """Return the dev scores of the baselines that there are, by name, for the card."""
    return {name: score.value for name, score in baselines.items() if score is not None}


def baseline_warnings(
    data: LabelledData, dev: DevScore, constant: DevScore | None, head: DevScore | None, learning_rate: float
) -> list[str]:
    """Return a sentence if a tenant with the score `dev` learned nothing, or less than a head alone."""
    metric = task_named(data.task).metric
    if constant is not None and not dev.is_clearly_above(constant):
        return [
            f"nothing was learned: on dev the model is no better than one answer to everything, beyond chance "
            f"({metric} {dev.value:.3f} and {constant.value:.3f}, standard error {dev.error_beside(constant):.3f}); "
            f"try other learning rates than {learning_rate:g}, a lower one first, or more examples"
        ]
    if head is not None and head.is_clearly_above(dev):
        return [
            f"the adapter learned less than a head alone: on dev a head over frozen layers is better "
            f"({metric} {dev.value:.3f} and {head.value:.3f}, standard error {head.error_beside(dev):.3f}); "
            f"try other learning rates than {learning_rate:g}, a lower one first, or more epochs"
        ]
    return []
