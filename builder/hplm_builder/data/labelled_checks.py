"""Checks of labelled data: one task, consistent labels, enough examples. Training relies on them."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hplm.adapters.tenant import Task
from hplm.core.wire import REGRESSION_LABEL
from hplm.errors import DataError
from hplm_builder.data.labelled import LabelledData, LabelledText
from hplm_builder.data.splits import choose_tenth

# Labels of a task. A head has one row per label, and more labels mean that a column of free text was taken for labels.
MOST_LABELS = 1000
# Entity types of a tagging. Training computes all pairs of tags at each word.
MOST_ENTITY_TYPES = 100
# Labels are taken for numbers if at most this share of them is no number, and if there are more different numbers than this.
MOST_ODD_NUMBERS = 0.1
MOST_NUMBERED_CLASSES = 20
MOST_VALUE = float(np.finfo(np.float32).max)  # largest value of a regression
# Least standard deviation of a regression's values, as a share of the largest value. Answers are float32: at this limit their
# steps are a hundredth of the deviation, less than any model's error. Below it the steps soon hide all differences.
LEAST_SPREAD = 2.0**-16
# Least standard deviation in itself. Weights are multiplied by it, and float32 has fewer digits for smaller numbers.
LEAST_DEVIATION = 1e-30
MOST_EXACT = 2.0**53  # largest range of integers that a float holds exactly


def check_data(
    train: list[LabelledText],
    dev: list[LabelledText],
    test: list[LabelledText],
    *,
    task: Task | None = None,
    expected_labels: Sequence[str] | None = None,
    seed: int = 0,
) -> LabelledData:
    """Return the checked examples of one task. Raises DataError.

    An empty `dev` is split off `train` by `seed` and text: a tenth of every class, or for a tagging a tenth of the texts with
    entities and of the texts without.
    If `task` is None, the labels decide. Entities mean tagging, unless all their lists are empty beside labels. Numbers mean
    regression if at least one is not an integer. Other labels mean classification, but nearly only numbers are refused.
    `expected_labels` are the labels of an earlier version: the labels must be the same, and keep that order.
    """
    if len(train) < 2:
        raise DataError(f"the train data holds {len(train)} example{'s' * (not train)}: at least two are needed")
    train, dev, test = _with_labels_or_entities(train, dev, test)
    _check_alike(train, dev, test)
    found = _task_of(train, task)
    if found != "regression":
        spelling = _LabelSpelling(found, expected_labels or ())
        train, dev, test = ([spelling.apply(example) for example in part] for part in (train, dev, test))
    labels = {"tagging": _tags, "regression": _regression_label, "classification": _classes}[found](train, dev, test)
    if len(labels) > MOST_LABELS:
        raise DataError(
            f"{len(labels)} different labels came, at most {MOST_LABELS} are accepted: is this the right column?"
        )
    if expected_labels is not None:
        labels = _in_expected_order(labels, expected_labels)
    if not dev:
        train, dev = _split_off(found, train, seed)
    if found == "regression":
        # Checked after the split, because the only different value may have moved to dev.
        _check_spread(train)
        if len({example.value for example in dev}) < 2:
            raise DataError(
                "the dev data holds one value only: a regression's score needs two different ones; give more dev data"
            )
    if found == "tagging" and not _types(dev):
        # A model that finds nothing would score best.
        raise DataError(
            "the dev data holds no entity, so it cannot tell a good model from a bad one; give more dev data"
        )
    return LabelledData(found, labels, train, dev, test)


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


class _LabelSpelling:
    """The canonical spelling of each label: stripped, composed (NFC), JSON numbers and truth values as in JSON, 1.0 as 1.

    A label that an earlier version spells in another way keeps that spelling.
    """

    def __init__(self, task: Task, expected: Sequence[str]) -> None:
        self._known = {tag.partition("-")[2] for tag in expected if tag != "O"} if task == "tagging" else set(expected)
        self._by_spelling = {_canonical(label): label for label in sorted(self._known, reverse=True)}

    def apply(self, example: LabelledText) -> LabelledText:
        """Return the example with its labels in this spelling."""
        label = None if example.label is None else self._spell(example.label, example.is_literal)
        entities = tuple(replace(entity, label=self._spell(entity.label)) for entity in example.entities)
        if (label, entities) == (example.label, example.entities):
            return example
        return replace(example, label=label, entities=entities)

    def _spell(self, label: str, is_literal: bool = False) -> str:
        if label in self._known:
            return label
        canonical = _canonical(label, is_literal)
        return self._by_spelling.get(canonical, canonical)


def _canonical(label: str, is_literal: bool = False) -> str:
    if not is_literal:
        return unicodedata.normalize("NFC", label.strip())
    if label in ("True", "False"):
        return label.lower()
    value = float(label)
    return str(int(value)) if value.is_integer() and abs(value) < MOST_EXACT else label


def check_texts(name: str, part: Sequence[LabelledText], *, is_pair: bool) -> None:
    """Refuse texts that are not all pairs, or not all single texts. The DataError calls them `name`."""
    if odd := [example for example in part if (example.pair is not None) != is_pair]:
        expected = "pairs" if is_pair else "single texts"
        place = odd[0].where and f", {odd[0].where},"
        raise DataError(
            f"{len(odd)} of {len(part)} {name} are not {expected}; the first of those{place} begins {odd[0].text[:60]!r}"
        )


def _check_alike(train: list[LabelledText], dev: list[LabelledText], test: list[LabelledText]) -> None:
    is_pair, is_labelled = train[0].pair is not None, train[0].label is not None
    for name, part in (("train", train), ("dev", dev), ("test", test)):
        check_texts(f"{name} examples", part, is_pair=is_pair)
        if odd := sum((example.label is not None) != is_labelled for example in part):
            raise DataError(f"{odd} of {len(part)} {name} examples have no {'label' if is_labelled else 'entities'}")
    if is_pair and not is_labelled:
        raise DataError("a tagging of pairs is not supported: entities need a single text")


def _task_of(train: list[LabelledText], expected: Task | None) -> Task:
    """Return the task that the labels show. Raises DataError if `expected` is another task or if the labels are unclear."""
    if train[0].label is None:
        if expected not in (None, "tagging"):
            raise DataError(f"a {expected} is expected, but the data has entities, no labels")
        return "tagging"
    if expected == "tagging":
        raise DataError("a tagging is expected, but the data has labels, no entities")
    if expected is not None:
        return expected
    odd = [example for example in train if _number(example.label) is None]
    if odd and (train[0].is_score or _are_numbers(train, odd)):
        quoted = "; ".join(f"{example.where or repr(example.text[:60])}: {example.label!r}" for example in odd[:5])
        raise DataError(
            f"{len(odd):,} of {len(train):,} labels of the train data are no numbers, but the others look like a "
            f"regression's ({quoted}): "
            "correct them, or say that labels are classes (--task classification, in a request `task`)"
        )
    is_numeric = not odd and any(example.value % 1 for example in train)
    return "regression" if is_numeric else "classification"


def _are_numbers(train: list[LabelledText], odd: list[LabelledText]) -> bool:
    """Return whether labels are meant as numbers despite the `odd` labels: class names would not be as many numbers."""
    numbers = {example.value for example in train if _number(example.label) is not None}
    return len(odd) <= MOST_ODD_NUMBERS * len(train) and len(numbers) > MOST_NUMBERED_CLASSES


def _number(label: str | None) -> float | None:
    try:
        value = float(str(label))
    except ValueError:
        return None
    # Training computes in float32.
    return value if abs(value) <= MOST_VALUE else None


def _tags(train: list[LabelledText], dev: list[LabelledText], test: list[LabelledText]) -> tuple[str, ...]:
    kinds = sorted(_types(train))
    if not kinds:
        raise DataError("the train data holds no entity, so nothing can be learned")
    if len(kinds) > MOST_ENTITY_TYPES:
        raise DataError(
            f"the train data holds {len(kinds):,} types of entities, at most {MOST_ENTITY_TYPES} can be learned"
        )
    for name, part in (("dev", dev), ("test", test)):
        if unknown := sorted(_types(part) - set(kinds)):
            raise DataError(
                f"the {name} data has types of entities that the train data lacks: {', '.join(unknown[:5])}"
            )
    return ("O", *(f"{prefix}-{kind}" for kind in kinds for prefix in ("B", "I")))


def _types(part: list[LabelledText]) -> set[str]:
    return {entity.label for example in part for entity in example.entities}


def _classes(train: list[LabelledText], dev: list[LabelledText], test: list[LabelledText]) -> tuple[str, ...]:
    labels = {str(example.label) for example in train}
    if len(labels) < 2:
        raise DataError(f"the train data has one class ({labels.pop()!r}): a classification needs at least two")
    for name, part in (("dev", dev), ("test", test)):
        if unknown := sorted({str(example.label) for example in part} - labels):
            raise DataError(f"the {name} data has labels that the train data lacks: {', '.join(unknown[:5])}")
    return tuple(sorted(labels))


def _regression_label(train: list[LabelledText], dev: list[LabelledText], test: list[LabelledText]) -> tuple[str, ...]:
    for name, part in (("train", train), ("dev", dev), ("test", test)):
        for number, example in enumerate(part, 1):
            if _number(example.label) is None:
                where = example.where or f"{name} example {number}"
                raise DataError(
                    f"{where}: label {example.label!r} is not a number that float32 can hold, but a regression needs one"
                )
    return (REGRESSION_LABEL,)


def _check_spread(train: list[LabelledText]) -> None:
    """Refuse values of a regression that hardly differ. Raises DataError."""
    if len({example.value for example in train}) < 2:
        raise DataError(f"the train data has one value only ({train[0].label}): nothing can be learned")
    values = np.array([example.value for example in train])
    deviation, largest = values.std(), np.abs(values).max()
    if deviation < LEAST_SPREAD * largest:
        raise DataError(
            f"the values of the train data are as large as {largest:.6g} and their standard deviation is only {deviation:.3g}: "
            f"float32 answers would hardly differ; subtract an offset from all values, for example {values.mean():.6g}"
        )
    if deviation < LEAST_DEVIATION:
        raise DataError(
            f"the standard deviation of the train data's values, {deviation:.3g}, is too small for float32: multiply all values"
        )


def _in_expected_order(labels: tuple[str, ...], expected: Sequence[str]) -> tuple[str, ...]:
    new, gone = sorted(set(labels) - set(expected)), sorted(set(expected) - set(labels))
    if new or gone:
        changes = [f"{what}: {', '.join(names[:5])}" for what, names in (("new", new), ("missing", gone)) if names]
        raise DataError(
            f"the labels are not the labels of the first version ({'; '.join(changes)}): create another tenant"
        )
    return tuple(expected)


def _split_off(task: Task, train: list[LabelledText], seed: int) -> tuple[list[LabelledText], list[LabelledText]]:
    """Return train without a tenth of it, and that tenth as dev. Raises DataError if train is too small."""
    kinds = ["" if task == "regression" else str(one.label or sorted({e.label for e in one.entities})) for one in train]
    sizes = Counter(kinds)
    chosen = set()
    for has_entities in (True, False):
        texts = {
            i: str(example.text_or_pair)
            for i, example in enumerate(train)
            if sizes[kinds[i]] > 1 and bool(example.entities) == has_entities
        }
        chosen |= choose_tenth(texts, kinds, seed)
    if not chosen:
        advice = " or more examples of a class (no class has two)" if task == "classification" else ""
        if advice and all(_number(one.label) is not None for one in train):
            advice += ", or say that labels are numbers (--task regression, in a request `task`)"
        raise DataError(f"{len(train)} train examples are too few to split dev data off: give dev data{advice}")
    return [example for i, example in enumerate(train) if i not in chosen], [train[i] for i in sorted(chosen)]
