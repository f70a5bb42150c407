"""Learning from texts that nobody has labelled: all upper layers, trained on the labelled texts, label them first.

An adapter learns less from few examples than all upper layers do. What those say of more texts (pseudo-labels; Lee, 2013)
makes up for some of the difference; docs/decisions.md has how much.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from hplm.core.wire import LabelledSpan
from hplm.errors import ConfigError, InternalError
from hplm.models.base import Base
from hplm.models.device import CPU
from hplm.reporting.progress import Report, silent
from hplm_builder.data.data_warnings import has_learned
from hplm_builder.data.labelled import Entity, LabelledData, LabelledText
from hplm_builder.tenants.bodies import UpperModel
from hplm_builder.tenants.finetune import TrainSettings, fine_tune
from hplm_builder.tenants.judging import predict
from hplm_builder.tenants.prepared import Parts, Prepared, count_tokens, counted, targets_of

# Where training all upper layers is neither slow nor unsteady on the tasks at hand.
TEACHER_RATE = 3e-4


@dataclass(frozen=True)
class Taught:
    """Unlabelled texts as a teacher labels them, the teacher's dev scores, and the epoch they are of."""

    examples: list[Prepared]
    scores: dict[str, float]
    best_epoch: int


def upper_body(base: Base) -> Callable[[], nn.Module]:
    """Makes fresh upper layers of which everything trains."""
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
    """Train all upper layers on the train part as `settings` say, but at their own learning rate, and label `unlabelled`.

    `report` hears of the steps "teacher" and "label". Raises ConfigError where they do not train or learn nothing, and what it
    raises.
    """
    if not unlabelled:
        raise InternalError("there is nothing to label")
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
            f"what labels the unlabelled texts diverged at its learning rate, {TEACHER_RATE:g}: train without them"
        ) from None
    if not has_learned(data, teacher.scores):
        raise ConfigError(
            f"what labels the unlabelled texts learned nothing at its learning rate, {TEACHER_RATE:g}: train without them"
        )
    tick = counted("label", count_tokens(unlabelled), report)
    answers = predict(teacher.body, teacher.head, data, unlabelled, settings.pooling, tick, device)
    label_ids = {label: index for index, label in enumerate(data.labels)}
    examples = []
    for one, answer in zip(unlabelled, answers, strict=True):
        source = _labelled(one.source, data, answer)
        examples.append(replace(one, source=source, targets=targets_of(source, data.task, one.tokens, label_ids)))
    return Taught(examples, teacher.scores, teacher.best_epoch)


def _labelled(text: LabelledText, data: LabelledData, answer: Sequence[LabelledSpan]) -> LabelledText:
    """The text with an answer as its label."""
    if data.task == "tagging":
        return replace(text, entities=tuple(Entity(span.label, span.start, span.end) for span in answer))
    (span,) = answer
    return replace(text, label=str(span.score) if data.task == "regression" else span.label)
