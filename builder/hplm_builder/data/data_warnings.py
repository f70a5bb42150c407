"""Warnings about labelled data that can be trained on, and about a tenant that learned nothing.

A dry run shows the warnings about the data. The job's result and the tenant's card keep all of them.
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

MEASURED_TEXTS = 1000  # texts whose lengths are measured: enough for a share in whole percents
MOST_NAMED = 5  # names that a sentence quotes
LONGEST_QUOTED = 40  # characters of a quoted name


def data_warnings(data: LabelledData, encoder: TextEncoder) -> list[str]:
    """Return one sentence per warning. Raises DataError if no entity of train or dev can be predicted."""
    by_task = {"tagging": lambda: _entity_warnings(data, encoder), "classification": lambda: _class_warnings(data)}
    return [
        *by_task.get(data.task, list)(),
        *uninformative_test_data(data),
        *_spelling_warnings(data),
        *_repetition_warnings(data),
        *leak_warnings(data),
        *_truncation_warnings(data, encoder),
    ]


def uninformative_test_data(data: LabelledData) -> list[str]:
    """Return a sentence if the test data cannot tell a good model from a bad one. Such dev data is an error elsewhere."""
    if data.task == "tagging" and data.test and not any(example.entities for example in data.test):
        return ["the test data holds no entity: a model that finds nothing scores best there"]
    if data.task == "regression" and len({example.value for example in data.test}) == 1:
        return ["the test data holds one value only: its scores mean nothing"]
    return []


def leak_warnings(data: LabelledData) -> list[str]:
    """Return a sentence for dev and for test data that share texts with the train data."""
    train_texts = {example.text_or_pair for example in data.train}
    return [
        f"{shared:,} of {len(part):,} {name} texts are in the train data too: {name} scores are too good"
        for name, part in (("dev", data.dev), ("test", data.test))
        if (shared := sum(example.text_or_pair in train_texts for example in part))
    ]


def nothing_learned_warning(data: LabelledData, scores: Mapping[str, float], learning_rate: float) -> list[str]:
    """Return a sentence if a tenant with these `scores` learned nothing."""
    if has_learned(data, scores):
        return []
    metric = METRICS[data.task]
    return [
        f"nothing was learned: on dev the model is no better than one answer to everything "
        f"({metric} {scores[f'dev_{metric}']:.3f}); "
        f"try other learning rates than {learning_rate:g}, a lower one first, or more examples"
    ]


def has_learned(data: LabelledData, scores: Mapping[str, float]) -> bool:
    """Return whether the model beats a constant answer on dev, or whether no model could."""
    constant_score = 0.0
    if data.task == "classification":
        sizes = Counter(example.label for example in data.dev)
        if len(sizes) < 2:
            return True
        constant_score = max(sizes.values()) / len(data.dev)
    return scores[f"dev_{METRICS[data.task]}"] > constant_score


def _entity_warnings(data: LabelledData, encoder: TextEncoder) -> list[str]:
    warnings = []
    for name, part in data.labelled.items():
        total = sum(len(example.entities) for example in part)
        lost = total - _predictable_entities(part, encoder)
        why = (
            f"begin or end inside a word, or are beyond the first {encoder.max_tokens} tokens of a text, which are read"
        )
        if name != "test" and lost == total > 0:
            raise DataError(f"none of the {total:,} entities of the {name} data can be learned: they {why}")
        if lost:
            warnings.append(f"{lost:,} of {total:,} entities of the {name} data can never be found: they {why}")
    return warnings


def _class_warnings(data: LabelledData) -> list[str]:
    sizes = {name: Counter(example.label for example in part) for name, part in data.labelled.items()}
    single = [label for label in data.labels if sizes["train"][label] < 2]
    untested = [label for label in data.labels if not sizes["dev"][label]]
    return [
        f"{len(labels):,} of {len(data.labels):,} classes {problem}: {_quote(labels)}"
        for labels, problem in (
            (single, "have one train example"),
            (untested, "have no dev example, so their quality is not measured"),
        )
        if labels
    ]


def _spelling_warnings(data: LabelledData) -> list[str]:
    names = data.labels if data.task != "tagging" else sorted({tag.partition("-")[2] for tag in data.labels})
    by_meaning: dict[str | float, list[str]] = {}
    for name in names:
        by_meaning.setdefault(_likely_meaning(name), []).append(name)
    return [
        f"labels differ only in capitals, white space or how a number is written: {_quote(spellings)}; "
        "do they mean the same label?"
        for spellings in by_meaning.values()
        if len(spellings) > 1
    ][:MOST_NAMED]


def _likely_meaning(label: str) -> str | float:
    """Return the number that a label spells, else the label without capitals and white space."""
    try:
        # Python accepts underscores between digits, a person does not mean a number by them.
        value = math.nan if "_" in label else float(label)
    except ValueError:
        value = math.nan
    return value if math.isfinite(value) else "".join(label.split()).casefold()


def _repetition_warnings(data: LabelledData) -> list[str]:
    warnings = []
    labels_of: dict[TextOrPair, set[object]] = {}
    # Quote the place of a text, not the text, because tenants' cards keep the warnings.
    place_of: dict[TextOrPair, str] = {}
    for example in data.train:
        label = example.label if data.task != "tagging" else example.entities
        labels_of.setdefault(example.text_or_pair, set()).add(label)
        place_of[example.text_or_pair] = example.where
    counts = Counter(example.text_or_pair for example in data.train)
    if repeated := sum(count for count in counts.values() if count > 1):
        warnings.append(f"{repeated:,} of {len(data.train):,} train examples share their text with another example")
    if ambiguous := [text for text, labels in labels_of.items() if len(labels) > 1]:
        place = f", for example at {place_of[ambiguous[0]]}" if place_of[ambiguous[0]] else ""
        warnings.append(f"{len(ambiguous):,} of {len(labels_of):,} train texts have more than one label{place}")
    return warnings


def _truncation_warnings(data: LabelledData, encoder: TextEncoder) -> list[str]:
    sample = sample_of(data.train, MEASURED_TEXTS)
    truncated = sum(
        encoded.truncated
        for chunk in chunks(sample)
        for encoded in encoder.encode([example.text_or_pair for example in chunk])
    )
    if not truncated:
        return []
    share = f"{truncated / len(sample):.0%}" if truncated >= len(sample) / 100 else "less than 1%"
    return [
        f"about {share} of the train texts are longer than the {encoder.max_tokens} tokens that are read: "
        "the rest is cut off"
    ]


def _quote(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name[:LONGEST_QUOTED]) for name in names[:MOST_NAMED])
    return shown + ", ..." * (len(names) > MOST_NAMED)


def _predictable_entities(part: Sequence[LabelledText], encoder: TextEncoder) -> int:
    """Count the entities that are whole words within the tokens that are read."""
    count = 0
    for chunk in chunks(example for example in part if example.entities):
        encoded_texts = encoder.encode([example.text_or_pair for example in chunk])
        for example, encoded in zip(chunk, encoded_texts, strict=True):
            starts, ends = _word_bounds(encoded.tokens)
            entities = gold_entities(example, encoded.tokens)
            count += sum(entity.start in starts and entity.end in ends for entity in entities)
    return count


def _word_bounds(tokens: npt.NDArray[np.int32]) -> tuple[set[int], set[int]]:
    """Return the first characters of the words, and the characters behind the words."""
    ranges = word_ranges(tokens)
    return {int(tokens[first, 0]) for first, _ in ranges}, {int(tokens[last - 1, 1]) for _, last in ranges}
