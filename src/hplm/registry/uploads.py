"""The part of the registry that holds uploads: what was announced, and how much has arrived."""

from __future__ import annotations

import math
import uuid
from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, Text, and_, cast, delete, false, func, insert, or_, select, tuple_, update

from hplm.errors import UnknownUploadError, UploadError
from hplm.registry.database import IN_ONE_QUERY, RegistryPart
from hplm.registry.records import UNFINISHED, Upload
from hplm.registry.schema import jobs, uploads

# With at most this many ids, a query names each id.
FEW = 8


class Uploads(RegistryPart):
    """Uploads. Their bytes are files of the store."""

    def start_upload(self, size_bytes: int, sha256: str, now_s: float) -> Upload:
        """Announce a file of `size_bytes` with the hex digest `sha256`."""
        upload = Upload(uuid.uuid4().hex, size_bytes, sha256, 0, now_s, False)
        with self._database.writing() as connection:
            connection.execute(insert(uploads).values(**vars(upload)))
        return upload

    def upload(self, upload_id: str) -> Upload:
        """Return an upload. Raises UnknownUploadError."""
        with self._database.reading() as connection:
            return _upload(connection, upload_id)

    def uploads(self, *, after: str = "", limit: int | None = None) -> list[Upload]:
        """List at most `limit` uploads, oldest first, after the upload `after`. Raises UnknownUploadError if that is gone."""
        u = uploads.c
        query = select(uploads).order_by(u.created_s, u.id).limit(limit)
        with self._database.reading() as connection:
            if after:
                last = _upload(connection, after)
                query = query.where(tuple_(u.created_s, u.id) > tuple_(last.created_s, last.id))
            return [Upload(**row._mapping) for row in connection.execute(query)]

    def count_uploads(self) -> tuple[int, int, int]:
        """Return the number of uploads, the bytes announced, and the announced bytes that have not arrived."""
        u = uploads.c
        sums = func.coalesce(func.sum(u.bytes), 0), func.coalesce(func.sum(u.bytes - u.received), 0)
        with self._database.reading() as connection:
            count, announced, unsent = connection.execute(select(func.count(), *sums)).one()
        return int(count), int(announced), int(unsent)

    def uploads_in_use(self, ids: Collection[str]) -> dict[str, list[str]]:
        """Return the ids of unfinished jobs that name each of these uploads; uploads that no job names are left out."""
        with self._database.reading() as connection:
            return _in_use(connection, ids)

    def receive(self, upload_id: str, received: int) -> Upload:
        """Record that the first `received` bytes have arrived. Raises UploadError if that is fewer than before or too many."""
        with self._database.writing() as connection:
            upload = _upload(connection, upload_id)
            if not upload.received <= received <= upload.bytes or upload.complete:
                raise UploadError(
                    f"upload {upload_id} has {upload.received} of {upload.bytes} bytes, it cannot have {received}"
                )
            connection.execute(update(uploads).where(uploads.c.id == upload_id).values(received=received))
            return _upload(connection, upload_id)

    def complete_upload(self, upload_id: str) -> Upload:
        """Record that an upload is whole and its checksum is right. Raises UploadError if bytes are missing."""
        with self._database.writing() as connection:
            upload = _upload(connection, upload_id)
            if upload.received != upload.bytes:
                raise UploadError(
                    f"upload {upload_id} has {upload.received} of {upload.bytes} bytes: send the rest first"
                )
            connection.execute(update(uploads).where(uploads.c.id == upload_id).values(complete=True))
            return _upload(connection, upload_id)

    def drop_uploads(
        self,
        *,
        ids: Collection[str] | None = None,
        before_s: float = math.inf,
        unfinished_before_s: float = -math.inf,
        unbegun_before_s: float = -math.inf,
    ) -> list[str]:
        """Delete the rows of uploads that were announced before `before_s`, of all or of `ids`; return their ids.

        Incomplete uploads must be older than `unfinished_before_s`, and uploads without any bytes older than
        `unbegun_before_s`. An upload that an unfinished job names stays; no job can be submitted in between.
        """
        u = uploads.c
        abandoned = and_(u.created_s < unfinished_before_s, u.complete.is_(False))
        unbegun = and_(u.created_s < unbegun_before_s, u.received == 0)
        old_ones = select(u.id).where(or_(u.created_s < before_s, abandoned, unbegun))
        if ids is not None:
            old_ones = old_ones.where(u.id.in_(ids))
        with self._database.reading() as connection:
            # Every start of an upload calls this, mostly in vain, so a reader looks first.
            if connection.execute(old_ones.limit(1)).first() is None:
                return []
        with self._database.writing() as connection:
            old = connection.scalars(old_ones).all()
            wanted = _in_use(connection, old)
            gone = [upload_id for upload_id in old if upload_id not in wanted]
            for first in range(0, len(gone), IN_ONE_QUERY):
                connection.execute(delete(uploads).where(uploads.c.id.in_(gone[first : first + IN_ONE_QUERY])))
        return gone


def _upload(connection: Connection, upload_id: str) -> Upload:
    row = connection.execute(select(uploads).where(uploads.c.id == upload_id)).first()
    if row is None:
        raise UnknownUploadError(f"there is no upload {upload_id!r}")
    return Upload(**row._mapping)


def _in_use(connection: Connection, ids: Collection[str]) -> dict[str, list[str]]:
    unfinished = select(jobs.c.id, jobs.c.request).where(jobs.c.state.in_(UNFINISHED)).order_by(jobs.c.seq)
    if len(ids) <= FEW:
        # A few ids are searched for in the text of requests: reading all waiting jobs takes long, and ids are unique.
        unfinished = unfinished.where(
            or_(false(), *(cast(jobs.c.request, Text).contains(upload_id) for upload_id in ids))
        )
    wanted = frozenset(ids)
    found: dict[str, list[str]] = {}
    for row in connection.execute(unfinished):
        for upload_id in uploads_of(row.request) & wanted:
            found.setdefault(upload_id, []).append(row.id)
    return found


def expire_uploads(connection: Connection, ids: Collection[str]) -> None:
    """Let uploads expire now, so that the next garbage collection removes them. An upload that another job names stays."""
    unused = set(ids) - _in_use(connection, ids).keys()
    connection.execute(update(uploads).where(uploads.c.id.in_(unused)).values(created_s=0.0))


def check_uploads(connection: Connection, request: dict[str, Any]) -> None:
    """Check that the uploads which a job's request names exist. Raises UnknownUploadError."""
    for upload_id in uploads_of(request):
        _upload(connection, upload_id)


def uploads_of(request: dict[str, Any]) -> set[str]:
    """Return the ids of the uploads that a job's request names."""
    sources = [*request.get("data", {}).values(), request.get("corpus", {}), *request.get("dev", [])]
    return {source["upload"] for source in sources if "upload" in source}


def uploads_to_drop(request: dict[str, Any]) -> set[str]:
    """Return the ids of the uploads that are dropped when the job of the request ends, however it ends."""
    return uploads_of(request) if request.get("drop_uploads") else set()
