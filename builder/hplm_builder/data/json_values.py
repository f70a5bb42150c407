"""Values of a JSON file, one a line or in one list over the whole file, read so that no value can fill the memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from hplm.core.text_lines import MOST_LINE_BYTES, BoundedLines
from hplm.errors import DataError

BLOCK_CHARACTERS = 1 << 16  # read at once of a list
LONGEST_WORD = 16  # characters of a literal or an escape of JSON: a fault so near the end of a block may be the block's
_NO_BLANK = re.compile("[^ \t\r\n]")


def json_values(lines: BoundedLines, decoder: json.JSONDecoder) -> Iterator[tuple[str, Any]]:
    """Yield each value of a file with where it stands: one of each line that is not blank, or the objects of a list.

    Raises DataError.
    """
    if lines.form.is_list:
        yield from _List(lines, decoder).objects()
        return
    for line in lines:
        lines.end_record()
        if not line.strip():
            continue
        try:
            yield lines.where, decoder.decode(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{lines.where} is not JSON: {error}; an object takes one line, or all of them stand in one list"
            ) from None


class _List:
    """The objects of a JSON list, which may be on one line or over several."""

    def __init__(self, lines: BoundedLines, decoder: json.JSONDecoder) -> None:
        self._lines, self._decoder = lines, decoder
        self._text, self._at = "", 0  # what is in memory of the file, and how far that is read
        self._line = 1  # where `_text` begins

    def objects(self) -> Iterator[tuple[str, Any]]:
        """Yield each object with where it begins."""
        self._skip()
        number = 0
        while self._next() != "]" or number:
            number += 1
            begins = self._next()
            where = self._where(self._at, number)
            if begins != "{":
                raise DataError(f"{where}: expected an object, got {begins or 'the end of the file'!r}")
            yield where, self._object(where, number)
            if self._next() != ",":
                break
            self._skip()
        if self._next() != "]":
            said = self._next() or "the end of the file"
            raise DataError(f"{self._where(self._at, number)}: expected a comma or ] after an object, got {said!r}")
        self._skip()
        if self._next():
            raise DataError(f"{self._where(self._at, number)}: more text after the end of the list")

    def _object(self, where: str, number: int) -> Any:
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                break
            except json.JSONDecodeError as error:
                said = f"{self._where(error.pos, number)} is not JSON: {error.msg}"
                # A string without an end is told by where it begins.
                is_cut = error.msg.startswith("Unterminated") or error.pos > len(self._text) - LONGEST_WORD
                if is_cut and len(self._text) - self._at > MOST_LINE_BYTES:
                    raise self._too_long(where) from None
                if not is_cut or not self._more():
                    raise DataError(said) from None
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where} is not JSON: {error}") from None
        if len(self._text[self._at : end].encode()) > MOST_LINE_BYTES:
            raise self._too_long(where)
        self._at = end
        return value

    def _too_long(self, where: str) -> DataError:
        return DataError(
            f"{where}: more than {MOST_LINE_BYTES:,} bytes without an end: one text or example is that long"
        )

    def _skip(self) -> None:
        """Take the next character that is no blank."""
        self._next()
        self._at += 1

    def _next(self) -> str:
        """Return the next character that is no blank, empty at the end of the file; nothing is taken."""
        while (found := _NO_BLANK.search(self._text, self._at)) is None:
            self._at = len(self._text)
            if not self._more():
                return ""
        self._at = found.start()
        return found[0]

    def _more(self) -> bool:
        block = self._lines.read(BLOCK_CHARACTERS)
        if block:
            self._line += self._text.count(self._lines.form.newline, 0, self._at)
            self._text, self._at = self._text[self._at :] + block, 0
        return bool(block)

    def _where(self, position: int, number: int) -> str:
        line = self._line + self._text.count(self._lines.form.newline, 0, position)
        return f"{self._lines.name}, line {line}, entry {number}"
