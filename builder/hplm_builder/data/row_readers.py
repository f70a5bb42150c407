"""Readers of labelled files, one a format. Each yields rows of bounded size."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from hplm.core.columns import Columns, open_table
from hplm.core.text_lines import MOST_LINE_BYTES, BoundedLines, refuse_model
from hplm.errors import DataError, unreadable
from hplm_builder.data.json_values import json_values
from hplm_builder.data.labelled import LabelledFile

Row = dict[str, Any]
BLANKS = " \t\r\n\v\f"
# A tag of the schemes IOB, BIOES (E: last word, S: single word) or BILOU (L: last word, U: single word).
_TAG = re.compile("O|[BIESLU]-.+")


def read_rows(file: LabelledFile, columns: Columns, *, is_labelled: bool) -> Generator[tuple[str, Row]]:
    """Yield (place, row) for each row; a row has the keys of its JSON line or of the header.

    The format is one of .jsonl, .csv, .tsv and .conll. The header must have `columns`, and a label's column if `is_labelled`.
    Raises DataError.
    """
    name, path = file.name, file.path
    refuse_model(path)
    ending = Path(name).suffix.lower()
    if ending not in READERS:
        raise DataError(f"{name}: the ending must be one of {', '.join(READERS)}")
    if path.exists() and not path.is_file():
        raise DataError(f"{name} is not a file")
    try:
        with path.open("rb") as opened, BoundedLines(opened, name, file.most_bytes) as lines:
            yield from READERS[ending](lines, columns, is_labelled)
    except OSError as error:
        raise unreadable(name, error) from error


def _jsonl(lines: BoundedLines, columns: Columns, is_labelled: bool) -> Iterator[tuple[str, Row]]:
    """Yield rows. The caller checks the columns of each row, because objects may differ."""
    decoder = json.JSONDecoder(parse_constant=_refuse_number, parse_float=_finite)
    for where, row in json_values(lines, decoder):
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected an object")
        yield where, row


def _refuse_number(literal: str) -> float:
    """Refuse NaN and infinity, which Python writes but JSON lacks: such a label would turn a regression into classes."""
    raise ValueError(f"{literal[:80]} is not a finite number")


def _finite(literal: str) -> float:
    return float(literal) if math.isfinite(float(literal)) else _refuse_number(literal)


def _table(lines: BoundedLines, columns: Columns, is_labelled: bool) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(MOST_LINE_BYTES)
    names, rows = open_table(lines, columns, is_labelled=is_labelled)
    lines.end_record()
    try:
        for values in rows:
            lines.end_record()
            if not values:
                continue
            if len(values) != len(names):
                raise DataError(f"{lines.where} has {len(values)} columns, the header has {len(names)}")
            yield lines.where, dict(zip(names, values, strict=True))
    except csv.Error as error:
        reason = "line ends are mixed" if "new-line character" in str(error) else str(error)
        raise DataError(f"{lines.where} is not valid CSV: {reason}") from None


def _conll(lines: BoundedLines, columns: Columns, is_labelled: bool) -> Iterator[tuple[str, Row]]:
    """Yield sentences. Each line has one word, its first column, and the word's tag, its last. A blank line ends a sentence.

    Tabs separate the columns of a line that has tabs, else blanks do. All lines must have as many columns as the first,
    because the tag of a shorter line would be another column's value. A word may hold non-ASCII spaces, and between tabs any.
    """
    words: list[tuple[str, str]] = []
    columns_of = _ColumnCount()
    for line in lines:
        row = line.strip(BLANKS) if line.strip() else ""
        if "\r" in row or "\n" in row:
            raise DataError(f"{lines.where}: line ends are mixed")
        if row and row.split()[0] != "-DOCSTART-":
            filled = columns_of.split(row, lines)
            tag = filled[-1]
            if len(filled) < 2 or not _TAG.fullmatch(tag):
                raise DataError(f"{lines.where}: expected a word and an IOB, BIOES or BILOU tag, got {line[:80]!r}")
            words.append((filled[0], tag))
            continue
        lines.end_record()
        if words:
            yield lines.where, _sentence(words)
            words = []
    if words:
        yield lines.where, _sentence(words)


class _ColumnCount:
    """Splits the lines of a .conll file into columns, and refuses a line that has more or fewer than the first."""

    def __init__(self) -> None:
        self._first_line, self._is_tabbed = 0, False
        # How many columns the first line has, and how many of them are not empty; None once a later line has another number.
        self._all: int | None = None
        self._filled: int | None = None

    def split(self, row: str, lines: BoundedLines) -> list[str]:
        """Return the columns of a line that are not empty. Raises DataError.

        Two tabs in a row mean an empty column in some files and alignment in others. So only one of the two numbers must be
        the same in all lines.
        """
        if not self._first_line:
            self._is_tabbed = "\t" in row
        is_tabbed = self._is_tabbed or "\t" in row
        columns = row.split("\t") if is_tabbed else [word for word in row.split(" ") if word.strip()]
        filled = [column.strip(BLANKS) for column in columns if column.strip()]
        if not self._first_line:
            self._first_line, self._all, self._filled = lines.number, len(columns), len(filled)
        expected = self._all if self._all is not None else self._filled
        self._all = self._all if self._all == len(columns) else None
        self._filled = self._filled if self._filled == len(filled) else None
        if self._all is None and self._filled is None:
            between = "tabs" if self._is_tabbed else "blanks"
            raise DataError(
                f"{lines.where} has {len(columns)} columns, line {self._first_line} has {expected}, between {between}: is a "
                "column missing, or does a word hold a blank? (Words may hold blanks if tabs separate the columns.)"
            )
        return filled


def _sentence(words: list[tuple[str, str]]) -> Row:
    entities: list[Row] = []
    position, open_kind = 0, ""  # the type of the entity that the next word may continue
    for word, tag in words:
        end = position + len(word)
        scheme, _, kind = tag.partition("-")
        if scheme in ("I", "E", "L") and open_kind == kind:
            entities[-1]["end"] = end
        elif scheme != "O":
            entities.append({"label": kind, "start": position, "end": end})
        open_kind = kind if scheme in ("B", "I") else ""
        position = end + 1
    return {"text": " ".join(word for word, _ in words), "entities": entities}


READERS: dict[str, Callable[[BoundedLines, Columns, bool], Iterator[tuple[str, Row]]]] = {
    ".jsonl": _jsonl,
    ".csv": _table,
    ".tsv": _table,
    ".conll": _conll,
}
