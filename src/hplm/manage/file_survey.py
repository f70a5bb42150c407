"""A first look at a file before a job takes it: is it text, of lines that fit in memory, of a form that we read.

One pass, one block at a time; what the lines say is for the job to judge.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from hplm.core.text_lines import MOST_LINE_BYTES, DecodedFile
from hplm.errors import DataError, check_ending, unreadable

# A packed file of a few KB may hold more than the disk: only a corpus may be one, and is unpacked up to a bound.
GZIP = b"\x1f\x8b"
PACKED = {
    b"PK\x03\x04": "zip",
    GZIP: "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"7z\xbc\xaf": "7z",
}
MOST_GZIP_RATIO = 1032  # of deflate: what is packed cannot be longer


def survey(path: Path, endings: tuple[str, ...], most_bytes: int) -> int:
    """How many bytes of text a file holds; of a packed one at most. Raises DataError where it cannot be used."""
    name = path.name
    check_ending(name, endings)
    try:
        found = path.stat().st_size
        if found > most_bytes:
            raise DataError(f"{name} has {found:,} bytes, at most {most_bytes:,} are accepted")
        with path.open("rb") as file:
            start = file.read(8)
            if name.lower().endswith(".gz"):
                if not start.startswith(GZIP):
                    raise DataError(f"{name} is no gzip file")
                return found * MOST_GZIP_RATIO
            for magic, kind in PACKED.items():
                if start.startswith(magic):
                    raise DataError(f"{name} is packed ({kind}): send the text itself")
            file.seek(0)
            return _look(file, name)
    except OSError as error:
        raise unreadable(name, error) from error


def _look(file: BinaryIO, name: str) -> int:
    with DecodedFile(file, name) as text:
        return _look_at(text, name)


def _look_at(text: DecodedFile, name: str) -> int:
    newline = text.form.newline
    # A JSON list may be on one line: there the job bounds each of its objects.
    is_bounded = not (text.form.is_list and name.lower().endswith(".jsonl"))
    seen = lines = open_line = 0
    # No character has more than four bytes, so a block has at most as many as a line.
    while block := text.read(MOST_LINE_BYTES // 4):
        if (zero := block.find("\0")) >= 0:
            bad_line = lines + block.count(newline, 0, zero) + 1
            raise DataError(
                f"{name} is no text: line {bad_line} holds a NUL byte (UTF-16 is read if it begins with a byte order mark)"
            )
        try:
            raw = block.encode()
        except UnicodeEncodeError as error:
            bad_line = lines + block.count(newline, 0, error.start) + 1
            raise DataError(f"{name}, line {bad_line} is not {text.form.encoding}: save the file as UTF-8") from None
        # A line inside a block is no longer than the block, so only those that cross a border need a look.
        end = newline.encode()
        first, last = raw.find(end), raw.rfind(end)
        open_line += len(raw) if first < 0 else first
        if is_bounded and open_line > MOST_LINE_BYTES:
            raise DataError(f"{name}: line {lines + 1} has more than {MOST_LINE_BYTES:,} bytes")
        if first >= 0:
            open_line = len(raw) - 1 - last
            lines += block.count(newline)
        seen += len(raw)
    if not seen:
        raise DataError(f"{name} is empty")
    return seen
