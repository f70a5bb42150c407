"""Pseudo-labels (Lee, 2013): a teacher, all upper layers trained on the labelled texts, labels the unlabelled texts.

An adapter learns less from few examples than all upper layers do. The teacher's labels of more texts make up for a part of the
difference; docs/decisions.md says how large a part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from hplm.errors import ConfigError, InternalError
from hplm.models.base import Base
from hplm.models.device import CPU
from hplm.reporting.progress import Report, silent
from hplm.tasks.task_loader import task_named
from hplm_builder.data.data_warnings import has_learned
from hplm_builder.data.labelled import LabelledData
from hplm_builder.tenants.bodies import UpperModel
from hplm_builder.tenants.finetune import TrainSettings, fine_tune
from hplm_builder.tenants.judging import predict
from hplm_builder.tenants.prepared import Parts, Prepared, count_tokens, counted, label_ids_of

# The teacher's learning rate, at which training all upper layers was neither slow nor unsteady on the tasks we tried.
TEACHER_RATE = 3e-4


@dataclass(frozen=True)
class Taught:
    """Texts as a teacher labels them, the teacher's dev scores, and the epoch that was kept."""

    examples: list[Prepared]
    scores: dict[str, float]
    best_epoch: int


def upper_body(base: Base) -> Callable[[], nn.Module]:
    """Return what makes fresh upper layers, all of them trainable."""
    upper = base.load_upper()
    return lambda: UpperModel(copy.deepcopy(upper))


def pseudo_labelled(
    base: Base,
    data: LabelledData,
    parts: Parts,
    unlabelled: Sequence[Prepared],
    settings: TrainSettings,
    report: Report = silent,
    *,
    device: torch.device = CPU,
) -> Taught:
    """Train a teacher on the train part by `settings`, except for the learning rate, and label `unlabelled`.

    `report` is called for the steps "teacher" and "label". Raises ConfigError if the teacher diverges or learns nothing, and
    what `report` raises.
    """
    if not unlabelled:
        raise InternalError("there are no unlabelled texts to label")
    train, dev, _ = parts
    try:
        teacher = fine_tune(
            upper_body(base),
            base.config.hidden_size,
            data,
            (train, dev, []),
            replace(settings, learning_rates=(TEACHER_RATE,)),
            lambda step, done: report("teacher", done),
            device=device,
        )
    except ConfigError:
        raise ConfigError(
            f"the teacher that labels unlabelled texts diverged at its learning rate, {TEACHER_RATE:g}: train without them"
        ) from None
    if not has_learned(data, teacher.scores):
        raise ConfigError(
            f"the teacher that labels unlabelled texts learned nothing at its learning rate, {TEACHER_RATE:g}: "
            "train without them"
        )
    tick = counted("label", count_tokens(unlabelled), report)
    answers = predict(teacher.body, teacher.head, data, unlabelled, settings.pooling, tick, device)
    task, label_ids = task_named(data.task), label_ids_of(data)
    examples = []
    for example, answer in zip(unlabelled, answers, strict=True):
        source = task.labelled_as(example.source, answer)
        examples.append(replace(example, source=source, targets=task.targets(source, example.tokens, label_ids)))
    return Taught(examples, teacher.scores, teacher.best_epoch)
