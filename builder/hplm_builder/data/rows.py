"""Rows of a labelled file, whatever its format, read so that no file can fill the memory with one line of it."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from hplm.errors import DataError, unreadable
from hplm.manage.file_survey import MOST_LINE_BYTES

LONGEST_RECORD = MOST_LINE_BYTES  # bytes of a line, of a CSV record over several lines, of a CoNLL sentence
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
Row = dict[str, Any]
BLANKS = " \t\r\n\v\f"


class BoundedLines:
    """Lines of a UTF-8 file, with their ends. Raises DataError naming file and line for what is not text or too long.

    Whoever reads says where a record ends; what it may hold is bounded by LONGEST_RECORD, and the whole by `most_bytes`.
    """

    def __init__(self, file: IO[bytes], name: str, most_bytes: float) -> None:
        self._file = file
        self._name = name
        self._most_bytes, self._bytes = most_bytes, 0
        self._number = 0
        self._record_bytes = 0

    @property
    def where(self) -> str:
        """File and line just read, for an error."""
        return f"{self._name}, line {self._number}"

    def end_record(self) -> None:
        self._record_bytes = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        raw = self._file.readline(LONGEST_RECORD + 1 - self._record_bytes)
        if not raw:
            raise StopIteration
        self._number += 1
        self._record_bytes += len(raw)
        self._bytes += len(raw)
        if self._bytes > self._most_bytes:
            raise DataError(f"{self._name} has more than the {self._most_bytes:,} bytes that are accepted")
        if self._record_bytes > LONGEST_RECORD:
            raise DataError(
                f"{self.where}: more than {LONGEST_RECORD:,} bytes without an end: one text or example is that long; is an end "
                "of line, a blank line or a closing quote missing?"
            )
        if b"\0" in raw:
            raise DataError(f"{self.where} holds a NUL byte: the file is not UTF-8 text")
        try:
            return (raw.removeprefix(BYTE_ORDER_MARK) if self._number == 1 else raw).decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where} is not UTF-8 at byte {error.start} of the line") from None


def read_rows(path: Path, name: str = "", most_bytes: float = math.inf) -> Generator[tuple[str, Row]]:
    """Rows as JSON lines have them, each with where it stands. `name` is what errors call the file; its ending says the
    format: .jsonl, .csv, .tsv, .conll. Raises DataError, also for more than `most_bytes`.
    """
    name = name or str(path)
    ending = Path(name).suffix.lower()
    if ending not in READERS:
        raise DataError(f"{name}: the ending must be one of {', '.join(READERS)}")
    if path.exists() and not path.is_file():
        raise DataError(f"{name} is not a file")
    try:
        with path.open("rb") as file:
            lines = BoundedLines(file, name, most_bytes)
            for row in READERS[ending](lines):
                yield lines.where, row
    except OSError as error:
        raise unreadable(name, error) from error


def _jsonl(lines: BoundedLines) -> Iterator[Row]:
    for line in lines:
        lines.end_record()
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=_no_number, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{lines.where} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{lines.where}: expected an object")
        yield row


def _no_number(said: str) -> float:
    """NaN and infinity are no JSON, though Python writes them: as a label one would make classes of a regression's values."""
    raise ValueError(f"{said[:80]} is no number")


def _finite(said: str) -> float:
    return float(said) if math.isfinite(float(said)) else _no_number(said)


def _csv(lines: BoundedLines, delimiter: str, quoting: int) -> Iterator[Row]:
    csv.field_size_limit(LONGEST_RECORD)
    options: Any = {"delimiter": delimiter, "quoting": quoting, "strict": True}
    reader = csv.DictReader(lines, **options)
    try:
        reader.fieldnames = columns = [name.strip() for name in reader.fieldnames or ()]
        if twice := next((name for name, count in Counter(columns).items() if name and count > 1), None):
            raise DataError(f"{lines.where}: the header has the column {twice[:80]!r} more than once")
        if len(columns) == 1 and ";" in columns[0]:
            # As spreadsheets write it where a comma is part of numbers.
            raise DataError(f"{lines.where}: columns are divided by commas, in .tsv by tabs, not by semicolons")
        for row in reader:
            lines.end_record()
            if None in row or None in row.values():
                raise DataError(f"{lines.where} has not the {len(reader.fieldnames or [])} columns of the header")
            yield row
    except csv.Error as error:
        raise DataError(f"{lines.where} is not valid CSV: {error}") from None


def _conll(lines: BoundedLines) -> Iterator[Row]:
    """Columns by tabs, in a line without any by blanks: the token first, its IOB tag last. A blank line ends a sentence.

    A token may hold other spaces than ASCII's, as a no-break space; between tabs any.
    """
    tokens: list[tuple[str, str]] = []
    for line in lines:
        row = line.strip(BLANKS) if line.strip() else ""
        columns = [column.strip(BLANKS) for column in row.split("\t")] if "\t" in row else row.split(" ")
        columns = [column for column in columns if column]
        if columns and columns[0] != "-DOCSTART-":
            tag = columns[-1]
            if len(columns) < 2 or not (tag == "O" or (tag[:2] in ("B-", "I-") and tag[2:])):
                raise DataError(f"{lines.where}: expected a token and an IOB tag, got {line[:80]!r}")
            tokens.append((columns[0], tag))
            continue
        lines.end_record()
        if tokens:
            yield _sentence(tokens)
            tokens = []
    if tokens:
        yield _sentence(tokens)


def _sentence(tokens: list[tuple[str, str]]) -> Row:
    entities: list[Row] = []
    position, previous = 0, "O"
    for token, tag in tokens:
        end = position + len(token)
        if tag != "O":
            goes_on = tag[0] == "I" and previous != "O" and previous[2:] == tag[2:]
            if goes_on:
                entities[-1]["end"] = end
            else:
                entities.append({"label": tag[2:], "start": position, "end": end})
        previous, position = tag, end + 1
    return {"text": " ".join(token for token, _ in tokens), "entities": entities}


# TSV files of this kind do not quote: a lone quote is a character.
READERS: dict[str, Callable[[BoundedLines], Iterator[Row]]] = {
    ".jsonl": _jsonl,
    ".csv": partial(_csv, delimiter=",", quoting=csv.QUOTE_MINIMAL),
    ".tsv": partial(_csv, delimiter="\t", quoting=csv.QUOTE_NONE),
    ".conll": _conll,
}
