"""What `hplm predict` is to ask: one text or pair, or a line of standard input each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hplm.errors import BadInputError, HplmError, TextEncodingError

TextAndPair = tuple[str, str | None]


@dataclass(frozen=True)
class Asked:
    """A text with its pair, and the number of the `line` it is from; an error where that line is none."""

    texts: TextAndPair | HplmError
    line: int | None = None


def texts_asked(raw: Iterable[bytes], text: str | None, pair: str | None, *, jsonl: bool) -> Iterator[Asked]:
    """`text` with its `pair`, or else each line of `raw`: a text, or with `jsonl` an object under the names of labelled data.

    Blank lines are left out. Raises BadInputError, where `raw` cannot be read when that shows.
    """
    if text is not None and jsonl:
        raise BadInputError("--jsonl reads standard input: leave the text out")
    if text is None and pair is not None:
        raise BadInputError("--pair is the second text of a pair: give the first one too, or --jsonl for many")
    return _each(raw, jsonl) if text is None else iter([Asked((text, pair))])


def _each(raw: Iterable[bytes], jsonl: bool) -> Iterator[Asked]:
    lines = enumerate(raw, 1)
    while True:
        try:
            number, line = next(lines, (0, b""))
        except OSError as error:
            raise BadInputError(f"standard input cannot be read: {error.strerror}") from None
        if not number:
            return
        try:
            # A byte order mark, as Windows' editors write it, is no part of the text.
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            yield Asked(TextEncodingError(f"line {number} is not UTF-8: byte {error.start} of it"), number)
            continue
        if text.strip():
            yield Asked(_from_json(number, text) if jsonl else (text.rstrip("\r\n"), None), number)


def _from_json(number: int, line: str) -> TextAndPair | HplmError:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadInputError(f"line {number} is not JSON: {error}")
    if not isinstance(row, dict):
        return BadInputError(f"line {number}: expected an object")
    text = row.get("text", row.get("sentence1", row.get("sentence")))
    pair = row.get("text_pair", row.get("sentence2"))
    if not isinstance(text, str) or not (pair is None or isinstance(pair, str)):
        return BadInputError(f"line {number}: expected an object with text and, of a pair, text_pair")
    try:
        f"{text}{pair}".encode()
    except UnicodeEncodeError:
        return TextEncodingError(f"line {number} has a lone surrogate: it is no text")
    return text, pair
