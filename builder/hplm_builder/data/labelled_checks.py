"""What labelled data of one task must be before anything is trained on it."""

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

# A head has a row a label, and all heads share one machine: a column of free text is no label.
MOST_LABELS = 1000
# Training looks at all pairs of tags at each word.
MOST_ENTITY_TYPES = 100
# Labels that are numbers but for such a share, and more different ones than this, are no class names.
MOST_ODD_NUMBERS = 0.1
MOST_NUMBERED_CLASSES = 20
MOST_VALUE = float(np.finfo(np.float32).max)  # of a regression
# Of a regression's values: the least standard deviation as a share of the largest. Answers are float32, whose steps are then at
# most a hundredth of a deviation: less than any model's error. Below it they soon are as large as all differences.
LEAST_SPREAD = 2.0**-16
# And at all: weights are multiplied by it, and must not be so small that float32 has fewer digits for them.
LEAST_DEVIATION = 1e-30
MOST_EXACT = 2.0**53  # of integers, as a float


def check_data(
    train: list[LabelledText],
    dev: list[LabelledText],
    test: list[LabelledText],
    *,
    task: Task | None = None,
    expected_labels: Sequence[str] | None = None,
    seed: int = 0,
) -> LabelledData:
    """Examples of one task; an empty `dev` is split off `train`, a tenth of every class, by `seed` and text, of a tagging a
    tenth of the texts with entities and of those without.

    Without `task`, entities mean tagging (but not empty lists of them beside labels), numbers of which one is no integer mean
    regression, else it is classification, but where nearly all are numbers.
    With `expected_labels`, those of an earlier version, the labels must be the same and keep that order. Raises DataError.
    """
    if len(train) < 2:
        raise DataError(f"the train data holds {len(train)} example{'s' * (not train)}: at least two are needed")
    train, dev, test = _of_one_kind(train, dev, test)
    _check_alike(train, dev, test)
    found = _task_of(train, task)
    if found != "regression":
        spelling = _Spelling(found, expected_labels or ())
        train, dev, test = ([spelling.of(one) for one in part] for part in (train, dev, test))
    labels = {"tagging": _tags, "regression": _regression_label, "classification": _classes}[found](train, dev, test)
    if len(labels) > MOST_LABELS:
        raise DataError(
            f"{len(labels)} different labels came, at most {MOST_LABELS} are accepted: is it the right column?"
        )
    if expected_labels is not None:
        labels = _as_before(labels, expected_labels)
    if not dev:
        train, dev = _split_off(found, train, seed)
    if found == "regression":
        # Only now: the one that differs may have gone to dev.
        _check_spread(train)
        if len({example.value for example in dev}) < 2:
            raise DataError("the dev data holds one value only: a regression's score needs two; give more dev data")
    if found == "tagging" and not _types(dev):
        # To find nothing would be the best score.
        raise DataError("the dev data holds no entity: nothing tells a good model from a bad one; give more dev data")
    return LabelledData(found, labels, train, dev, test)


def _of_one_kind(*parts: list[LabelledText]) -> list[list[LabelledText]]:
    """Examples that have both, with entities alone where some of train are no empty lists, else with labels alone."""
    is_tagging = any(one.is_tagged and one.entities for one in parts[0])

    def alone(one: LabelledText) -> LabelledText:
        if not one.is_tagged:
            return one
        return replace(one, label=None, is_tagged=False) if is_tagging else replace(one, entities=(), is_tagged=False)

    return [[alone(one) for one in part] for part in parts]


class _Spelling:
    """One spelling for what is one label: without white space around it, composed (NFC), JSON's numbers and truths as JSON has
    them, 1.0 as 1. What an earlier version knows in another stays as it is there.
    """

    def __init__(self, task: Task, expected: Sequence[str]) -> None:
        self._known = {one.partition("-")[2] for one in expected if one != "O"} if task == "tagging" else set(expected)
        self._by_spelling = {_spelled(one): one for one in sorted(self._known, reverse=True)}

    def of(self, one: LabelledText) -> LabelledText:
        """The example with its labels so spelled."""
        label = None if one.label is None else self._name(one.label, one.is_literal)
        entities = tuple(replace(entity, label=self._name(entity.label)) for entity in one.entities)
        return one if (label, entities) == (one.label, one.entities) else replace(one, label=label, entities=entities)

    def _name(self, label: str, is_literal: bool = False) -> str:
        if label in self._known:
            return label
        spelled = _spelled(label, is_literal)
        return self._by_spelling.get(spelled, spelled)


def _spelled(label: str, is_literal: bool = False) -> str:
    if not is_literal:
        return unicodedata.normalize("NFC", label.strip())
    if label in ("True", "False"):
        return label.lower()
    value = float(label)
    return str(int(value)) if value.is_integer() and abs(value) < MOST_EXACT else label


