"""A domain's corpus as somebody uploads it: a text file or JSON lines, plain or gzipped, trusted in nothing.

Read in one pass after another, so that neither an endless line nor a bomb of a gzip file gets into memory whole.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from hplm.core.text_lines import BoundedLines
from hplm.errors import DataError, unreadable
from hplm_builder.data.json_values import json_values

MOST_CHARACTERS = 1_000_000
MOST_BYTES = 256 << 20
MOST_DOCUMENTS = 5_000_000
# A line costs some time whatever is in it: a file of blank ones alone would keep a worker for minutes.
MOST_LINES = 20_000_000
ENDINGS = ("", ".txt", ".jsonl")


def read_corpus(
    path: Path, most_bytes: int = MOST_BYTES, most_documents: int = MOST_DOCUMENTS, most_lines: int = MOST_LINES
) -> list[str]:
    """The distinct documents of a corpus, in order: .txt or .jsonl, or .gz of it.

    Of a text file each line is a document, or, where it has blank lines, what stands between them, in pieces where that is
    over a million characters; of JSON lines each object's "text" is. Raises DataError with the line for what is not UTF-8,
    lines over 1 MB, more than `most_bytes` unpacked, more than `most_documents` and more than `most_lines`, blank ones too.
    """
    name = path.name
    is_packed = name.lower().endswith(".gz")
    ending = Path(name.lower().removesuffix(".gz")).suffix
    if ending not in ENDINGS:
        raise DataError(f"{name}: a corpus ends in .txt or .jsonl, or in .gz after that")
    documents: dict[str, None] = {}
    try:
        separated = False
        if ending != ".jsonl":
            with _opened(path, is_packed) as file, BoundedLines(file, name, most_bytes, most_lines) as lines:
                separated = _has_blank_lines(_without_ends(lines))
        with _opened(path, is_packed) as file, BoundedLines(file, name, most_bytes, most_lines) as lines:
            of_text = _documents(_without_ends(lines), separated) if ending != ".jsonl" else _json_documents(lines)
            for document in of_text:
                documents[document] = None
                if len(documents) > most_documents:
                    raise DataError(f"{name} holds more than the {most_documents:,} documents that are taken")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{name} is not a whole gzip file: {error}") from None
    except OSError as error:
        raise unreadable(name, error) from error
    if not documents:
        raise DataError(f"{name} holds no text")
    return list(documents)


def _opened(path: Path, packed: bool) -> AbstractContextManager[BinaryIO]:
    # Both read bytes line by line; gzip's own class only lacks the name.
    return gzip.open(path, "rb") if packed else path.open("rb")  # type: ignore[return-value]


def _without_ends(lines: BoundedLines) -> Iterator[str]:
    for line in lines:
        lines.end_record()
        yield line.rstrip("\r\n")


def _has_blank_lines(lines: Iterator[str]) -> bool:
    """Whether a blank line stands between two others."""
    after_text = after_blank = False
    for line in lines:
        if not line.strip():
            after_blank = after_text
        elif after_blank:
            return True
        else:
            after_text = True
    return False


def _documents(lines: Iterator[str], separated: bool) -> Iterator[str]:
    """Lines, or paragraphs. One without end is several: what reads them has each in memory whole."""
    paragraph: list[str] = []
    size = 0
    for line in lines:
        if text := line.strip():
            paragraph.append(text)
            size += len(text)
        if paragraph and (not (text and separated) or size > MOST_CHARACTERS):
            yield " ".join(paragraph)
            paragraph, size = [], 0
    if paragraph:
        yield " ".join(paragraph)


def _json_documents(lines: BoundedLines) -> Iterator[str]:
    for where, row in json_values(lines, json.JSONDecoder()):
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise DataError(f'{where}: expected an object with a "text"')
        # A JSON string may hold half of a surrogate pair, which is no text.
        if text := text.encode("utf-8", "replace").decode().strip():
            yield text
