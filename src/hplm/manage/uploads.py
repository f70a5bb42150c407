"""Files on their way in: chunks in their order, one checksum over all, a quota, an end to what nobody finishes.

`uploads/<id>/<name>` in the store. How much of it counts is the registry's word: bytes beyond are of a chunk whose
writing was cut short, and are written again.
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
from hplm.housekeeping.garbage_collection import drop_expired, remove
from hplm.manage.requests import StartUpload, UploadChunk
from hplm.registry.records import Upload
from hplm.registry.registry import Registry
from hplm.runtime.crash_points import crash_point
from hplm.store.artifact import sha256, sync
from hplm.store.layout import Store

# Files that wait: three of each of MOST_QUEUED jobs, and more. Each is a folder and a row.
MOST_UPLOADS = 40_000


class Uploads:
    """The uploads of a store. Safe to use from several threads and processes."""

    def __init__(self, store: Store, registry: Registry) -> None:
        self._store, self._registry = store, registry

    def start(self, request: StartUpload, settings: ManagerSettings, now_s: float) -> Upload:
        """Make room for a file. Raises UploadError where it is too large, QueueFullError where too much is on its way."""
        self.collect(now_s)
        if request.bytes > (most := min(settings.max_upload_bytes, settings.max_uploads_bytes)):
            raise UploadError(f"{request.name} has {request.bytes:,} bytes, at most {most:,} are accepted")
        root = self._store.upload("")
        with _writing(), _locked(root):
            count, waiting, unsent = self._registry.count_uploads()
            if count >= MOST_UPLOADS:
                raise QueueFullError(
                    f"{count:,} files are uploaded and not yet used, or on their way; drop those that no job needs "
                    "(`hplm upload list`), or try again later"
                )
            if waiting + request.bytes > settings.max_uploads_bytes:
                raise QueueFullError(
                    f"{waiting:,} bytes are uploaded and not yet used, with these it would be more than "
                    f"{settings.max_uploads_bytes:,}; drop those that no job needs (`hplm upload list`), or try "
                    "again later; the server's operator drops all of them with `hplm store gc --upload-s 0`"
                )
            # What others have announced and not yet sent has no place on the disk so far.
            needed = request.bytes + unsent
            if (free := shutil.disk_usage(root).free) < needed:
                raise StoreUnavailableError(
                    f"the store's disk has {free:,} bytes left, {needed:,} are needed with what others are sending"
                )
            upload = self._registry.start_upload(request.bytes, request.sha256, now_s)
            folder = self._store.upload(upload.id)
            try:
                folder.mkdir()
                (folder / request.name).touch()
            except OSError:
                # Nobody would ever fill or drop it.
                self.consume([upload.id])
                raise
        return upload

    def receive(self, request: UploadChunk, most_bytes: int) -> int:
        """Write a chunk; returns how many bytes are there, from where the next one goes on. A repeated one changes nothing.

        Raises UploadError where it leaves a gap or does not fit, UnknownUploadError, StoreUnavailableError.
        """
        raw = request.raw
        if not 0 < len(raw) <= most_bytes:
            raise UploadError(f"a chunk is 1 to {most_bytes:,} bytes, got {len(raw):,}")
        upload = self._registry.upload(request.upload)
        with _writing(), _locked(self._folder(upload)):
            upload = self._registry.upload(request.upload)
            end = request.offset + len(raw)
            if end > upload.bytes:
                raise UploadError(f"the chunk ends at byte {end:,}, {upload.bytes:,} bytes were announced")
            if request.offset > upload.received:
                raise UploadError(
                    f"the chunk starts at byte {request.offset:,}, but {upload.received:,} bytes are here: go on there"
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
        """Check the whole. What is not what was announced is dropped. Raises UploadError or UnknownUploadError."""
        upload = self._registry.upload(upload_id)
        with _writing(), _locked(self._folder(upload)):
            upload = self._registry.upload(upload_id)
            if upload.complete:
                return upload
            if upload.received != upload.bytes:
                raise UploadError(f"{upload.received:,} of {upload.bytes:,} bytes are here: send the rest first")
            path = self._file(upload)
            sync(path)
            if sha256(path) != upload.sha256:
                self.consume([upload.id])
                raise UploadError("the checksum is not the one announced; the upload is dropped, send it again")
            return self._registry.complete_upload(upload.id)

    def path(self, upload_id: str) -> Path:
        """The file of a finished upload. Raises UnknownUploadError, or UploadError where it is not finished."""
        upload = self._registry.upload(upload_id)
        if not upload.complete:
            raise UploadError(f"upload {upload_id} is not finished: upload.finish checks it first")
        return self._file(upload)

    def name(self, upload: Upload) -> str:
        """What its owner calls it; empty where its bytes are gone."""
        with suppress(UnknownUploadError, OSError):
            return self._file(upload).name
        return ""

    def consume(self, upload_ids: Collection[str]) -> None:
        """Drop uploads that have served or never can, but for those that another job waits for."""
        self._remove(self._registry.drop_uploads(ids=upload_ids))

    def collect(self, now_s: float) -> None:
        """Drop uploads that have expired and that no job waits for."""
        self._remove(drop_expired(self._registry, now_s))

    def _remove(self, upload_ids: Collection[str]) -> None:
        # Rows first: bytes that stay, because this is cut short or the disk refuses, have no row, and are collected.
        for upload_id in upload_ids:
            with suppress(OSError):
                remove(self._store, f"uploads/{upload_id}")

    def _folder(self, upload: Upload) -> Path:
        folder = self._store.upload(upload.id)
        if not folder.is_dir():
            raise UnknownUploadError(f"the bytes of upload {upload.id} are gone: start again")
        return folder

    def _file(self, upload: Upload) -> Path:
        """The one file of the folder, called as its owner calls it."""
        found = list(self._folder(upload).iterdir())
        if len(found) != 1:
            raise UnknownUploadError(f"the bytes of upload {upload.id} are gone: start again")
        return found[0]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One at a time, in all threads and processes."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def _writing() -> Iterator[None]:
    """The disk's refusals as ours."""
    try:
        yield
    except FileNotFoundError as error:
        raise UnknownUploadError(f"the bytes of this upload are gone ({error.strerror}): start again") from error
    except OSError as error:
        raise StoreUnavailableError(
            f"the server's store cannot be written now ({error.strerror}); try again"
        ) from error