def check_texts(name: str, part: Sequence[LabelledText], *, is_pair: bool) -> None:
    """That all are pairs, or none. Raises DataError that calls them `name`."""
    if odd := [one for one in part if (one.pair is not None) != is_pair]:
        expected = "pairs" if is_pair else "single texts"
        raise DataError(
            f"{len(odd)} of {len(part)} {name} are not {expected}; the first of those"
            f"{odd[0].where and f', {odd[0].where},'} begins {odd[0].text[:60]!r}"
        )


def _check_alike(train: list[LabelledText], dev: list[LabelledText], test: list[LabelledText]) -> None:
    is_pair, is_labelled = train[0].pair is not None, train[0].label is not None
    for name, part in (("train", train), ("dev", dev), ("test", test)):
        check_texts(f"{name} examples", part, is_pair=is_pair)
        if odd := sum((example.label is not None) != is_labelled for example in part):
            raise DataError(f"{odd} of {len(part)} {name} examples have no {'label' if is_labelled else 'entities'}")
    if is_pair and not is_labelled:
        raise DataError("a tagging of pairs is not known: entities need a single text")


def _task_of(train: list[LabelledText], asked: Task | None) -> Task:
    if train[0].label is None:
        if asked not in (None, "tagging"):
            raise DataError(f"a {asked} is expected, but the data has entities, no labels")
        return "tagging"
    if asked == "tagging":
        raise DataError("a tagging is expected, but the data has labels, no entities")
    if asked is not None:
        return asked
    odd = [example for example in train if _number(example.label) is None]
    if odd and (train[0].is_score or _are_numbers(train, odd)):
        some = "; ".join(f"{one.where or repr(one.text[:60])}: {one.label!r}" for one in odd[:5])
        raise DataError(
            f"{len(odd):,} of {len(train):,} labels of the train data are no numbers, as those of a regression are ({some}): "
            "correct them, or say that they are classes (--task classification, in a request `task`)"
        )
    is_numeric = not odd and any(example.value % 1 for example in train)
    return "regression" if is_numeric else "classification"


def _are_numbers(train: list[LabelledText], odd: list[LabelledText]) -> bool:
    """Whether labels are meant as numbers, but for a few `odd` ones: of class names there would not be as many."""
    numbers = {example.value for example in train if _number(example.label) is not None}
    return len(odd) <= MOST_ODD_NUMBERS * len(train) and len(numbers) > MOST_NUMBERED_CLASSES


def _number(label: str | None) -> float | None:
    try:
        value = float(str(label))
    except ValueError:
        return None
    # Training is in float32.
    return value if abs(value) <= MOST_VALUE else None


def _tags(train: list[LabelledText], dev: list[LabelledText], test: list[LabelledText]) -> tuple[str, ...]:
    kinds = sorted(_types(train))
    if not kinds:
        raise DataError("the train data holds no entity: there is nothing to learn")
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
                    f"{where}: label {example.label!r} is not a number, or none that float32 holds: a regression needs one"
                )
    return (REGRESSION_LABEL,)


def _check_spread(train: list[LabelledText]) -> None:
    """Of a regression."""
    if len({example.value for example in train}) < 2:
        raise DataError(f"the train data has one value ({train[0].label}): there is nothing to learn")
    values = np.array([example.value for example in train])
    deviation, largest = values.std(), np.abs(values).max()
    if deviation < LEAST_SPREAD * largest:
        raise DataError(
            f"the values of the train data are as large as {largest:.6g} and their standard deviation is only {deviation:.3g}: "
            f"answers, which are float32, would hardly differ; subtract an offset from all values, as {values.mean():.6g}"
        )
    if deviation < LEAST_DEVIATION:
        raise DataError(
            f"the standard deviation of the train data's values, {deviation:.3g}, is too small for float32: multiply them all"
        )


def _as_before(labels: tuple[str, ...], expected: Sequence[str]) -> tuple[str, ...]:
    new, gone = sorted(set(labels) - set(expected)), sorted(set(expected) - set(labels))
    if new or gone:
        words = [f"{what}: {', '.join(some[:5])}" for what, some in (("new", new), ("missing", gone)) if some]
        raise DataError(f"the labels are not those of the first version ({'; '.join(words)}): make another tenant")
    return tuple(expected)


def _split_off(task: Task, train: list[LabelledText], seed: int) -> tuple[list[LabelledText], list[LabelledText]]:
    kinds = ["" if task == "regression" else str(one.label or sorted({e.label for e in one.entities})) for one in train]
    sizes = Counter(kinds)
    chosen = set()
    for has_entities in (True, False):
        some = {
            i: str(one.text_or_pair)
            for i, one in enumerate(train)
            if sizes[kinds[i]] > 1 and bool(one.entities) == has_entities
        }
        chosen |= choose_tenth(some, kinds, seed)
    if not chosen:
        advice = " (no class has two) or more of a class" if task == "classification" else ""
        if advice and all(_number(one.label) is not None for one in train):
            advice += ", or say that labels are values (--task regression, in a request `task`)"
        raise DataError(f"{len(train)} train examples are too few to split dev data off: give dev data{advice}")
    return [one for i, one in enumerate(train) if i not in chosen], [train[i] for i in sorted(chosen)]
