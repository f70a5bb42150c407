"""Warnings about labelled data that can be trained on.

A dry run shows the warnings about the data. The job's result and the tenant's card keep all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from hplm.core.characters import alike, shown
from hplm.core.text import TextEncoder, TextOrPair, text_key
from hplm.tasks.examples import MOST_NAMED, LabelledText, quoted
from hplm.tasks.task import Tokens
from hplm.tasks.task_loader import task_named
from hplm_builder.data.labelled import LabelledData
from hplm_builder.data.languages import language_warnings
from hplm_builder.tenants.prepared import chunks, sample_of

MEASURED_TEXTS = 1000  # texts whose lengths are measured: enough for a share in whole percents


def data_warnings(data: LabelledData, encoder: TextEncoder) -> list[str]:
    """Return one sentence per warning. Raises DataError if no label of train or dev can be predicted."""

    def tokenise(examples: Iterable[LabelledText]) -> Iterator[tuple[LabelledText, Tokens]]:
        for chunk in chunks(examples):
            encoded = encoder.encode([example.text_or_pair for example in chunk])
            yield from zip(chunk, (text.tokens for text in encoded), strict=True)

    warnings = [
        *data.notes,
        *task_named(data.task).warnings(data.labelled, data.labels, tokenise, encoder.max_tokens),
        *task_named(data.task).test_warnings(data.test),
        *_spelling_warnings(data),
        *_repetition_warnings(data),
        *leak_warnings(data),
        *_truncation_warnings(data, encoder),
        *language_warnings([part for example in data.train for part in (example.text, example.pair) if part], encoder),
    ]
    return [shown(warning) for warning in warnings]


def leak_warnings(data: LabelledData) -> list[str]:
    """Return a sentence for each two parts that share texts: dev and test with train, and test with dev."""
    keys = {name: {text_key(example.text_or_pair) for example in part} for name, part in data.labelled.items()}
    return [
        f"{shared:,} of {len(keys[name]):,} {name} texts are in the {other} data too: {name} scores are too good"
        for name, other in (("dev", "train"), ("test", "train"), ("test", "dev"))
        if (shared := len(keys[name] & keys[other]))
    ]


def has_learned(data: LabelledData, scores: Mapping[str, float]) -> bool:
    """Return whether the model beats a constant answer on dev, or whether no model could."""
    task = task_named(data.task)
    constant_score = task.constant_score(data.dev)
    return constant_score is None or scores[f"dev_{task.metric}"] > constant_score


def _spelling_warnings(data: LabelledData) -> list[str]:
    by_meaning: dict[str | float, list[str]] = {}
    for name in task_named(data.task).label_names(data.labels):
        by_meaning.setdefault(_likely_meaning(name), []).append(name)
    return [
        f"labels differ only in capitals, width, spaces or how a number is written: {quoted(spellings)}; "
        "do they mean the same label?"
        for spellings in by_meaning.values()
        if len(spellings) > 1
    ][:MOST_NAMED]


def _likely_meaning(label: str) -> str | float:
    """Return the number that a label spells, else the label as `alike` has it, without white space."""
    try:
        # Python accepts underscores between digits, a person does not mean a number by them.
        value = math.nan if "_" in label else float(label)
    except ValueError:
        value = math.nan
    return value if math.isfinite(value) else "".join(alike(label).split())


def _repetition_warnings(data: LabelledData) -> list[str]:
    """Return what was left out of dev and test, and how many train examples share their text."""
    task, warnings = task_named(data.task), [*data.repeats.values()]
    counts = Counter[TextOrPair]()
    labels_of: dict[TextOrPair, set[object]] = {}
    # Quote the place of a text, not the text, because tenants' cards keep the warnings.
    place_of: dict[TextOrPair, str] = {}
    for example in data.train:
        key = text_key(example.text_or_pair)
        counts[key] += 1
        labels_of.setdefault(key, set()).add(task.gold(example))
        place_of[key] = example.where
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
    share = f"about {truncated / len(sample):.0%}" if truncated >= len(sample) / 100 else "less than 1%"
    return [
        f"{share} of the train texts are longer than the {encoder.max_tokens} tokens that are read: the rest is cut off"
    ]
