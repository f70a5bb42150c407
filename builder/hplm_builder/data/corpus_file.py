"""Reader of an uploaded domain corpus: a text file or JSON lines, plain or gzipped, from an untrusted source.

The file is read as a stream, so that neither an endless line nor a gzip bomb fills the memory.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from hplm.core.text_lines import BoundedLines, refuse_model
from hplm.errors import DataError, unreadable
from hplm_builder.data.json_values import json_values

MOST_CHARACTERS = 1_000_000  # characters of a document; a longer paragraph becomes several documents
MOST_BYTES = 256 << 20  # bytes of the unpacked file
MOST_DOCUMENTS = 5_000_000
# Reading a blank line takes time too: a file of blank lines alone would keep a worker process busy for minutes.
MOST_LINES = 20_000_000
ENDINGS = ("", ".txt", ".jsonl")


def read_corpus(
    path: Path, most_bytes: int = MOST_BYTES, most_documents: int = MOST_DOCUMENTS, most_lines: int = MOST_LINES
) -> list[str]:
    """Return the distinct documents of a .txt or .jsonl file, or of such a file with .gz behind its name, in order.

    In a text file each line is a document, or each paragraph if blank lines separate them. Paragraphs over a million
    characters become several documents. In JSON lines each object's "text" is a document.
    Raises DataError, with the line, for bytes that are not UTF-8 and for a line over 1 MB. Also raises DataError for more
    than `most_bytes` unpacked bytes, `most_documents` documents or `most_lines` lines, blank lines included.
    """
    refuse_model(path)
    name = path.name
    is_packed = name.lower().endswith(".gz")
    ending = Path(name.lower().removesuffix(".gz")).suffix
    if ending not in ENDINGS:
        raise DataError(f"{name}: the name of a corpus must end in .txt, .jsonl, .txt.gz or .jsonl.gz")
    documents: dict[str, None] = {}
    try:
        separated = False
        if ending != ".jsonl":
            with _opened(path, is_packed) as file, BoundedLines(file, name, most_bytes, most_lines) as lines:
                separated = _has_blank_lines(_without_ends(lines))
        with _opened(path, is_packed) as file, BoundedLines(file, name, most_bytes, most_lines) as lines:
            found = _text_documents(_without_ends(lines), separated) if ending != ".jsonl" else _json_documents(lines)
            for document in found:
                documents[document] = None
                if len(documents) > most_documents:
                    raise DataError(f"{name} holds more than {most_documents:,} documents, the most that are accepted")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{name} is not a whole gzip file: {error}") from None
    except OSError as error:
        raise unreadable(name, error) from error
    if not documents:
        raise DataError(f"{name} holds no text")
    return list(documents)


def _opened(path: Path, is_packed: bool) -> AbstractContextManager[BinaryIO]:
    # GzipFile reads bytes line by line like a file, but its type does not say so.
    return gzip.open(path, "rb") if is_packed else path.open("rb")  # type: ignore[return-value]


def _without_ends(lines: BoundedLines) -> Iterator[str]:
    for line in lines:
        lines.end_record()
        yield line.rstrip("\r\n")


def _has_blank_lines(lines: Iterator[str]) -> bool:
    """Return whether a blank line separates two lines of text."""
    after_text = after_blank = False
    for line in lines:
        if not line.strip():
            after_blank = after_text
        elif after_blank:
            return True
        else:
            after_text = True
    return False


def _text_documents(lines: Iterator[str], separated: bool) -> Iterator[str]:
    """Yield lines, or paragraphs if they are `separated`. An overlong paragraph is cut, because each is kept in memory."""
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
            raise DataError(f'{where}: expected an object with a string "text"')
        # A JSON string may hold half of a surrogate pair, which cannot be encoded.
        if text := text.encode("utf-8", "replace").decode().strip():
            yield text
