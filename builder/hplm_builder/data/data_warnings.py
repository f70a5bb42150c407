"""What is odd about labelled data that can be learned all the same, or about what was learned of them.

Of the data a dry run says it; all is in the job's result and in the tenant's card.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hplm.core.text import TextEncoder, TextOrPair
from hplm.errors import DataError
from hplm.tasks.decode import word_ranges
from hplm_builder.data.labelled import LabelledData, LabelledText
from hplm_builder.tenants.judging import gold_entities
from hplm_builder.tenants.prepared import chunks, sample_of
from hplm_builder.tenants.scores import METRICS

# Texts whose lengths stand for all; names and characters that a sentence has at most.
MEASURED, MOST_NAMED, LONGEST_QUOTED = 1000, 5, 40


def data_warnings(data: LabelledData, encoder: TextEncoder) -> list[str]:
    """Sentences. Raises DataError where none of the entities of train or dev can ever be found."""
    of_task = {"tagging": lambda: _of_entities(data, encoder), "classification": lambda: _of_classes(data)}
    said = of_task.get(data.task, list)()
    return [
        *said,
        *uninformative_test_data(data),
        *_of_spellings(data),
        *_of_repeated(data),
        *leak_warnings(data),
        *_of_long(data, encoder),
    ]


def uninformative_test_data(data: LabelledData) -> list[str]:
    """A sentence where test data cannot tell a good model from a bad one; dev data that cannot are refused."""
    if data.task == "tagging" and data.test and not any(one.entities for one in data.test):
        return ["the test data holds no entity: to find nothing is the best score there"]
    if data.task == "regression" and len({one.value for one in data.test}) == 1:
        return ["the test data holds one value only: its scores tell nothing"]
    return []


def leak_warnings(data: LabelledData) -> list[str]:
    """Sentences where dev or test data have texts of the train data."""
    known = {one.text_or_pair for one in data.train}
    return [
        f"{found:,} of {len(part):,} {name} texts are in the train data too: {name} scores are too good"
        for name, part in (("dev", data.dev), ("test", data.test))
        if (found := sum(one.text_or_pair in known for one in part))
    ]


def nothing_learned_warning(data: LabelledData, scores: Mapping[str, float], learning_rate: float) -> list[str]:
    """A sentence where a tenant with these `scores` `has_learned` nothing."""
    if has_learned(data, scores):
        return []
    metric = METRICS[data.task]
    return [
        f"nothing was learned: on dev it is no better than one answer to everything ({metric} {scores[f'dev_{metric}']:.3f}); "
        f"try other learning rates than {learning_rate:g}, a lower one first, or more examples"
    ]


def has_learned(data: LabelledData, scores: Mapping[str, float]) -> bool:
    """Whether a model with these `scores` is better on dev than one that gives everything the same answer, or none could be."""
    most = 0.0
    if data.task == "classification":
        sizes = Counter(one.label for one in data.dev)
        if len(sizes) < 2:
            return True
        most = max(sizes.values()) / len(data.dev)
    return scores[f"dev_{METRICS[data.task]}"] > most


def _of_entities(data: LabelledData, encoder: TextEncoder) -> list[str]:
    said = []
    for name, part in data.labelled.items():
        total = sum(len(one.entities) for one in part)
        lost = total - _to_be_found(part, encoder)
        why = f"begin or end within a word, or lie beyond the {encoder.max_tokens} tokens of a text that are read"
        if name != "test" and lost == total > 0:
            raise DataError(f"none of the {total:,} entities of the {name} data can be learned: they {why}")
        if lost:
            said.append(f"{lost:,} of {total:,} entities of the {name} data can never be found: they {why}")
    return said


def _of_classes(data: LabelledData) -> list[str]:
    sizes = {name: Counter(one.label for one in part) for name, part in data.labelled.items()}
    said = []
    for few, words in (
        ([label for label in data.labels if sizes["train"][label] < 2], "have one train example"),
        (
            [label for label in data.labels if not sizes["dev"][label]],
            "have no dev example, so nothing tells how well they do",
        ),
    ):
        if few:
            said.append(f"{len(few):,} of {len(data.labels):,} classes {words}: {_some(few)}")
    return said


def _of_spellings(data: LabelledData) -> list[str]:
    names = data.labels if data.task != "tagging" else sorted({tag.partition("-")[2] for tag in data.labels})
    spelled: dict[str | float, list[str]] = {}
    for name in names:
        spelled.setdefault(_as_meant(name), []).append(name)
    return [
        f"labels differ in capitals, white space or how a number is written alone: {_some(alike)}; are they one?"
        for alike in spelled.values()
        if len(alike) > 1
    ][:MOST_NAMED]


def _as_meant(label: str) -> str | float:
    try:
        value = math.nan if "_" in label else float(label)  # which for Python may stand between digits
    except ValueError:
        value = math.nan
    return value if math.isfinite(value) else "".join(label.split()).casefold()


def _of_repeated(data: LabelledData) -> list[str]:
    said = []
    found: dict[TextOrPair, set[object]] = {}
    # Where texts stood, not what they say: tenants' cards keep this.
    where: dict[TextOrPair, str] = {}
    for one in data.train:
        found.setdefault(one.text_or_pair, set()).add(one.label if data.task != "tagging" else one.entities)
        where[one.text_or_pair] = one.where
    if repeated := sum(count for count in Counter(one.text_or_pair for one in data.train).values() if count > 1):
        said.append(f"{repeated:,} of {len(data.train):,} train examples have a text that another has too")
    if unclear := [text for text, labels in found.items() if len(labels) > 1]:
        at = f", as at {where[unclear[0]]}" if where[unclear[0]] else ""
        said.append(f"{len(unclear):,} of {len(found):,} train texts have more than one label{at}")
    return said


def _of_long(data: LabelledData, encoder: TextEncoder) -> list[str]:
    some = sample_of(data.train, MEASURED)
    long = sum(
        encoded.truncated for chunk in chunks(some) for encoded in encoder.encode([one.text_or_pair for one in chunk])
    )
    if not long:
        return []
    share = f"{long / len(some):.0%}" if long >= len(some) / 100 else "less than 1%"
    return [
        f"about {share} of the train texts are longer than the {encoder.max_tokens} tokens that are read: the rest is cut off"
    ]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name[:LONGEST_QUOTED]) for name in names[:MOST_NAMED])
    return shown + ", ..." * (len(names) > MOST_NAMED)


def _to_be_found(part: Sequence[LabelledText], encoder: TextEncoder) -> int:
    """How many entities are whole words that are read."""
    count = 0
    for chunk in chunks(one for one in part if one.entities):
        for one, encoded in zip(chunk, encoder.encode([each.text_or_pair for each in chunk]), strict=True):
            starts, ends = _words(encoded.tokens)
            count += sum(entity.start in starts and entity.end in ends for entity in gold_entities(one, encoded.tokens))
    return count


def _words(tokens: npt.NDArray[np.int32]) -> tuple[set[int], set[int]]:
    """Where words begin and end."""
    ranges = word_ranges(tokens)
    return {int(tokens[first, 0]) for first, _ in ranges}, {int(tokens[last - 1, 1]) for _, last in ranges}
