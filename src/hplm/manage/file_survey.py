"""A first check of a file before a job is queued: it must be text in a form that we read, with lines that fit in memory.

The check reads the file once, block by block. The job itself checks the contents of the lines.
"""

from __future__ import annotations

from pathlib import Path

from hplm.core.text_lines import MOST_LINE_BYTES, BoundedLines
from hplm.errors import DataError, check_ending, unreadable

# A packed file of a few KB may unpack to more than the disk holds. Only a corpus may be packed; it is unpacked up to a bound.
GZIP = b"\x1f\x8b"
PACKED = {
    b"PK\x03\x04": "zip",
    GZIP: "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"7z\xbc\xaf": "7z",
}
MOST_GZIP_RATIO = 1032  # deflate packs at most this many bytes into one


def survey(path: Path, endings: tuple[str, ...], most_bytes: int) -> int:
    """Return the bytes of text in a file, or the most that a packed file can hold. Raises DataError for an unusable file."""
    name = path.name
    check_ending(name, endings)
    try:
        size_bytes = path.stat().st_size
        if size_bytes > most_bytes:
            raise DataError(f"{name} has {size_bytes:,} bytes, at most {most_bytes:,} are accepted")
        with path.open("rb") as file:
            start = file.read(8)
            if name.lower().endswith(".gz"):
                if not start.startswith(GZIP):
                    raise DataError(f"{name} is no gzip file")
                return size_bytes * MOST_GZIP_RATIO
            for magic, kind in PACKED.items():
                if start.startswith(magic):
                    raise DataError(f"{name} is packed ({kind}): send the text itself")
            file.seek(0)
            with BoundedLines(file, name) as lines:
                return _check_lines(lines)
    except OSError as error:
        raise unreadable(name, error) from error


def _check_lines(lines: BoundedLines) -> int:
    """Return the bytes of text in a file. Raises DataError for a line that is too long, no text or no line at all."""
    newline = lines.form.newline.encode()
    # A JSON list may stand on one line; the job then checks the size of each object.
    is_bounded = not (lines.form.is_list and lines.name.lower().endswith(".jsonl"))
    num_bytes = open_line_bytes = 0
    line = 1
    # A character has at most four bytes, so a block has at most as many bytes as a line may have.
    while block := lines.read(MOST_LINE_BYTES // 4):
        # A line inside a block is no longer than the block, so only lines that cross a border are checked.
        raw = block.encode()
        first = raw.find(newline)
        open_line_bytes += len(raw) if first < 0 else first
        if is_bounded and open_line_bytes > MOST_LINE_BYTES:
            raise DataError(f"{lines.name}: line {line} has more than {MOST_LINE_BYTES:,} bytes")
        if first >= 0:
            open_line_bytes = len(raw) - 1 - raw.rfind(newline)
        line = lines.number + 1
        num_bytes += len(raw)
    if not num_bytes:
        raise DataError(f"{lines.name} is empty")
    return num_bytes
