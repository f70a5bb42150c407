"""Columns of labelled data: how a table's columns are divided, and which of them hold texts and labels.

The client looks at a header before it sends the file, and the job reads the file, both through this module. Standard library
only.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from hplm.core.characters import alike, trimmed
from hplm.core.text_lines import BoundedLines
from hplm.errors import ConfigError, DataError, unreadable

LONGEST_NAME = 200  # characters of a column's name in a request
TABLE_ENDINGS = (".csv", ".tsv")
# What divides the columns of a .csv, the usual one first. A .tsv has tabs and no quotes: there a lone quote is a character.
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
# The first line that Excel reads in a .csv to learn its delimiter.
_SEPARATOR = re.compile(r'"?sep=([^\r\n"])"?[\r\n]+', re.IGNORECASE)
_OPTIONS = "name others with --text-column, --pair-column and --label-column (in a request `columns`)"


@dataclass(frozen=True)
class FoundColumns:
    """The columns of an example, by their names in the file."""

    text: str
    pair: str | None
    label: str | None
    entities: str | None


@dataclass(frozen=True)
class Columns:
    """Names of columns that a request gives, whatever their case; a column that it does not name has one of the usual names.

    Those are `text` or `sentence`; `text_pair`; `label`, `score` or `labels`; `sentence1` and `sentence2` of pairs.
    """

    text: str | None = None
    pair: str | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        for name in self.named.values():
            if not (name.strip() and len(name) <= LONGEST_NAME and name.isprintable()):
                raise ConfigError(f"the name of a column is 1 to {LONGEST_NAME} printable characters")

    @property
    def named(self) -> dict[str, str]:
        """The names that the request gives, by the keys of its `columns`."""
        found = {"text": self.text, "pair": self.pair, "label": self.label}
        return {key: name for key, name in found.items() if name is not None}

    def find(self, names: tuple[str, ...], where: str, *, is_labelled: bool) -> FoundColumns:
        """Find the columns of a table or of a JSON object. Raises DataError, which shows the columns that there are."""
        try:
            return _find(self, names, is_labelled)
        except DataError as error:
            shown = ", ".join(map(repr, names))[:200] or "none"
            raise DataError(f"{where}: {error}; there are {shown}: {_OPTIONS}") from None


USUAL_COLUMNS = Columns()


@lru_cache(maxsize=16)
def _find(columns: Columns, names: tuple[str, ...], is_labelled: bool) -> FoundColumns:
    by_meaning: dict[str, list[str]] = {}
    for name in names:
        by_meaning.setdefault(alike(name), []).append(name)

    def usual(name: str) -> str | None:
        same = by_meaning.get(alike(name), [])
        if name not in same and len(same) > 1:
            raise DataError(f"columns {same[0]!r} and {same[1]!r} differ in case alone, and one of them is needed")
        return name if name in same else next(iter(same), None)

    def asked(name: str) -> str:
        if (found := usual(name)) is None:
            raise DataError(f"no column {name!r}")
        return found

    first = None if columns.text else usual("sentence1")
    text = asked(columns.text) if columns.text else first or usual("text") or usual("sentence")
    if text is None:
        raise DataError(
            "no column `text` or `sentence`, of pairs `text` and `text_pair` or `sentence1` and `sentence2`"
        )
    pair = asked(columns.pair) if columns.pair else usual("sentence2" if first else "text_pair")
    if first and pair is None:
        raise DataError("`sentence1` without `sentence2`")
    if not is_labelled:
        return FoundColumns(text, pair, None, None)
    entities = None
    if columns.label:
        label: str | None = asked(columns.label)
    else:
        free = (found for found in map(usual, ("label", "score", "labels")) if found not in (None, text, pair))
        label, entities = next(free, None), usual("entities")
    if label is None and entities is None:
        raise DataError("no `label` or `score`")
    used = Counter(name for name in (text, pair, label) if name is not None)
    if twice := next((name for name, count in used.items() if count > 1), None):
        raise DataError(f"column {twice!r} is named for two things")
    return FoundColumns(text, pair, label, entities)


def open_table(lines: BoundedLines, columns: Columns, *, is_labelled: bool) -> tuple[list[str], Iterator[list[str]]]:
    """Read the header of a .csv or .tsv; return its names and the rows behind it. An empty file has neither.

    A .csv is divided by what makes columns with the needed names of its first line. Raises DataError where none does.
    """

    def find(names: list[str], where: str) -> None:
        columns.find(tuple(names), where, is_labelled=is_labelled)

    return _open_rows(lines, find)


def _open_rows(lines: BoundedLines, find: Callable[[list[str], str], object]) -> tuple[list[str], Iterator[list[str]]]:
    """Read a table's header, in which `find` finds the needed names or raises DataError. See `open_table`."""
    is_tsv = lines.name.lower().endswith(".tsv")
    first = next(lines, None)
    said = _SEPARATOR.fullmatch(first or "")
    if said:
        lines.end_record()
        first = next(lines, None)
    if first is None:
        return [], iter(())
    delimiter = said[1] if said else "\t" if is_tsv else _delimiter(first, find)
    quoting: Literal[0, 3] = csv.QUOTE_NONE if is_tsv else csv.QUOTE_MINIMAL
    rows = csv.reader(itertools.chain([first], lines), delimiter=delimiter, quoting=quoting, strict=True)
    try:
        names = [trimmed(name) for name in next(rows)]
    except csv.Error as error:
        raise DataError(f"{lines.where} is not valid CSV: {error}") from None
    if twice := next((name for name, count in Counter(names).items() if name and count > 1), None):
        raise DataError(f"{lines.where}: the header has the column {twice[:80]!r} more than once")
    try:
        find(names, lines.where)
    except DataError as error:
        advice = ""
        if is_tsv and (len(names) < 2 or any(name.startswith('"') for name in names)):
            advice = "; a .tsv is divided by tabs and has no quotes: is it a .csv?"
        elif not is_tsv:
            advice = f"; the header was read as divided by {DELIMITERS.get(delimiter, repr(delimiter))}"
        raise DataError(f"{error}{advice}") from None
    return names, rows


