"""Readers of labelled files: each yields rows of bounded size, whatever the format."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from hplm.core.columns import Columns, open_table
from hplm.core.text_lines import MOST_LINE_BYTES, BoundedLines
from hplm.errors import DataError, unreadable
from hplm_builder.data.json_values import json_values

LONGEST_RECORD = MOST_LINE_BYTES  # bytes of a line, of a CSV record over several lines, of a CoNLL sentence
Row = dict[str, Any]
BLANKS = " \t\r\n\v\f"
# A tag of the schemes IOB, BIOES (E ends an entity, S is a single word) and BILOU (L is the last word, U a unit of one).
_TAG = re.compile("O|[BIESLU]-.+")


def read_rows(
    path: Path,
    name: str = "",
    most_bytes: float = math.inf,
    columns: Columns | None = None,
    *,
    is_labelled: bool = True,
) -> Generator[tuple[str, Row]]:
    """Yield rows as JSON lines have them, each with where it stands. `name` is what errors call the file; its ending says the
    format: .jsonl, .csv, .tsv, .conll. A header is checked for `columns`, for a label only if `is_labelled`.

    Raises DataError, also for more than `most_bytes`.
    """
    name = name or str(path)
    ending = Path(name).suffix.lower()
    if ending not in READERS:
        raise DataError(f"{name}: the ending must be one of {', '.join(READERS)}")
    if path.exists() and not path.is_file():
        raise DataError(f"{name} is not a file")
    try:
        with path.open("rb") as file, BoundedLines(file, name, most_bytes) as lines:
            yield from READERS[ending](lines, columns or Columns(), is_labelled)
    except OSError as error:
        raise unreadable(name, error) from error


def _jsonl(lines: BoundedLines, columns: Columns, is_labelled: bool) -> Iterator[tuple[str, Row]]:
    """Yield rows; whether one has the columns is asked of each, because objects may differ."""
    decoder = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)
    for where, row in json_values(lines, decoder):
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected an object")
        yield where, row


def _no_number(said: str) -> float:
    """NaN and infinity are no JSON, though Python writes them: as a label one would make classes of a regression's values."""
    raise ValueError(f"{said[:80]} is no number")


def _finite(said: str) -> float:
    return float(said) if math.isfinite(float(said)) else _no_number(said)


def _table(lines: BoundedLines, columns: Columns, is_labelled: bool) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(LONGEST_RECORD)
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
        said = "line ends are mixed" if "new-line character" in str(error) else str(error)
        raise DataError(f"{lines.where} is not valid CSV: {said}") from None


def _conll(lines: BoundedLines, columns: Columns, is_labelled: bool) -> Iterator[tuple[str, Row]]:
    """Yield sentences: a word a line, the word first, its tag last. A blank line ends a sentence.

    Columns lie between tabs if the first word's line has one, else between blanks; a line with tabs is always divided by them.
    All lines have as many columns as the first, or the label of one that lacks its last would be another column's value. A word
    may hold other spaces than ASCII's, as a no-break space; between tabs any.
    """
    words: list[tuple[str, str]] = []
    widths = _Widths()
    for line in lines:
        row = line.strip(BLANKS) if line.strip() else ""
        if "\r" in row or "\n" in row:
            raise DataError(f"{lines.where}: line ends are mixed")
        if row and row.split()[0] != "-DOCSTART-":
            filled = widths.divided(row, lines)
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


class _Widths:
    """Divides the lines of a .conll into columns, and refuses a line with another number of them than the first."""

    def __init__(self) -> None:
        self._first_line, self._is_tabbed = 0, False
        # The first line's columns, and those of them that are not empty; None where a later line has another number.
        self._all: int | None = None
        self._filled: int | None = None

    def divided(self, row: str, lines: BoundedLines) -> list[str]:
        """Return the columns of a line that are not empty. Raises DataError.

        Between tabs a column may be empty, or several tabs align columns: either number may be the one that stays.
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
                "column missing, or does a word hold a blank? (A word may hold some if tabs divide columns.)"
            )
        return filled


def _sentence(words: list[tuple[str, str]]) -> Row:
    entities: list[Row] = []
    position, goes_on = 0, ""  # the type of an entity that may go on with this word
    for word, tag in words:
        end = position + len(word)
        scheme, _, kind = tag.partition("-")
        if scheme in ("I", "E", "L") and goes_on == kind:
            entities[-1]["end"] = end
        elif scheme != "O":
            entities.append({"label": kind, "start": position, "end": end})
        goes_on = kind if scheme in ("B", "I") else ""
        position = end + 1
    return {"text": " ".join(word for word, _ in words), "entities": entities}


READERS: dict[str, Callable[[BoundedLines, Columns, bool], Iterator[tuple[str, Row]]]] = {
    ".jsonl": _jsonl,
    ".csv": _table,
    ".tsv": _table,
    ".conll": _conll,
}
