"""Checks of labelled data: one task, consistent labels, enough examples. Training relies on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hplm.core.text import TextOrPair, text_key
from hplm.errors import DataError
from hplm.tasks.examples import MOST_NAMED, LabelledText, quoted
from hplm.tasks.task import Task
from hplm.tasks.task_loader import TASKS, task_named
from hplm_builder.data.label_values import LabelSpelling, check_error_values, missing_warnings, numbers_in
from hplm_builder.data.labelled import LabelledData
from hplm_builder.data.splits import choose_tenth

# Labels of a task. A head has one row per label, and more labels mean that a column of free text was taken for labels.
MOST_LABELS = 1000


def check_data(
    train: list[LabelledText],
    dev: list[LabelledText],
    test: list[LabelledText],
    *,
    task: str | None = None,
    expected_labels: Sequence[str] | None = None,
    seed: int = 0,
    test_name: str = "test",
) -> LabelledData:
    """Return the checked examples of one task. Raises DataError, which calls the data in `test` `test_name`.

    An empty `dev` is split off `train` by `seed` and text: a tenth of every class, or of what else the task has for strata.
    Dev and test keep one example for each distinct text, see `distinct_examples`.
    If `task` is None, the labels decide (`Task.is_meant_by`). Entities mean tagging, unless all their lists are empty beside
    labels. Numbers mean regression if at least one is not an integer. Other labels mean classification, but nearly only numbers
    are refused. `expected_labels` are the labels of an earlier version: the labels must be the same, and keep that order.
    """
    if len(train) < 2:
        raise DataError(f"the train data holds {len(train)} example{'s' * (not train)}: at least two are needed")
    train, dev, test = _with_labels_or_entities(train, dev, test)
    parts = {"train": train, "dev": dev, test_name: test}
    _check_alike(parts)
    check_error_values(parts)
    numbers, task, notes = numbers_in(parts, task)
    kind = _task_of(numbers["train"], task)
    if kind.labels_are_names:
        examples = [example for part in parts.values() for example in part]
        spelling = LabelSpelling(kind, expected_labels or (), examples)
        numbers = {name: [spelling.apply(example) for example in part] for name, part in parts.items()}
        notes = [*spelling.notes[:MOST_NAMED], *missing_warnings(examples)]
    labels = kind.labels_of(numbers)
    train, dev, test = numbers.values()
    if len(labels) > MOST_LABELS:
        raise DataError(
            f"{len(labels)} different labels came, at most {MOST_LABELS} are accepted: is this the right column?"
        )
    if expected_labels is not None:
        labels = _in_expected_order(labels, expected_labels)
    if not dev:
        train, dev = _split_off(kind, train, seed)
    dev, repeated_dev = distinct_examples("dev", dev, kind)
    test, repeated_test = distinct_examples(test_name, test, kind)
    # Checked after the split, because the only different value may have moved to dev.
    kind.check_split(train, dev)
    repeats = {name: words for name, words in (("dev", repeated_dev), ("test", repeated_test)) if words}
    return LabelledData(kind.name, labels, train, dev, test, repeats=repeats, notes=notes)


def distinct_examples(name: str, part: list[LabelledText], task: Task) -> tuple[list[LabelledText], str]:
    """Return one example for each distinct text of a part, and a sentence on what was left out; "" if nothing was.

    Scores, proofs and choices assume independent examples, and a copy of a text is no further evidence. Texts are compared by
    `text_key`. A text with several labels keeps the most frequent label, of equally frequent ones the first; of numbers the
    median.
    """
    copies: dict[TextOrPair, list[LabelledText]] = {}
    for example in part:
        copies.setdefault(text_key(example.text_or_pair), []).append(example)
    if (repeats := len(part) - len(copies)) == 0:
        return part, ""
    kept, several = [], 0
    for examples in copies.values():
        golds = [task.gold(example) for example in examples]
        several += len(set(golds)) > 1
        kept.append(examples[_usual(golds)])
    words = (
        f"{len(part):,} {name} examples have {len(copies):,} distinct texts: each text counts once, "
        f"{repeats:,} repeat{'s are' if repeats > 1 else ' is'} left out"
    )
    if several:
        words += f"; {several:,} of these texts have more than one label, of which the usual one is kept"
    return kept, words


def _usual(golds: Sequence[object]) -> int:
    """Return the place of the most frequent label, or of the median of numbers."""
    if isinstance(golds[0], float):
        return int(np.argsort(np.array(golds, np.float64), kind="stable")[(len(golds) - 1) // 2])
    return golds.index(Counter(golds).most_common(1)[0][0])


def _with_labels_or_entities(*parts: list[LabelledText]) -> list[list[LabelledText]]:
    """Keep the entities of examples that have both if a train example has any entity, else keep their labels."""
    is_tagging = any(example.is_tagged and example.entities for example in parts[0])

    def keep_one(example: LabelledText) -> LabelledText:
        if not example.is_tagged:
            return example
        if is_tagging:
            return replace(example, label=None, is_tagged=False)
        return replace(example, entities=(), is_tagged=False)

    return [[keep_one(example) for example in part] for part in parts]


def check_texts(name: str, part: Sequence[LabelledText], *, is_pair: bool) -> None:
    """Refuse texts that are not all pairs, or not all single texts. The DataError calls them `name`."""
    if odd := [example for example in part if (example.pair is not None) != is_pair]:
        expected = "pairs" if is_pair else "single texts"
        place = odd[0].where and f", {odd[0].where},"
        raise DataError(
            f"{len(odd)} of {len(part)} {name} are not {expected}; the first of those{place} begins {odd[0].text[:60]!r}"
        )


def _check_alike(parts: Mapping[str, list[LabelledText]]) -> None:
    first = parts["train"][0]
    is_pair, is_labelled = first.pair is not None, first.label is not None
    for name, part in parts.items():
        check_texts(f"{name} examples", part, is_pair=is_pair)
        if odd := sum((example.label is not None) != is_labelled for example in part):
            raise DataError(f"{odd} of {len(part)} {name} examples have no {'label' if is_labelled else 'entities'}")


def _task_of(train: list[LabelledText], expected: str | None) -> Task:
    """Return the task that the labels show. Raises DataError if `expected` is another task or if the labels are unclear."""
    has_entities = train[0].label is None
    if expected is None:
        task = next(task for task in TASKS.values() if task.is_meant_by(train))
    else:
        task = task_named(expected)
        if task.takes_entities != has_entities:
            came, lacking = ("entities", "labels") if has_entities else ("labels", "entities")
            raise DataError(f"a {expected} is expected, but the data has {came}, no {lacking}")
    if train[0].pair is not None and not task.takes_pairs:
        raise DataError(f"a {task.name} of pairs is not supported: it needs single texts")
    return task


def _in_expected_order(labels: tuple[str, ...], expected: Sequence[str]) -> tuple[str, ...]:
    new, gone = sorted(set(labels) - set(expected)), sorted(set(expected) - set(labels))
    if new or gone:
        changes = [
            f"{what}: {quoted(names, {*labels, *expected})}"
            for what, names in (("new", new), ("missing", gone))
            if names
        ]
        raise DataError(
            f"the labels are not the labels of the first version ({'; '.join(changes)}): create another tenant"
        )
    return tuple(expected)


def _split_off(task: Task, train: list[LabelledText], seed: int) -> tuple[list[LabelledText], list[LabelledText]]:
    """Return train without a tenth of it, and that tenth as dev. Raises DataError if train is too small."""
    strata = [task.stratum(example) for example in train]
    # All copies of a text go to the side of its first one.
    keys = [text_key(example.text_or_pair) for example in train]
    first_of: dict[TextOrPair, int] = {}
    for i, key in enumerate(keys):
        first_of.setdefault(key, i)
    firsts = first_of.values()
    sizes = Counter(strata[i] for i in firsts)
    chosen = set[TextOrPair]()
    for has_entities in (True, False):
        texts = {
            i: str(train[i].text_or_pair)
            for i in firsts
            if sizes[strata[i]] > 1 and bool(train[i].entities) == has_entities
        }
        chosen |= {keys[i] for i in choose_tenth(texts, strata, seed)}
    keys_of: dict[object, dict[TextOrPair, None]] = {}
    for key, stratum in zip(keys, strata, strict=True):
        keys_of.setdefault(stratum, {})[key] = None
    for own in keys_of.values():
        # A label whose texts are all copies of chosen ones keeps one of them in train.
        if chosen.issuperset(own):
            chosen.discard(next(iter(own)))
    if not chosen:
        distinct = f" of {len(firsts)} distinct texts" if len(firsts) < len(train) else ""
        advice = task.too_few_advice(train)
        raise DataError(
            f"{len(train)} train examples{distinct} are too few to split dev data off: give dev data{advice}"
        )
    sides: tuple[list[LabelledText], list[LabelledText]] = [], []
    for key, example in zip(keys, train, strict=True):
        sides[key in chosen].append(example)
    return sides
