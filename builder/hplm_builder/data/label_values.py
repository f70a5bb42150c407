"""The meaning of labels in a file: numbers as people write them, marks of a missing value, and names that look the same."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hplm.core.characters import trimmed, without_unseen
from hplm.core.numbers import NumberColumn, read_numbers
from hplm.errors import DataError
from hplm.tasks.examples import MOST_NAMED, LabelledText, number_in
from hplm.tasks.regression import Regression
from hplm.tasks.task import Task

Parts = Mapping[str, list[LabelledText]]
# Error values of spreadsheets, in English, German, French, Spanish and Italian, and what programs write for no number.
ERROR_VALUE = re.compile(
    "#(N/?A|N/D|NV|(DIV/0|NULL|REF|VALUE|NUM|SPILL|CALC|WERT|BEZUG|ZAHL|VALEUR|NOMBRE|VALORE|RIF|¡(REF|VALOR|NUM|DIV/0))!"
    "|(NAME|NOM|¿NOMBRE|NOME)[?])|nan|NaN|NAN|-nan|<NA>|NaT"
)
# Words that mark a missing value, in any case. Each of them may be a class too.
MISSING_WORDS = frozenset(("na", "n/a", "n.a.", "none", "null", "(null)", "undefined", "-", "--", "?"))
# Labels are taken for numbers if at most this share of them is no number, and if there are more different numbers than this.
MOST_ODD_NUMBERS = 0.1
MOST_NUMBERED_CLASSES = 20
MOST_EXACT = 2.0**53  # largest range of integers that a float holds exactly
# A number with a point before three digits may have thousands.
_MAY_BE_THOUSANDS = re.compile(r"\s*-?[1-9]\d{0,2}\.\d{3}\s*", re.ASCII)


def check_error_values(parts: Parts) -> None:
    """Refuse labels and texts that a spreadsheet or a program wrote because there was no value. Raises DataError.

    A text may be the word `nan`, but not `#N/A`.
    """
    bad = [
        (example, value)
        for part in parts.values()
        for example in part
        for value in (example.label, example.text, example.pair)
        if value is not None
        and ERROR_VALUE.fullmatch(cell := trimmed(value))
        and (value is example.label or cell[0] == "#")
    ]
    if bad:
        raise DataError(
            f"{len(bad):,} labels or texts are error values or marks of a missing value ({_places(bad)}): "
            "correct the cells, or delete the rows"
        )


def missing_warnings(examples: Iterable[LabelledText]) -> list[str]:
    """Return a sentence for each class whose name is a word for a missing value."""
    marked: dict[str, list[LabelledText]] = {}
    for example in examples:
        if example.label is not None and _is_missing(example):
            marked.setdefault(str(example.label), []).append(example)
    return [
        f"{len(found):,} examples have the label {label!r}{_place(found[0])}, which is trained as a class: "
        "if it marks a missing label, delete these rows"
        for label, found in marked.items()
    ]


def _is_missing(example: LabelledText) -> bool:
    return not example.is_literal and trimmed(str(example.label)).casefold() in MISSING_WORDS


def numbers_in(parts: Parts, task: str | None) -> tuple[Parts, str | None, list[str]]:
    """Read labels as numbers if the data are a regression's, in the style that all of them have.

    Return the parts with labels as Python writes numbers, the task, and sentences on how they were read. Labels of another
    `task` stay, and so do labels that look like classes. Raises DataError if labels look like numbers but cannot be read so.
    """
    labelled = [example for part in parts.values() for example in part if example.label is not None]
    written = [example for example in labelled if not example.is_literal]
    if task not in (None, Regression.name) or not written:
        return parts, task, []
    if all(number_in(example.label) is not None for example in written):
        if all(_MAY_BE_THOUSANDS.fullmatch(str(example.label)) for example in labelled):
            first = str(written[0].label)
            note = f"labels such as {first!r} are read with a decimal point: if it divides thousands, leave it out"
            return parts, task, [note]
        return parts, task, []
    column = read_numbers(str(example.label) for example in written)
    odd = [example for example in written if example.label not in column.plain]
    words = [example for example in odd if example.label not in column.other and not _is_missing(example)]
    literal = {example.label for example in labelled if example.is_literal and number_in(example.label) is not None}
    has_many = len({*column.plain, *column.other, *literal}) > MOST_NUMBERED_CLASSES
    is_meant = bool(task) or written[0].is_score or (has_many and len(words) <= MOST_ODD_NUMBERS * len(labelled))
    if (odd or column.also) and not is_meant:
        return parts, task, []
    if odd:
        raise DataError(_odd_numbers(odd, labelled, column, task))
    if column.also:
        found = next(example for example in written if example.label == column.also)
        raise DataError(
            f"labels such as {column.also!r}{_place(found)} may have a decimal mark or divide thousands: "
            f"write them with a decimal point and without marks between thousands{_or_classes(task)}"
        )
    plain = {name: [_in_plain(example, column) for example in part] for name, part in parts.items()}
    changed = [example for example in written if column.plain[str(example.label)] != trimmed(str(example.label))]
    notes = [
        f"labels are read as numbers with {column.style}: {example.label!r}{_place(example)} as "
        f"{column.plain[str(example.label)]}"
        for example in changed[:1]
    ]
    return plain, Regression.name if has_many else task, notes


def _in_plain(example: LabelledText, column: NumberColumn) -> LabelledText:
    if example.is_literal or example.label is None:
        return example
    return replace(example, label=column.plain[example.label])


def _odd_numbers(
    odd: Sequence[LabelledText], labelled: Sequence[LabelledText], column: NumberColumn, task: str | None
) -> str:
    read = next(iter(column.plain), None)
    like = "" if read is None else f" with {column.style} like {read!r}"
    shown_odd = _places([(example, str(example.label)) for example in odd])
    return (
        f"{len(odd):,} of {len(labelled):,} labels are no numbers{like} ({shown_odd}): correct them, or delete the rows"
        f"{_or_classes(task)}"
    )


def _or_classes(task: str | None) -> str:
    return "" if task else ", or say that labels are classes (--task classification, in a request `task`)"


def _places(found: Sequence[tuple[LabelledText, str]]) -> str:
    """Return the first values with their places."""
    named = "; ".join(
        f"{example.where or repr(example.text[:60])}: {value[:60]!r}" for example, value in found[:MOST_NAMED]
    )
    return named + "; ..." * (len(found) > MOST_NAMED)


def _place(example: LabelledText) -> str:
    return f" ({example.where})" if example.where else ""


class LabelSpelling:
    """One spelling of labels that look the same: without white space and format characters at the ends, composed (NFC).

    A JSON number or truth value is spelled as in JSON, 1.0 as 1. Of several spellings an earlier version's counts, else the
    most frequent in the data. `notes` say which labels are read in another spelling.
    """

    def __init__(self, task: Task, expected: Sequence[str], examples: Sequence[LabelledText]) -> None:
        self._known = set(task.label_names(expected))
        counts: Counter[str] = Counter()
        places: dict[str, LabelledText] = {}
        for example in examples:
            for label in self._spellings(example):
                counts[label] += 1
                places.setdefault(label, example)
        by_look: dict[str, str] = {}
        for label in sorted(counts, key=lambda label: (-counts[label], label)):
            by_look.setdefault(without_unseen(label), label)
        known = {without_unseen(_canonical(label)): label for label in sorted(self._known, reverse=True)}
        self._by_look = by_look | known
        self.notes = [
            f"{counts[label]:,} labels {label!a}{_place(places[label])} are read as {read!a}, which looks the same"
            for label in counts
            if (read := self._by_look[without_unseen(label)]) != label and label not in self._known
        ]

    @staticmethod
    def _spellings(example: LabelledText) -> Iterable[str]:
        if example.label is not None:
            yield _canonical(example.label, example.is_literal)
        for entity in example.entities:
            yield _canonical(entity.label)

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
        return self._by_look[without_unseen(_canonical(label, is_literal))]


def _canonical(label: str, is_literal: bool = False) -> str:
    if not is_literal:
        return unicodedata.normalize("NFC", trimmed(label))
    if label in ("True", "False"):
        return label.lower()
    value = float(label)
    return str(int(value)) if value.is_integer() and abs(value) < MOST_EXACT else label