def _delimiter(header: str, find: Callable[[list[str], str], object]) -> str:
    """Return the delimiter that gives a header the needed columns; if none does, the one that gives it the most columns."""
    numbers = {}
    for delimiter in DELIMITERS:
        try:
            names = [trimmed(name) for name in next(csv.reader([header], delimiter=delimiter), [])]
            numbers[delimiter] = len(names)
            find(names, "")
        except (csv.Error, DataError):
            continue
        return delimiter
    return max(numbers, key=numbers.__getitem__, default=",")


def table_rows(path: Path, needed: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """Yield the place and the `needed` columns of each row of a CSV file. A value that a row lacks is empty.

    Names of columns are in any case. Raises DataError with the file and the line.
    """

    def find(names: list[str], where: str) -> list[int]:
        by_meaning = {alike(name): place for place, name in reversed([*enumerate(names)])}
        if missing := [name for name in needed if alike(name) not in by_meaning]:
            have = ", ".join(map(repr, names))[:200]
            raise DataError(f"{where} has no column {missing[0]}; there are {have}")
        return [by_meaning[alike(name)] for name in needed]

    try:
        with path.open("rb") as file, BoundedLines(file, str(path)) as lines:
            names, rows = _open_rows(lines, find)
            places = find(names, f"{path}, line 1")
            for row in rows:
                lines.end_record()
                if any(row[len(names) :]):
                    raise DataError(
                        f"{lines.where} has {len(row)} columns, the header has {len(names)}: numbers with decimal commas need "
                        "quotes, or semicolons between columns"
                    )
                if row:
                    yield lines.where, [row[place] if place < len(row) else "" for place in places]
    except OSError as error:
        raise unreadable(str(path), error) from error
    except csv.Error as error:
        raise DataError(f"{lines.where} is not valid CSV: {error}") from None


def check_header(path: Path, columns: Columns, *, is_labelled: bool) -> None:
    """Refuse a .csv or .tsv whose header lacks a needed column, before it is sent. Raises DataError.

    Other formats have no header, and what is no regular file is refused by what sends it.
    """
    if not (path.name.lower().endswith(TABLE_ENDINGS) and path.is_file()):
        return
    try:
        with path.open("rb") as file, BoundedLines(file, str(path)) as lines:
            open_table(lines, columns, is_labelled=is_labelled)
    except OSError as error:
        raise unreadable(str(path), error) from error


def check_use(columns: Columns, names: Iterable[str]) -> None:
    """Refuse names of columns if all files are .conll, which have none. Raises DataError."""
    if columns.named and all(name.lower().endswith(".conll") for name in names):
        raise DataError(
            f"columns of a .conll have no names, but a name was given for {', '.join(columns.named)}: leave it out"
        )
