"""A first check of a file before a job is queued: it must be text in a form that we read, with lines that fit in memory.

The check reads the file once, block by block. The job itself checks the contents of the lines.
"""

from __future__ import annotations

from pathlib import Path

from hplm.core.text_lines import MOST_LINE_BYTES, DecodedFile
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
            with DecodedFile(file, name) as text:
                return _look(text)
    except OSError as error:
        raise unreadable(name, error) from error


def _look(text: DecodedFile) -> int:
    name, newline = text.name, text.form.newline
    # A JSON list may stand on one line; the job then checks the size of each object.
    is_bounded = not (text.form.is_list and name.lower().endswith(".jsonl"))
    seen = lines = open_line = 0
    # A character has at most four bytes, so a block has at most as many bytes as a line may have.
    while block := text.read(MOST_LINE_BYTES // 4):
        raw = block.encode()
        # A line inside a block is no longer than the block, so only lines that cross a border are checked.
        end = newline.encode()
        first, last = raw.find(end), raw.rfind(end)
        open_line += len(raw) if first < 0 else first
        if is_bounded and open_line > MOST_LINE_BYTES:
            raise DataError(f"{name}: line {lines + 1} has more than {MOST_LINE_BYTES:,} bytes")
        if first >= 0:
            open_line = len(raw) - 1 - last
            lines = text.number
        seen += len(raw)
    if not seen:
        raise DataError(f"{name} is empty")
    return seen
