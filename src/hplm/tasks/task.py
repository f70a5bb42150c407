"""The interface of a task: what a tenant's head computes, how its outputs become an answer, and how it is trained and judged.

A third party's task is a subclass of `Task`, which its package names in the entry point group `hplm.tasks`, see
`hplm.tasks.task_loader`. The package must be installed where servers, jobs and builds run. Torch is imported inside methods,
because programs that compute nothing list tasks too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from hplm.core.settings import REDUCTION_FACTOR
from hplm.core.wire import LabelledSpan
from hplm.errors import ConfigError
from hplm.tasks.examples import Examples, LabelledText, Parts

if TYPE_CHECKING:
    from torch import Tensor

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]
# The answers of several texts.
Answers = Sequence[Sequence[LabelledSpan]]
# Tokenises examples, and gives each with its tokens `[T, 3]`: first character, end of characters, number of the word.
Tokenise = Callable[[Iterable[LabelledText]], Iterator[tuple[LabelledText, Tokens]]]
# A target that no loss counts.
IGNORED = -100


@dataclass(frozen=True)
class Scale:
    """The mean and the standard deviation of the values that a head learns as if they had mean 0 and deviation 1."""

    mean: float = 0.0
    deviation: float = 1.0


class Task(ABC):
    """A kind of question that tenants answer.

    A text has T tokens. A head is a linear layer with `word_window * labels` outputs. It reads one hidden state of the text, so
    that its outputs are `[1, labels]`, or it reads every token's, so that they are `[T, word_window * labels]`.
    """

    # What cards, requests and `--task` call the task.
    name: ClassVar[str]
    # The score that an epoch is kept by; higher is better. `scores` returns it under this name.
    metric: ClassVar[str]
    # Whether the head reads every token's hidden state; otherwise it reads one of the text, see `Pooling`.
    reads_tokens: ClassVar[bool] = False
    takes_pairs: ClassVar[bool] = True
    # Whether examples are labelled with entities; otherwise with a label.
    takes_entities: ClassVar[bool] = False
    # Whether labels are names, so that spellings of one name are made alike; otherwise labels are numbers.
    labels_are_names: ClassVar[bool] = True
    # The labels of every tenant of the task, if they do not depend on the data.
    fixed_labels: ClassVar[tuple[str, ...] | None] = None
    # Numbers of words that a card may say the head's outputs are about, and the number for a new tenant.
    word_windows: ClassVar[Sequence[int]] = (1,)
    new_word_window: ClassVar[int] = 1
    # Whether heads may have transitions, see `hplm.adapters.tenant.Head`; those of new tenants do.
    has_transitions: ClassVar[bool] = False
    # Whether answers have a confidence, so that a cascade can decide by it which level answers.
    has_confidence: ClassVar[bool] = False
    # The share of a run's steps in which the learning rate rises.
    warmup_share: ClassVar[float] = 0.1
    # What results of a training depend on besides its settings, in JSON values: a change of it makes older results others.
    training_notes: ClassVar[Mapping[str, Any]] = {}

    # Serving.

    @abstractmethod
    def decode(
        self, outputs: Logits, labels: Sequence[str], tokens: Tokens, transitions: Logits | None = None
    ) -> tuple[list[LabelledSpan], Logits]:
        """Return a text's answer and the logits `[1 or T, labels]` that the answer is read from.

        `outputs` are the head's for the text of `tokens` `[T, 3]`; `transitions` are the head's too.
        """

    def confidence(
        self,
        outputs: Logits,
        labels: Sequence[str],
        tokens: Tokens,
        transitions: Logits | None = None,
        temperature: float = 1.0,
    ) -> float:
        """Return the probability of the answer of `decode`, at a temperature that divides logits and transitions (eq. 3).

        Raises ConfigError if answers of the task have no confidence, see `has_confidence`.
        """
        raise ConfigError(f"answers of a {self.name} have no confidence, so no cascade can be made of its models")

    def log_likelihood(
        self,
        outputs: Logits,
        labels: Sequence[str],
        tokens: Tokens,
        targets: npt.NDArray[np.int64],
        transitions: Logits | None = None,
        temperature: float = 1.0,
    ) -> float:
        """Return the natural logarithm of the probability of the right answer, at a temperature as in `confidence`.

        `targets` are the array of what `targets` returns for the example. Raises ConfigError as `confidence` does.
        """
        raise ConfigError(f"answers of a {self.name} have no likelihood, so its models cannot be calibrated")

    def describe(self, labels: Sequence[str]) -> str:
        """Return the task and its number of labels in words."""
        return f"{self.name} of {len(labels)} labels"

    # Checks of labelled data.

    def is_meant_by(self, train: Examples) -> bool:
        """Return whether data that name no task are this task's. Only tasks of hplm are asked, in the order of the table.

        Raises DataError if that cannot be decided.
        """
        return False

    @abstractmethod
    def labels_of(self, parts: Parts) -> tuple[str, ...]:
        """Return the labels in the order of the head's outputs. Raises DataError if a part has labels that do not fit."""

    def check_split(self, train: Examples, dev: Examples) -> None:
        """Raise DataError if nothing can be learned from train, or if dev cannot tell a good model from a bad one."""
        return

    def stratum(self, example: LabelledText) -> str:
        """Return what examples have in common of which dev data take an even share when they are split off train."""
        return str(example.label)

    def too_few_advice(self, train: Examples) -> str:
        """Return what may be done, besides giving dev data, if train is too small to split dev data off it."""
        return ""

    def gold(self, example: LabelledText) -> object:
        """Return what the example is labelled with, as it is compared with labels of copies of the text."""
        return example.label

    def label_names(self, labels: Sequence[str]) -> Sequence[str]:
        """Return the names, as they stand in data, that `labels` were made of."""
        return labels

    def warnings(self, parts: Parts, labels: Sequence[str], tokenise: Tokenise, max_tokens: int) -> list[str]:
        """Return sentences on what is odd about data that can be learned all the same.

        At most `max_tokens` tokens of a text are read. Raises DataError if labels of train or dev can never be answered.
        """
        return []

    def test_warnings(self, test: Examples) -> list[str]:
        """Return a sentence if test data cannot tell a good model from a bad one."""
        return []

    # Training.

    def reduction_factor(self, slot_factor: int) -> int:
        """Return the usual reduction factor of a new tenant's adapters, if slots have `slot_factor`.

        A tenant has another one only if it is clearly better on the tenant's dev examples.
        """
        return max(slot_factor, REDUCTION_FACTOR)

    def scale(self, train: Examples) -> Scale:
        """Return the scale of the values to learn."""
        return Scale()

    def forbidden_transitions(self, labels: Sequence[str]) -> Logits:
        """Return `[1 + labels, labels]`, very low for transitions that no answer makes; needed if `has_transitions`."""
        raise NotImplementedError

    def may_fit_head_first(self, labels: Sequence[str]) -> bool:
        """Return whether a new head may be fitted alone before the body is trained."""
        return False

    @abstractmethod
    def targets(self, example: LabelledText, tokens: Tokens, label_ids: Mapping[str, int]) -> Tensor:
        """Return what the loss compares outputs with, for one example: `[1, ...]` or `[T]`.

        An example without a label has targets too, which nobody reads.
        """

    @abstractmethod
    def loss(
        self,
        outputs: Tensor,
        targets: Tensor,
        texts: Sequence[Tokens],
        scale: Scale,
        transitions: Tensor | None,
    ) -> Tensor:
        """Return the mean loss of a batch: `outputs` and `targets` of its `texts`, one after another.

        `transitions` are the head's with the forbidden ones, if it has some.
        """

    def late_epoch_tolerance(self, best_score: float, dev: Examples) -> float | None:
        """Return how far below the best dev score a later epoch is kept; None keeps an epoch only if its score is higher."""
        return None

    # Judging.

    @abstractmethod
    def scores(self, examples: Examples, texts: Sequence[Tokens], answers: Answers) -> dict[str, float]:
        """Return scores by name, `metric` among them; `texts` are the tokens of the examples."""

    def mistakes(self, examples: Examples, texts: Sequence[Tokens], answers: Answers) -> dict[str, Any]:
        """Return, by name and in JSON values, where answers go wrong."""
        return {}

    def constant_score(self, dev: Examples) -> float | None:
        """Return the highest score of a model that answers every text alike; None if no model could be better."""
        return 0.0

    @abstractmethod
    def labelled_as(self, example: LabelledText, answer: Sequence[LabelledSpan]) -> LabelledText:
        """Return the example with an answer as its label."""


def whole_text(label: str, score: float, tokens: Tokens) -> LabelledSpan:
    """Return a span over all characters that were read."""
    return LabelledSpan(label, score, 0, int(tokens[:, 1].max(initial=0)))


def softmax(logits: Logits) -> Logits:
    """Return probabilities over the last axis."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def log_softmax(logits: Logits, temperature: float = 1.0) -> npt.NDArray[np.float64]:
    """Return the logarithms of probabilities over the last axis, of logits that the temperature divides."""
    # Division first: the largest float32 logits differ by more than float32 holds.
    scaled = logits.astype(np.float64) / temperature
    shifted = scaled - scaled.max(axis=-1, keepdims=True)
    logs: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logs
