"""Uploads: chunks in order, one checksum over the file, a quota, and an expiry for unfinished files.

The bytes are in `uploads/<id>/<name>` of the store. The registry says how many of them count. Bytes beyond belong to a
chunk whose writing was interrupted, and are written again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hplm.core.settings import ManagerSettings
from hplm.errors import QueueFullError, StoreUnavailableError, UnknownUploadError, UploadError
from hplm.housekeeping.garbage_collection import drop_expired, drop_uploads, remove_uploads
from hplm.manage.requests import StartUpload, UploadChunk
from hplm.registry.records import Upload
from hplm.registry.registry import Registry
from hplm.runtime.crash_points import crash_point
from hplm.store.artifact import sha256, sync
from hplm.store.layout import Store

# Most uploads at a time: three for each of MOST_QUEUED jobs, and more. Each upload is a folder and a row.
MOST_UPLOADS = 40_000


class Uploads:
    """The uploads of a store. Safe to use from several threads and processes."""

    def __init__(self, store: Store, registry: Registry) -> None:
        self._store, self._registry = store, registry

    def start(self, request: StartUpload, settings: ManagerSettings, now_s: float) -> Upload:
        """Begin an upload. Raises UploadError if the file is too large, QueueFullError if too many bytes wait already."""
        remove_uploads(self._store, drop_expired(self._registry, now_s))
        if request.bytes > (most := min(settings.max_upload_bytes, settings.max_uploads_bytes)):
            raise UploadError(f"{request.name} has {request.bytes:,} bytes, at most {most:,} are accepted")
        root = self._store.upload("")
        with _writing(), _locked(root):
            count, waiting, unsent = self._registry.count_uploads()
            if count >= MOST_UPLOADS:
                raise QueueFullError(
                    f"{count:,} uploads wait or are on their way; drop those that no job needs "
                    "(`hplm upload list`), or try again later"
                )
            if waiting + request.bytes > settings.max_uploads_bytes:
                raise QueueFullError(
                    f"uploads of {waiting:,} bytes wait already, with this one it would be more than "
                    f"{settings.max_uploads_bytes:,}; drop those that no job needs (`hplm upload list`), or try "
                    "again later; the server's operator drops all of them with `hplm store gc --upload-s 0`"
                )
            # Bytes that were announced and not sent yet are not on the disk, so they are added.
            needed = request.bytes + unsent
            if (free := shutil.disk_usage(root).free) < needed:
                raise StoreUnavailableError(
                    f"the store's disk has {free:,} bytes left, {needed:,} are needed with other uploads under way"
                )
            upload = self._registry.start_upload(request.bytes, request.sha256, now_s)
            folder = self._store.upload(upload.id)
            try:
                folder.mkdir()
                (folder / request.name).touch()
            except OSError:
                # The client never gets the id, so the upload is dropped here.
                self.drop([upload.id])
                raise
        return upload

    def receive(self, request: UploadChunk, most_bytes: int) -> int:
        """Write a chunk; return the number of bytes that have arrived, which is the offset of the next chunk.

        A repeated chunk changes nothing. Raises UploadError if the chunk leaves a gap or does not fit, UnknownUploadError,
        or StoreUnavailableError.
        """
        raw = request.raw
        if not 0 < len(raw) <= most_bytes:
            raise UploadError(f"a chunk is 1 to {most_bytes:,} bytes, got {len(raw):,}")
        upload = self._registry.upload(request.upload)
        with _writing(), _locked(self._folder(upload)):
            upload = self._registry.upload(request.upload)
            end = request.offset + len(raw)
            if end > upload.bytes:
                raise UploadError(f"the chunk ends at byte {end:,}, but {upload.bytes:,} bytes were announced")
            if request.offset > upload.received:
                raise UploadError(
                    f"the chunk starts at byte {request.offset:,}, but {upload.received:,} bytes have arrived: go on there"
                )
            if end <= upload.received:
                return upload.received
            with self._file(upload).open("r+b") as file:
                file.seek(request.offset)
                file.write(raw)
            crash_point("upload.written")
            self._registry.receive(upload.id, end)
            return end

    def finish(self, upload_id: str) -> Upload:
        """Check the whole file, and drop it if its checksum is wrong. Raises UploadError or UnknownUploadError."""
        upload = self._registry.upload(upload_id)
        with _writing(), _locked(self._folder(upload)):
            upload = self._registry.upload(upload_id)
            if upload.complete:
                return upload
            if upload.received != upload.bytes:
                raise UploadError(f"{upload.received:,} of {upload.bytes:,} bytes have arrived: send the rest first")
            path = self._file(upload)
            sync(path)
            if sha256(path) != upload.sha256:
                self.drop([upload.id])
                raise UploadError("the checksum is not the one announced; the upload is dropped, send it again")
            return self._registry.complete_upload(upload.id)

    def path(self, upload_id: str) -> Path:
        """Return the file of a finished upload. Raises UnknownUploadError, or UploadError if it is not finished."""
        upload = self._registry.upload(upload_id)
        if not upload.complete:
            raise UploadError(f"upload {upload_id} is not finished: upload.finish checks it first")
        return self._file(upload)

    def name(self, upload: Upload) -> str:
        """Return the name that the client gave the file; "" if its bytes are gone."""
        with suppress(UnknownUploadError, OSError):
            return self._file(upload).name
        return ""

    def drop(self, upload_ids: Collection[str]) -> None:
        """Drop uploads that were used or can never be used, except those that another job waits for."""
        drop_uploads(self._store, self._registry, upload_ids)

    def _folder(self, upload: Upload) -> Path:
        folder = self._store.upload(upload.id)
        if not folder.is_dir():
            raise UnknownUploadError(f"the bytes of upload {upload.id} are gone: start again")
        return folder

    def _file(self, upload: Upload) -> Path:
        """Return the one file of the upload's folder."""
        files = list(self._folder(upload).iterdir())
        if len(files) != 1:
            raise UnknownUploadError(f"the bytes of upload {upload.id} are gone: start again")
        return files[0]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one thread of one process at a time work on a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def _writing() -> Iterator[None]:
    """Translate the disk's errors into ours."""
    try:
        yield
    except FileNotFoundError as error:
        raise UnknownUploadError(f"the bytes of this upload are gone ({error.strerror}): start again") from error
    except OSError as error:
        raise StoreUnavailableError(
            f"the server's store cannot be written now ({error.strerror}); try again"
        ) from error
