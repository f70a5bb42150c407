"""Examples ready to train on: tokenised, labels aligned with tokens, features taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hplm.adapters.tenant import Task
from hplm.core.text import EncodedText, TextEncoder
from hplm.errors import DataError
from hplm.reporting.progress import Report, silent
from hplm.runtime.memory import count_memory
from hplm.tasks.decode import word_ranges
from hplm_builder.data.labelled import LabelledData, LabelledText
from hplm_builder.data.tokenising import in_batches

IGNORED = -100
FEATURE_SHARE = 0.25
CHUNK = 64
# Whose mean length stands for a part's.
LENGTHS = 200
# Of long texts fewer make a batch: more steps an epoch, and less memory.
MOST_BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Prepared:
    """One example: `features` `[T, H]` float16 or ids `[T]`, its `tokens` `[T, 3]` and its source.

    `targets`: the class `[1]`, the value `[1]` float32 of a regression, or tags `[T]`.
    """

    features: Tensor
    targets: Tensor
    tokens: npt.NDArray[np.int32]
    source: LabelledText


Featurise = Callable[[list[EncodedText]], list[Tensor]]
Parts = tuple[list[Prepared], list[Prepared], list[Prepared]]


def prepare_all(
    data: LabelledData,
    encoder: TextEncoder,
    featurise: Featurise,
    report: Report = silent,
    room: Room | None = None,
) -> Parts:
    """Train, dev and test ready to train on. Raises DataError as `prepare` does, and what `report` raises."""
    parts = data.labelled.values()
    tick, room = counted("features", sum(map(len, parts)), report), room or Room()
    train, dev, test = (prepare(part, data, encoder, featurise, tick, room) for part in parts)
    return train, dev, test


def counted(step: str, total: int, report: Report) -> Callable[[int], None]:
    """What `prepare` tells of every few examples, as progress of a step that has `total` of them."""
    done = 0

    def tick(count: int) -> None:
        nonlocal done
        done += count
        report(step, done / total)

    return tick


class Room:
    """Memory for the features of all parts of a task, which stay there while a tenant is trained."""

    def __init__(self, most_bytes: int | None = None) -> None:
        """By default a share of the machine's: others serve meanwhile."""
        self._most_bytes = int(FEATURE_SHARE * count_memory()) if most_bytes is None else most_bytes
        self._taken_bytes = 0

    def expect(self, data: LabelledData, encoder: TextEncoder, hidden_size: int) -> None:
        """Before any are computed, by the length of some texts. Raises DataError where there would not be enough."""
        parts = [part for part in (*data.labelled.values(), data.unlabelled) if part]
        self._check(int(2 * hidden_size * sum(len(part) * mean_tokens(part, encoder) for part in parts)))

    def take(self, more_bytes: int) -> None:
        """Raises DataError where there is not enough."""
        self._taken_bytes += more_bytes
        self._check(self._taken_bytes)

    def _check(self, wanted_bytes: int) -> None:
        if wanted_bytes > self._most_bytes:
            raise DataError(
                f"the features of these texts take {wanted_bytes / 1e9:.2f} GB of memory and more, "
                f"{self._most_bytes / 1e9:.2f} GB may be used here: send fewer or shorter texts"
            )


def prepare(
    examples: Sequence[LabelledText],
    data: LabelledData,
    encoder: TextEncoder,
    featurise: Featurise,
    tick: Callable[[int], None] = lambda count: None,
    room: Room | None = None,
) -> list[Prepared]:
    """Tokenise, align labels with tokens, and take the features of every example; `tick` hears of every few examples.

    The targets of unlabelled ones say nothing. Raises DataError for a text without a token, for pairs where the tokenizer
    has no form for them, and where there is no `room`, by default for these alone.
    """
    if data.texts == 2 and not encoder.takes_pairs:
        raise DataError("the tokenizer of this base has no form for pairs of texts")
    label_ids = {label: index for index, label in enumerate(data.labels)}
    room = room or Room()
    prepared = []
    for chunk in chunks(examples):
        encoded = encoder.encode([example.text_or_pair for example in chunk])
        for example, one in zip(chunk, encoded, strict=True):
            if one.is_empty:
                quoted = ", ".join(repr(text[:80]) for text in (example.text, example.pair) if text is not None)
                raise DataError(f"a text holds nothing but white space and control characters: {quoted}")
        for example, one, features in zip(chunk, encoded, featurise(encoded), strict=True):
            targets = targets_of(example, data.task, one.tokens, label_ids)
            prepared.append(Prepared(features, targets, one.tokens, example))
            room.take(features.nbytes)
        tick(len(chunk))
    return prepared


def chunks(examples: Iterable[LabelledText]) -> Iterator[list[LabelledText]]:
    """So many at a time as are tokenised together."""
    return in_batches(examples, lambda one: len(one.text) + len(one.pair or ""), CHUNK)


def targets_of(
    example: LabelledText, task: Task, tokens: npt.NDArray[np.int32], label_ids: Mapping[str, int]
) -> Tensor:
    """What `Prepared` has as targets; IGNORED for a classification or regression without a label."""
    if task == "tagging":
        return tag_targets(example, tokens, label_ids)
    if example.label is None:
        return torch.tensor([IGNORED])
    return torch.tensor([example.value]) if task == "regression" else torch.tensor([label_ids[example.label]])


def tag_targets(example: LabelledText, tokens: npt.NDArray[np.int32], label_ids: Mapping[str, int]) -> Tensor:
    """The tag of each word at its first token, IGNORED elsewhere: `[T]`."""
    targets = torch.full((len(tokens),), IGNORED)
    before = None
    for first, _ in word_ranges(tokens):
        start = int(tokens[first, 0])
        of_word = next((one for one in reversed(example.entities) if one.start <= start < one.end), None)
        # By the word before, not by the entity's start: that may lie within a word, or within another entity.
        tag = "O" if of_word is None else f"{'I' if of_word is before else 'B'}-{of_word.label}"
        targets[first] = label_ids[tag]
        before = of_word
    return targets


def sample_of(part: Sequence[LabelledText], count: int) -> Sequence[LabelledText]:
    """Some examples, evenly from all over a part."""
    count = min(count, len(part))
    return [part[i * len(part) // count] for i in range(count)]


def mean_tokens(part: Sequence[LabelledText], encoder: TextEncoder) -> float:
    """About how many tokens an example has, from some of them."""
    some = chunks(sample_of(part, LENGTHS))
    return float(np.mean([len(one.ids) for chunk in some for one in encoder.encode([x.text_or_pair for x in chunk])]))


def count_tokens(examples: Sequence[Prepared]) -> int:
    """Of all of them together."""
    return sum(len(one.tokens) for one in examples)


def packed_batches(examples: list[Prepared], batch_examples: int, rng: np.random.Generator) -> list[list[Prepared]]:
    """Batches, similar lengths together, in random order.

    Each has about the tokens of `batch_examples` examples of mean length, at most MOST_BATCH_TOKENS and a text.
    """
    batch_tokens = min(MOST_BATCH_TOKENS, batch_examples * count_tokens(examples) / len(examples))
    lengths = np.array([len(one.tokens) for one in examples]) * rng.uniform(0.8, 1.25, len(examples))
    order = np.argsort(lengths)
    batches: list[list[Prepared]] = [[]]
    tokens = 0
    for index in order:
        if tokens >= batch_tokens:
            batches.append([])
            tokens = 0
        batches[-1].append(examples[index])
        tokens += len(examples[index].tokens)
    return [sorted(batches[i], key=lambda one: len(one.tokens)) for i in rng.permutation(len(batches))]
