"""What `hplm predict` is to ask: one text or pair, or a line of standard input each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from hplm.errors import BadInputError, TextEncodingError

TextAndPair = tuple[str, str | None]


def texts_asked(lines: Iterable[str], text: str | None, pair: str | None, *, jsonl: bool) -> Iterator[TextAndPair]:
    """`text` with its `pair`, or else each of `lines`: a text, or with `jsonl` an object under the names of labelled data.

    Raises BadInputError, for a line when it is that line's turn.
    """
    if text is not None and jsonl:
        raise BadInputError("--jsonl reads standard input: leave the text out")
    if text is None and pair is not None:
        raise BadInputError("--pair is the second text of a pair: give the first one too, or --jsonl for many")
    return _each(lines, jsonl) if text is None else iter([(text, pair)])


def lines_of(raw: Iterable[bytes]) -> Iterator[str]:
    """Lines of standard input. Raises TextEncodingError or BadInputError, for a line when it is that line's turn."""
    lines = enumerate(raw, 1)
    while True:
        try:
            number, line = next(lines, (0, b""))
        except OSError as error:
            raise BadInputError(f"standard input cannot be read: {error.strerror}") from None
        if not number:
            return
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise TextEncodingError(f"line {number} is not UTF-8: byte {error.start} of it") from None


def _each(lines: Iterable[str], jsonl: bool) -> Iterator[TextAndPair]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _from_json(number, line) if jsonl else (line.rstrip("\r\n"), None)


def _from_json(number: int, line: str) -> TextAndPair:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"line {number} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadInputError(f"line {number}: expected an object")
    text = row.get("text", row.get("sentence1", row.get("sentence")))
    pair = row.get("text_pair", row.get("sentence2"))
    if not isinstance(text, str) or not (pair is None or isinstance(pair, str)):
        raise BadInputError(f"line {number}: expected an object with text and, of a pair, text_pair")
    return text, pair
