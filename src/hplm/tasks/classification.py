"""Classification: one of several classes for the whole text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from hplm.core.wire import LabelledSpan
from hplm.errors import DataError
from hplm.tasks.examples import Examples, LabelledText, Parts, number_in, quoted
from hplm.tasks.task import IGNORED, Answers, Logits, Scale, Task, Tokenise, Tokens, log_softmax, softmax, whole_text

if TYPE_CHECKING:
    from torch import Tensor

# The least number of labels for which a new head is fitted first: with two or three labels nothing is gained.
LEAST_FITTED_LABELS = 10


class Classification(Task):
    """The most probable class is the answer, with its probability."""

    name: ClassVar[str] = "classification"
    metric: ClassVar[str] = "accuracy"
    has_confidence: ClassVar[bool] = True

    def decode(
        self, outputs: Logits, labels: Sequence[str], tokens: Tokens, transitions: Logits | None = None
    ) -> tuple[list[LabelledSpan], Logits]:
        probabilities = softmax(outputs[0])
        best = int(probabilities.argmax())
        return [whole_text(labels[best], float(probabilities[best]), tokens)], outputs

    def confidence(
        self,
        outputs: Logits,
        labels: Sequence[str],
        tokens: Tokens,
        transitions: Logits | None = None,
        temperature: float = 1.0,
    ) -> float:
        return float(np.exp(log_softmax(outputs[0], temperature).max()))

    def log_likelihood(
        self,
        outputs: Logits,
        labels: Sequence[str],
        tokens: Tokens,
        targets: npt.NDArray[np.int64],
        transitions: Logits | None = None,
        temperature: float = 1.0,
    ) -> float:
        return float(log_softmax(outputs[0], temperature)[targets[0]])

    def is_meant_by(self, train: Examples) -> bool:
        return train[0].label is not None

    def labels_of(self, parts: Parts) -> tuple[str, ...]:
        labels = {str(example.label) for example in parts["train"]}
        if len(labels) < 2:
            raise DataError(f"the train data has one class ({labels.pop()!r}): a classification needs at least two")
        for name, part in parts.items():
            if unknown := sorted({str(example.label) for example in part} - labels):
                raise DataError(f"the {name} data has labels that the train data lacks: {quoted(unknown, labels)}")
        return tuple(sorted(labels))

    def too_few_advice(self, train: Examples) -> str:
        advice = " or more examples of a class (no class has two)"
        if all(number_in(example.label) is not None for example in train):
            advice += ", or say that labels are numbers (--task regression, in a request `task`)"
        return advice

    def warnings(self, parts: Parts, labels: Sequence[str], tokenise: Tokenise, max_tokens: int) -> list[str]:
        sizes = {name: Counter(example.label for example in part) for name, part in parts.items()}
        single = [label for label in labels if sizes["train"][label] < 2]
        untested = [label for label in labels if not sizes["dev"][label]]
        return [
            f"{len(names):,} of {len(labels):,} classes {problem}: {quoted(names)}"
            for names, problem in (
                (single, "have one train example"),
                (untested, "have no dev example, so their quality is not measured"),
            )
            if names
        ]

    def may_fit_head_first(self, labels: Sequence[str]) -> bool:
        # With fewer labels a random head misleads the body little, and a fitted head gains nothing: docs/decisions.md.
        return len(labels) >= LEAST_FITTED_LABELS

    def targets(self, example: LabelledText, tokens: Tokens, label_ids: Mapping[str, int]) -> Tensor:
        import torch

        return torch.tensor([IGNORED if example.label is None else label_ids[example.label]])

    def loss(
        self, outputs: Tensor, targets: Tensor, texts: Sequence[Tokens], scale: Scale, transitions: Tensor | None
    ) -> Tensor:
        import torch.nn.functional as F

        return F.cross_entropy(outputs, targets)

    def scores(self, examples: Examples, texts: Sequence[Tokens], answers: Answers) -> dict[str, float]:
        gold, answered = _classes(examples, answers)
        return {"accuracy": accuracy(gold, answered), "macro_f1": macro_f1(gold, answered)}

    def mistakes(self, examples: Examples, texts: Sequence[Tokens], answers: Answers) -> dict[str, Any]:
        return {"confusion": confusion(*_classes(examples, answers))}

    def constant_score(self, dev: Examples) -> float | None:
        sizes = Counter(example.label for example in dev)
        return max(sizes.values()) / len(dev) if len(sizes) > 1 else None

    def labelled_as(self, example: LabelledText, answer: Sequence[LabelledSpan]) -> LabelledText:
        (span,) = answer
        return replace(example, label=span.label)


def _classes(examples: Examples, answers: Answers) -> tuple[list[str], list[str]]:
    return [str(example.label) for example in examples], [spans[0].label for spans in answers]


def accuracy(gold: Sequence[str], answered: Sequence[str]) -> float:
    """Return the share of equal labels."""
    return sum(a == b for a, b in zip(gold, answered, strict=True)) / len(gold)


def macro_f1(gold: Sequence[str], answered: Sequence[str]) -> float:
    """Return the mean F1 over the classes of `gold`: a class that was only answered does not count, as in published results."""
    wanted, got = Counter(gold), Counter(answered)
    hits = Counter(a for a, b in zip(gold, answered, strict=True) if a == b)
    return sum(2 * hits[label] / (wanted[label] + got[label]) for label in wanted) / len(wanted)


def confusion(gold: Sequence[str], answered: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return label -> answered label -> how often; pairs that never happened are left out, so that 150 classes stay small."""
    table: dict[str, dict[str, int]] = {}
    for (wanted, got), count in sorted(Counter(zip(gold, answered, strict=True)).items()):
        table.setdefault(wanted, {})[got] = count
    return table
