"""Reader of JSON files: one value a line, or one list of objects. The size of each value is bounded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from hplm.core.text_lines import MOST_LINE_BYTES, BoundedLines
from hplm.errors import DataError

BLOCK_CHARACTERS = 1 << 16  # characters of a list that are read at once
# Characters of the longest JSON literal or escape, with a margin. The end of a block may cut one in two, so an error this close
# to the end may vanish once more is read.
LONGEST_WORD = 16
_NO_BLANK = re.compile("[^ \t\r\n]")


def json_values(lines: BoundedLines, decoder: json.JSONDecoder) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) for each line that is not blank, or for each object if the file is a list. Raises DataError."""
    if lines.form.is_list:
        yield from _ListReader(lines, decoder).objects()
        return
    for line in lines:
        lines.end_record()
        if not line.strip():
            continue
        try:
            yield lines.where, decoder.decode(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{lines.where} is not JSON: {error}; write each object on one line, or all objects in one list"
            ) from None


class _ListReader:
    """A reader of the objects of a JSON list, which may have any line breaks."""

    def __init__(self, lines: BoundedLines, decoder: json.JSONDecoder) -> None:
        self._lines, self._decoder = lines, decoder
        # The part of the file in memory, and the position of the next character in that part.
        self._text, self._at = "", 0
        self._line = 1  # the number of the line in which `_text` begins

    def objects(self) -> Iterator[tuple[str, Any]]:
        """Yield (place of its first character, object)."""
        self._skip()
        number = 0
        while self._next() != "]" or number:
            number += 1
            first = self._next()
            where = self._where(self._at, number)
            if first != "{":
                raise DataError(f"{where}: expected an object, got {first or 'the end of the file'!r}")
            yield where, self._object(where, number)
            if self._next() != ",":
                break
            self._skip()
        if self._next() != "]":
            got = self._next() or "the end of the file"
            raise DataError(f"{self._where(self._at, number)}: expected a comma or ] after an object, got {got!r}")
        self._skip()
        if self._next():
            raise DataError(f"{self._where(self._at, number)}: more text after the end of the list")

    def _object(self, where: str, number: int) -> Any:
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                break
            except json.JSONDecodeError as error:
                message = f"{self._where(error.pos, number)} is not JSON: {error.msg}"
                # For a string without an end the decoder gives the position where the string begins.
                is_cut = error.msg.startswith("Unterminated") or error.pos > len(self._text) - LONGEST_WORD
                if is_cut and len(self._text) - self._at > MOST_LINE_BYTES:
                    raise self._too_long(where) from None
                if not is_cut or not self._more():
                    raise DataError(message) from None
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where} is not JSON: {error}") from None
        if len(self._text[self._at : end].encode()) > MOST_LINE_BYTES:
            raise self._too_long(where)
        self._at = end
        return value

    def _too_long(self, where: str) -> DataError:
        return DataError(
            f"{where}: more than {MOST_LINE_BYTES:,} bytes without an end of the object: "
            "shorten its text, or split it into several"
        )

    def _skip(self) -> None:
        """Move past the next character that is not blank."""
        self._next()
        self._at += 1

    def _next(self) -> str:
        """Return the next character that is not blank, or "" at the end of the file, without moving past it."""
        while (found := _NO_BLANK.search(self._text, self._at)) is None:
            self._at = len(self._text)
            if not self._more():
                return ""
        self._at = found.start()
        return found[0]

    def _more(self) -> bool:
        """Read another block; return whether the file had one."""
        block = self._lines.read(BLOCK_CHARACTERS)
        if block:
            self._line += self._text.count(self._lines.form.newline, 0, self._at)
            self._text, self._at = self._text[self._at :] + block, 0
        return bool(block)

    def _where(self, position: int, number: int) -> str:
        line = self._line + self._text.count(self._lines.form.newline, 0, position)
        return f"{self._lines.name}, line {line}, entry {number}"
