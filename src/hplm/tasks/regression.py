"""Regression: a number for the whole text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from hplm.core.wire import REGRESSION_LABEL, LabelledSpan
from hplm.errors import DataError
from hplm.tasks.examples import Examples, LabelledText, Parts, number_in
from hplm.tasks.task import IGNORED, Answers, Logits, Scale, Task, Tokens, whole_text

if TYPE_CHECKING:
    from torch import Tensor

# The least standard deviation of the values, as a share of the largest value. Answers are float32: at this limit their steps
# are a hundredth of the deviation, less than any model's error. Below it the steps soon hide all differences.
LEAST_SPREAD = 2.0**-16
# The least standard deviation in itself. Weights are multiplied by it, and float32 has fewer digits for smaller numbers.
LEAST_DEVIATION = 1e-30


class Regression(Task):
    """The answer has one label, REGRESSION_LABEL, and the value as its score."""

    name: ClassVar[str] = "regression"
    metric: ClassVar[str] = "pearson"
    labels_are_names: ClassVar[bool] = False
    fixed_labels: ClassVar[tuple[str, ...] | None] = (REGRESSION_LABEL,)

    def decode(
        self, outputs: Logits, labels: Sequence[str], tokens: Tokens, transitions: Logits | None = None
    ) -> tuple[list[LabelledSpan], Logits]:
        return [whole_text(labels[0], float(outputs[0, 0]), tokens)], outputs

    def describe(self, labels: Sequence[str]) -> str:
        return self.name

    def is_meant_by(self, train: Examples) -> bool:
        """Return whether all labels are numbers, of which one is no integer."""
        if train[0].label is None or any(number_in(example.label) is None for example in train):
            return False
        return any(example.value % 1 for example in train)

    def labels_of(self, parts: Parts) -> tuple[str, ...]:
        for name, part in parts.items():
            for number, example in enumerate(part, 1):
                if number_in(example.label) is None:
                    where = example.where or f"{name} example {number}"
                    raise DataError(
                        f"{where}: label {example.label!r} is not a number that float32 can hold, "
                        "but a regression needs one"
                    )
        return (REGRESSION_LABEL,)

    def check_split(self, train: Examples, dev: Examples) -> None:
        values = np.array([example.value for example in train])
        if len(np.unique(values)) < 2:
            raise DataError(f"the train data has one value only ({train[0].label}): nothing can be learned")
        deviation, largest = values.std(), np.abs(values).max()
        if deviation < LEAST_SPREAD * largest:
            raise DataError(
                f"the values of the train data are as large as {largest:.6g} and their standard deviation is only "
                f"{deviation:.3g}: float32 answers would hardly differ; subtract an offset from all values, "
                f"for example {values.mean():.6g}"
            )
        if deviation < LEAST_DEVIATION:
            raise DataError(
                f"the standard deviation of the train data's values, {deviation:.3g}, is too small for float32: "
                "multiply all values"
            )
        if len({example.value for example in dev}) < 2:
            raise DataError(
                "the dev data holds one value only: a regression's score needs two different ones; give more dev data"
            )

    def stratum(self, example: LabelledText) -> str:
        return ""

    def gold(self, example: LabelledText) -> object:
        return example.value

    def test_warnings(self, test: Examples) -> list[str]:
        is_constant = len({example.value for example in test}) == 1
        return ["the test data holds one value only: its scores mean nothing"] if is_constant else []

    def scale(self, train: Examples) -> Scale:
        values = np.array([example.value for example in train])
        return Scale(float(values.mean()), float(values.std()) or 1.0)

    def targets(self, example: LabelledText, tokens: Tokens, label_ids: Mapping[str, int]) -> Tensor:
        import torch

        return torch.tensor([IGNORED if example.label is None else example.value])

    def loss(
        self, outputs: Tensor, targets: Tensor, texts: Sequence[Tokens], scale: Scale, transitions: Tensor | None
    ) -> Tensor:
        import torch.nn.functional as F

        return F.mse_loss(outputs[:, 0], (targets - scale.mean) / scale.deviation)

    def scores(self, examples: Examples, texts: Sequence[Tokens], answers: Answers) -> dict[str, float]:
        gold, answered = [example.value for example in examples], [spans[0].score for spans in answers]
        return {"pearson": pearson(gold, answered), "spearman": spearman(gold, answered)}

    def labelled_as(self, example: LabelledText, answer: Sequence[LabelledSpan]) -> LabelledText:
        (span,) = answer
        return replace(example, label=str(span.score))


def pearson(gold: Sequence[float], answered: Sequence[float]) -> float:
    """Return the correlation of values; 0 if one side is constant."""
    a, b = (np.asarray(side, dtype=np.float64) - np.mean(side) for side in (gold, answered))
    norm = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / norm) if norm > 0 else 0.0


def spearman(gold: Sequence[float], answered: Sequence[float]) -> float:
    """Return the correlation of ranks; equal values share the mean of their ranks."""
    return pearson(_ranks(gold).tolist(), _ranks(answered).tolist())


def _ranks(values: Sequence[float]) -> npt.NDArray[np.float64]:
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]
