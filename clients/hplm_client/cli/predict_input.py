"""The inputs of `hplm predict`: one text or pair, or one on each line of standard input."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hplm.errors import BadInputError, HplmError, TextEncodingError

TextAndPair = tuple[str, str | None]


@dataclass(frozen=True)
class PredictInput:
    """A text with its pair, or the error of a line that holds no text; `line` is the number of its line."""

    texts: TextAndPair | HplmError
    line: int | None = None


def read_inputs(lines: Iterable[bytes], text: str | None, pair: str | None, *, jsonl: bool) -> Iterator[PredictInput]:
    """Return `text` with its `pair`, or else an input for each line that is not blank.

    A line is a text, or with `jsonl` an object with the keys of labelled data. Raises BadInputError for options that do not go
    together, and during the iteration if a line cannot be read.
    """
    if text is not None and jsonl:
        raise BadInputError("--jsonl reads standard input: leave the text out")
    if text is None and pair is not None:
        raise BadInputError("--pair is the second text of a pair: give the first one too, or --jsonl for many")
    return _read_lines(lines, jsonl) if text is None else iter([PredictInput((text, pair))])


def _read_lines(lines: Iterable[bytes], jsonl: bool) -> Iterator[PredictInput]:
    numbered = enumerate(lines, 1)
    while True:
        try:
            number, line = next(numbered, (0, b""))
        except OSError as error:
            raise BadInputError(f"standard input cannot be read: {error.strerror}") from None
        if not number:
            return
        try:
            # Windows editors put a byte order mark in front of the first line; it is not part of the text.
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            yield PredictInput(TextEncodingError(f"line {number} is not UTF-8: byte {error.start} of it"), number)
            continue
        if text.strip():
            yield PredictInput(_parse_json(number, text) if jsonl else (text.rstrip("\r\n"), None), number)


def _parse_json(number: int, line: str) -> TextAndPair | HplmError:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadInputError(f"line {number} is not JSON: {error}")
    if not isinstance(row, dict):
        return BadInputError(f"line {number}: expected an object")
    text = row.get("text", row.get("sentence1", row.get("sentence")))
    pair = row.get("text_pair", row.get("sentence2"))
    if not isinstance(text, str) or not (pair is None or isinstance(pair, str)):
        return BadInputError(f"line {number}: expected an object with text and, for a pair, text_pair")
    try:
        f"{text}{pair}".encode()
    except UnicodeEncodeError:
        return TextEncodingError(f"line {number} has a lone surrogate, so it is not a text")
    return text, pair
