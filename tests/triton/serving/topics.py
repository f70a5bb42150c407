"""A third party's task in one file: any number of labels for the whole text, written as `red|blue` or `none`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hplm.core.wire import LabelledSpan
from hplm.errors import DataError
from hplm.tasks.examples import LabelledText
from hplm.tasks.task import Logits, Scale, Task, Tokens, whole_text

if TYPE_CHECKING:
    from torch import Tensor

NONE = "none"


class Topics(Task):
    """Every label with a probability above one half is in the answer, which may be empty."""

    name: ClassVar[str] = "topics"
    metric: ClassVar[str] = "micro_f1"

    def decode(
        self, outputs: Logits, labels: Sequence[str], tokens: Tokens, transitions: Logits | None = None
    ) -> tuple[list[LabelledSpan], Logits]:
        probabilities = 1 / (1 + np.exp(-outputs[0]))
        spans = [whole_text(label, float(p), tokens) for label, p in zip(labels, probabilities, strict=True) if p > 0.5]
        return spans, outputs

    def labels_of(self, parts: Mapping[str, Sequence[LabelledText]]) -> tuple[str, ...]:
        labels = {name: {topic for example in part for topic in topics_of(example)} for name, part in parts.items()}
        if unknown := sorted((labels["dev"] | labels["test"]) - labels["train"]):
            raise DataError(f"the train data lacks the topics {', '.join(unknown)}")
        return tuple(sorted(labels["train"]))

    def targets(self, example: LabelledText, tokens: Tokens, label_ids: Mapping[str, int]) -> Tensor:
        import torch

        targets = torch.zeros(1, len(label_ids))
        targets[0, [label_ids[topic] for topic in topics_of(example)]] = 1.0
        return targets

    def loss(
        self, outputs: Tensor, targets: Tensor, texts: Sequence[Tokens], scale: Scale, transitions: Tensor | None
    ) -> Tensor:
        import torch.nn.functional as F

        return F.binary_cross_entropy_with_logits(outputs, targets)

    def scores(
        self, examples: Sequence[LabelledText], texts: Sequence[Tokens], answers: Sequence[Sequence[LabelledSpan]]
    ) -> dict[str, float]:
        gold = {(i, topic) for i, example in enumerate(examples) for topic in topics_of(example)}
        answered = {(i, span.label) for i, spans in enumerate(answers) for span in spans}
        return {"micro_f1": 2 * len(gold & answered) / max(1, len(gold) + len(answered))}

    def labelled_as(self, example: LabelledText, answer: Sequence[LabelledSpan]) -> LabelledText:
        return replace(example, label="|".join(span.label for span in answer) or NONE)


def topics_of(example: LabelledText) -> list[str]:
    return [topic for topic in str(example.label).split("|") if topic != NONE]
