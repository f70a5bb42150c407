"""Sending a file to the server, piece by piece, with a checksum over all of it."""

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
from hplm_client.transport.retry import patiently

# What has been sent and what there is to send, in bytes.
Sent = Callable[[int, int], None]
PATIENCE_S = 10.0
# A piece of so much goes over a slow line within the time of a call, and one that has not is sent again.
MOST_CHUNK_BYTES = 1 << 20
CHUNK_TRIES = 3


def send_file(ask: Callable[..., dict[str, Any]], path: Path, sent: Sent) -> str:
    """Upload a file; returns the upload's id. Asks again where the server has no room for a moment.

    What is not sent to its end, interrupted or refused, is dropped on the server. Raises DataError where the file cannot be
    read, is empty or has an ending that says no format, and the server's errors: UploadError where the file changes meanwhile.
    """
    check_ending(path.name, UPLOAD_ENDINGS)
    with _readable(path):
        about_file = path.stat()
        if stat.S_ISFIFO(about_file.st_mode):
            # To open it would wait for who writes, and it cannot be read twice.
            raise DataError(f"{path} is a pipe: its size and checksum go first, so send a file")
        total_bytes = about_file.st_size
        opened = path.open("rb")
    if not total_bytes:
        opened.close()
        raise DataError(f"{path} is empty")
    with opened as file:
        digest = hashlib.sha256()
        while block := _read(path, file, 1 << 20):
            digest.update(block)
        file.seek(0)
        about = {"bytes": total_bytes, "sha256": digest.hexdigest(), "name": name_on_server(path)}
        # Asked for again only where it surely has not begun: else one that nobody fills would count against all.
        started = patiently(partial(ask, "upload.start", **about), PATIENCE_S, is_full)
        upload, offset = str(started["upload"]), 0
        try:
            while piece := _read(path, file, min(started["chunk_bytes"], MOST_CHUNK_BYTES)):
                data = base64.b64encode(piece).decode()
                chunk = partial(ask, "upload.chunk", upload=upload, offset=offset, data=data)
                patiently(chunk, PATIENCE_S, least=CHUNK_TRIES)
                offset += len(piece)
                sent(offset, total_bytes)
            patiently(partial(ask, "upload.finish", upload=upload), PATIENCE_S)
        except BaseException:
            # It would count against the room for uploads until it expires.
            with suppress(HplmError):
                ask("upload.drop", upload=upload)
            raise
    return upload


def _read(path: Path, file: BinaryIO, size: int) -> bytes:
    with _readable(path):
        return file.read(size)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def is_full(error: HplmError) -> bool:
    """Whether the server took nothing, for too much waits there."""
    return isinstance(error, QueueFullError)


def name_on_server(path: Path) -> str:
    """A file's name in the letters that the server takes; its ending says the format and stays."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", path.name)[-100:]
    return name if name[:1].isalnum() else "file" + name.lstrip("_-")[-96:]
