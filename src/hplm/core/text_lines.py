"""Text of a file from a user: its encoding, its line ends, and lines of bounded size.

The client, the manager's first look and the job all read a file through this module, so that they agree. Standard library only.
"""

from __future__ import annotations

import codecs
import io
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from hplm.errors import DataError, unreadable

MOST_LINE_BYTES = 1_000_000  # UTF-8 bytes of a line; a file's form is found in so many bytes of its beginning
_UTF_32 = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
Opened = TypeVar("Opened", bound="DecodedFile")
# Converting a file twice leaves two carriage returns before a line feed.
_LINE_END = re.compile("\r*\n|\r")

# Endings of files that hold a model's weights.
_WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".gguf", ".h5", ".msgpack")


def refuse_model(path: Path) -> None:
    """Raise DataError, which says what to do, if a file or folder of a model came where text is expected."""
    try:
        names = sorted(child.name for child in path.iterdir()) if path.is_dir() else [path.name]
    except OSError as error:
        raise unreadable(str(path), error) from error
    weights = [name for name in names if name.lower().endswith(_WEIGHT_ENDINGS)]
    config = [name for name in ("adapter_config.json", "config.json") if name in names][:1]
    if weights or config:
        kind = "an adapter" if config == ["adapter_config.json"] else "a model"
        raise DataError(
            f"{path} is {kind} ({', '.join([*config, *weights][:3])}), and labelled examples or texts are expected: hplm "
            "cannot import adapters and fine-tuned models. Send the examples that it was trained on. A pretrained encoder can "
            "be a base of tenants: `hplm build base --model FOLDER`"
        )
    if path.is_dir():
        raise DataError(f"{path} is not a file but a folder: {', '.join(names[:5]) or 'it is empty'}")


@dataclass(frozen=True)
class TextForm:
    """The form of a file's text. `newline` is "\\n", which may stand after "\\r", or "\\r" alone."""

    encoding: str
    newline: str
    is_list: bool


def find_form(file: BinaryIO, name: str) -> TextForm:
    """Find the form of a file from its beginning. The first line end decides. Raises DataError for UTF-32."""
    start = file.read(MOST_LINE_BYTES)
    file.seek(0)
    if start.startswith(_UTF_32):
        raise DataError(f"{name} is UTF-32: save it as UTF-8")
    encoding = "UTF-16" if start.startswith(_UTF_16) else "UTF-8"
    text = start.decode(encoding, "replace").removeprefix("\ufeff")
    end = _LINE_END.search(text)
    is_cut = end is not None and end.end() == len(text) and len(start) == MOST_LINE_BYTES
    newline = "\r" if end is not None and end[0] == "\r" and not is_cut else "\n"
    return TextForm(encoding, newline, text.lstrip()[:1] == "[")


class DecodedFile:
    """A file's text, without its byte order mark. Raises DataError naming file and line for what is not text.

    As a context it gives the file back at its end, still open.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.name, self.form = name, find_form(file, name)
        self.number = 0  # of line ends that were read
        # Bytes that are no text become surrogates, which cannot be encoded.
        is_utf_16 = self.form.encoding == "UTF-16"
        codec, errors = ("utf-16", "surrogatepass") if is_utf_16 else ("utf-8-sig", "surrogateescape")
        self._text = io.TextIOWrapper(file, codec, errors, newline=self.form.newline)

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        # Else it would close the file when it is collected, and warn of that.
        self._text.detach()

    def read(self, num_characters: int) -> str:
        """Return the next characters, over as many lines as they are; empty at the end."""
        text = self._decoded(self._text.read, num_characters)
        self._check(text, self.number + 1)
        self.number += text.count(self.form.newline)
        return text

    def _decoded(self, read: Callable[[int], str], num_characters: int) -> str:
        try:
            return read(num_characters)
        except UnicodeDecodeError:
            # The file ends within a character.
            raise DataError(f"{self.name} is not {self.form.encoding} at its end") from None

    def _check(self, text: str, first_line: int) -> None:
        """Refuse what is no text: bytes of another encoding, NUL."""
        if (nul := text.find("\0")) >= 0:
            line = first_line + text.count(self.form.newline, 0, nul)
            raise DataError(
                f"{self.name}, line {line} holds a NUL byte: it is not UTF-8 text, and UTF-16 begins with a byte order mark"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            before = text[: error.start]
            begins = before.rfind(self.form.newline) + 1
            place = f"byte {len(before[begins:].encode())}"
            if self.form.encoding == "UTF-16":
                place = f"character {error.start - begins}"
            line = first_line + before.count(self.form.newline)
            raise DataError(
                f"{self.name}, line {line} is not {self.form.encoding} at {place} of the line: save the file as UTF-8"
            ) from None


class BoundedLines(DecodedFile):
    """Lines of a file, with their ends. Raises DataError naming file and line for what is not text or too long.

    The reader says where a record ends. A record has at most MOST_LINE_BYTES, the file at most `most_bytes` and `most_lines`.
    """

    def __init__(self, file: BinaryIO, name: str, most_bytes: float = math.inf, most_lines: float = math.inf) -> None:
        super().__init__(file, name)
        self._most_bytes, self._most_lines = most_bytes, most_lines
        self._bytes = self._record_bytes = 0

    @property
    def where(self) -> str:
        """File and line just read, for an error."""
        return f"{self.name}, line {self.number}"

    def end_record(self) -> None:
        """Begin to count the bytes of a new record."""
        self._record_bytes = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._decoded(self._text.readline, MOST_LINE_BYTES + 1 - self._record_bytes)
        if not line:
            raise StopIteration
        self.number += 1
        if self.number > self._most_lines:
            raise DataError(f"{self.name} has more than the {self._most_lines:,} lines that are taken, blank ones too")
        self._record_bytes += self._count(line)
        if self._record_bytes > MOST_LINE_BYTES:
            raise DataError(
                f"{self.where}: more than {MOST_LINE_BYTES:,} bytes without an end: one text or example is that long; is an "
                "end of line, a blank line or a closing quote missing?"
            )
        self._check(line, self.number)
        return line

    def read(self, num_characters: int) -> str:
        text = super().read(num_characters)
        self._count(text)
        return text

    def _count(self, text: str) -> int:
        """Count a text's bytes in the file; return its bytes in UTF-8, which bound a record."""
        num_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        in_file = num_bytes
        if self.form.encoding == "UTF-16":
            in_file = len(text.encode("utf-16-le", "surrogatepass"))
        self._bytes += in_file
        if self._bytes > self._most_bytes:
            raise DataError(f"{self.name} has more than the {self._most_bytes:,} bytes that are accepted")
        return num_bytes
