"""The upload of a file to the server, in chunks with a checksum over the whole file."""

from __future__ import annotations

import base64
import hashlib
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from hplm.core.wire import UPLOAD_ENDINGS
from hplm.errors import DataError, HplmError, QueueFullError, check_ending
from hplm_client.transport.retry import with_retries

# Called after each chunk with the bytes sent so far and the file's size in bytes.
ProgressCallback = Callable[[int, int], None]
# Seconds for which a request of an upload is repeated.
RETRY_S = 10.0
# A chunk of at most this many bytes passes a slow line within the timeout of a call. A chunk that does not is sent again.
MAX_CHUNK_BYTES = 1 << 20
MIN_CHUNK_ATTEMPTS = 3


def send_file(ask: Callable[..., dict[str, Any]], path: Path, sent: ProgressCallback) -> str:
    """Upload a file and return the upload's id. Asks again while the server has no room.

    If the upload is interrupted or refused, the server drops what it has received. Raises DataError if the file cannot be read,
    is empty or has an unknown ending. Raises the server's errors: UploadError if the file changes meanwhile.
    """
    check_ending(path.name, UPLOAD_ENDINGS)
    with _read_errors(path):
        file_status = path.stat()
        if stat.S_ISFIFO(file_status.st_mode):
            # Opening a pipe would wait for its writer, and a pipe cannot be read twice.
            raise DataError(f"{path} is a pipe: the size and checksum are sent first, so send a file")
        total_bytes = file_status.st_size
        opened = path.open("rb")
    with opened as file:
        if not total_bytes:
            raise DataError(f"{path} is empty")
        digest = hashlib.sha256()
        while block := _read(path, file, 1 << 20):
            digest.update(block)
        file.seek(0)
        start = partial(ask, "upload.start", bytes=total_bytes, sha256=digest.hexdigest(), name=name_on_server(path))
        # Repeated only if the server was full. After another error the server may have begun an upload, which a second attempt
        # would leave unfinished.
        started = with_retries(start, RETRY_S, lambda error: isinstance(error, QueueFullError))
        upload, offset = str(started["upload"]), 0
        try:
            while chunk := _read(path, file, min(started["chunk_bytes"], MAX_CHUNK_BYTES)):
                data = base64.b64encode(chunk).decode()
                send_chunk = partial(ask, "upload.chunk", upload=upload, offset=offset, data=data)
                with_retries(send_chunk, RETRY_S, min_attempts=MIN_CHUNK_ATTEMPTS)
                offset += len(chunk)
                sent(offset, total_bytes)
            with_retries(partial(ask, "upload.finish", upload=upload), RETRY_S)
        except BaseException:
            # An unfinished upload would take room on the server until it expires.
            with suppress(HplmError):
                ask("upload.drop", upload=upload)
            raise
    return upload


def _read(path: Path, file: BinaryIO, max_bytes: int) -> bytes:
    with _read_errors(path):
        return file.read(max_bytes)


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def name_on_server(path: Path) -> str:
    """Return a file's name in letters that the server accepts. The ending stays, because it says the format."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", path.name)[-100:]
    return name if name[:1].isalnum() else "file" + name.lstrip("_-")[-96:]
