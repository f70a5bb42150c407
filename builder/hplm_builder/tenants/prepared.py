"""Examples ready to train on: tokenised, labels aligned with tokens, features taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hplm.core.text import EncodedText, TextEncoder
from hplm.errors import DataError
from hplm.reporting.progress import Report, silent
from hplm.runtime.memory import count_memory
from hplm.tasks.examples import LabelledText
from hplm.tasks.task import Tokens
from hplm.tasks.task_loader import task_named
from hplm_builder.data.labelled import LabelledData
from hplm_builder.data.tokenising import in_batches

# The share of the machine's memory that features may take: servers run on the same machine.
FEATURE_SHARE = 0.25
# The most texts that are tokenised together.
CHUNK = 64
# The number of texts whose mean length stands for that of a part.
LENGTHS = 200
# The most tokens of a batch: a batch of long texts has fewer texts, so that an epoch has more steps and takes less memory.
MOST_BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Prepared:
    """One example: `features`, `targets` (`Task.targets`), `tokens` `[T, 3]` and its source.

    `features` are `[T, H]` float16; of a whole base ids and types of tokens `[T, 2]`; of an unconverted model ids `[T]`.
    """

    features: Tensor
    targets: Tensor
    tokens: Tokens
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
    """Prepare train, dev and test. Raises DataError as `prepare` does, and what `report` raises."""
    parts = data.labelled.values()
    tick, room = counted("features", sum(map(len, parts)), report), room or Room()
    train, dev, test = (prepare(part, data, encoder, featurise, tick, room) for part in parts)
    return train, dev, test


def counted(step: str, total: int, report: Report) -> Callable[[int], None]:
    """Return a `tick` for `prepare` that reports the progress of a step with `total` examples."""
    done = 0

    def tick(count: int) -> None:
        nonlocal done
        done += count
        report(step, done / total)

    return tick


class Room:
    """Memory for the features of all parts of a task, which stay in memory while a tenant is trained."""

    def __init__(self, most_bytes: int | None = None) -> None:
        """Allow `most_bytes`, by default FEATURE_SHARE of the machine's memory."""
        self._most_bytes = int(FEATURE_SHARE * count_memory()) if most_bytes is None else most_bytes
        self._taken_bytes = 0

    def expect(self, data: LabelledData, encoder: TextEncoder, token_bytes: int) -> None:
        """Estimate the bytes of all features by the length of some texts. Raises DataError if there is not enough memory."""
        parts = [part for part in (*data.labelled.values(), data.unlabelled) if part]
        self._check(int(token_bytes * sum(len(part) * mean_tokens(part, encoder) for part in parts)))

    def take(self, more_bytes: int) -> None:
        """Count bytes as taken. Raises DataError if there is not enough memory."""
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
    """Tokenise every example, align its labels with its tokens, and take its features.

    `tick` is called with the number of examples of each chunk. By default these examples alone have all the `room`. Raises
    DataError for a text without a token, for pairs if the tokenizer has no form for pairs, and if there is no room.
    """
    if data.texts == 2 and not encoder.takes_pairs:
        raise DataError("the tokenizer of this base has no form for pairs of texts")
    task, label_ids = task_named(data.task), label_ids_of(data)
    room = room or Room()
    prepared = []
    for chunk in chunks(examples):
        encoded = encoder.encode([example.text_or_pair for example in chunk])
        for example, text in zip(chunk, encoded, strict=True):
            if text.is_empty:
                quoted = ", ".join(repr(text[:80]) for text in (example.text, example.pair) if text is not None)
                raise DataError(f"a text holds nothing but white space and control characters: {quoted}")
        for example, text, features in zip(chunk, encoded, featurise(encoded), strict=True):
            targets = task.targets(example, text.tokens, label_ids)
            prepared.append(Prepared(features, targets, text.tokens, example))
            room.take(features.nbytes)
        tick(len(chunk))
    return prepared


def chunks(examples: Iterable[LabelledText]) -> Iterator[list[LabelledText]]:
    """Give the examples in lists that are tokenised together."""
    return in_batches(examples, lambda example: len(example.text) + len(example.pair or ""), CHUNK)


def label_ids_of(data: LabelledData) -> dict[str, int]:
    """Return the place of each label in the head's outputs."""
    return {label: index for index, label in enumerate(data.labels)}


def sample_of(part: Sequence[LabelledText], count: int) -> Sequence[LabelledText]:
    """Return `count` examples, evenly from all over a part."""
    count = min(count, len(part))
    return [part[i * len(part) // count] for i in range(count)]


def mean_tokens(part: Sequence[LabelledText], encoder: TextEncoder) -> float:
    """Return about how many tokens an example has, from a sample."""
    sample = chunks(sample_of(part, LENGTHS))
    encoded = (text for chunk in sample for text in encoder.encode([example.text_or_pair for example in chunk]))
    return float(np.mean([len(text.ids) for text in encoded]))


def count_tokens(examples: Sequence[Prepared]) -> int:
    """Return the number of tokens of all examples."""
    return sum(len(example.tokens) for example in examples)


def packed_batches(examples: list[Prepared], batch_examples: int, rng: np.random.Generator) -> list[list[Prepared]]:
    """Return batches in random order, each of texts of similar lengths.

    A batch has about the tokens of `batch_examples` examples of mean length, and at most MOST_BATCH_TOKENS and one text more.
    """
    batch_tokens = min(MOST_BATCH_TOKENS, batch_examples * count_tokens(examples) / len(examples))
    lengths = np.array([len(example.tokens) for example in examples]) * rng.uniform(0.8, 1.25, len(examples))
    order = np.argsort(lengths)
    batches: list[list[Prepared]] = [[]]
    tokens = 0
    for index in order:
        if tokens >= batch_tokens:
            batches.append([])
            tokens = 0
        batches[-1].append(examples[index])
        tokens += len(examples[index].tokens)
    return [sorted(batches[i], key=lambda example: len(example.tokens)) for i in rng.permutation(len(batches))]
