"""The registry's part about uploads: what was announced, how much of it has come."""

from __future__ import annotations

import math
import uuid
from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, Row, Text, and_, cast, delete, false, func, insert, or_, select, tuple_, update

from hplm.errors import UnknownUploadError, UploadError
from hplm.registry.database import IN_ONE_QUERY, RegistryPart
from hplm.registry.records import UNFINISHED, Upload
from hplm.registry.schema import jobs, uploads

# Ids that a query asks for one by one.
FEW = 8


class Uploads(RegistryPart):
    """Uploads; their bytes are files of the store."""

    def start_upload(self, size_bytes: int, sha256: str, now_s: float) -> Upload:
        """Announce a file of `size_bytes` with the hex digest `sha256`."""
        upload = Upload(uuid.uuid4().hex, size_bytes, sha256, 0, now_s, False)
        with self._database.writing() as connection:
            connection.execute(insert(uploads).values(**vars(upload)))
        return upload

    def upload(self, upload_id: str) -> Upload:
        """Raises UnknownUploadError."""
        with self._database.reading() as connection:
            return _upload(_row(connection, upload_id))

    def uploads(self, *, after: str = "", limit: int | None = None) -> list[Upload]:
        """Oldest first: those behind the one with id `after`, at most `limit`. Raises UnknownUploadError where that is gone."""
        u = uploads.c
        query = select(uploads).order_by(u.created_s, u.id).limit(limit)
        with self._database.reading() as connection:
            if after:
                last = _row(connection, after)
                query = query.where(tuple_(u.created_s, u.id) > tuple_(last.created_s, last.id))
            return [_upload(row) for row in connection.execute(query)]

    def count_uploads(self) -> tuple[int, int, int]:
        """Of all of them: how many there are, bytes announced, and those of them that have not come."""
        u = uploads.c
        sums = func.coalesce(func.sum(u.bytes), 0), func.coalesce(func.sum(u.bytes - u.received), 0)
        with self._database.reading() as connection:
            count, announced, unsent = connection.execute(select(func.count(), *sums)).one()
        return int(count), int(announced), int(unsent)

    def uploads_in_use(self, ids: Collection[str]) -> dict[str, list[str]]:
        """Unfinished jobs, by their ids, of each of these uploads that such name."""
        with self._database.reading() as connection:
            return _in_use(connection, ids)

    def receive(self, upload_id: str, received: int) -> Upload:
        """Note that the first `received` bytes have come. Raises UploadError where that is fewer than before or too many."""
        with self._database.writing() as connection:
            row = _row(connection, upload_id)
            if not row.received <= received <= row.bytes or row.complete:
                raise UploadError(
                    f"upload {upload_id} has {row.received} of {row.bytes} bytes, it cannot have {received}"
                )
            connection.execute(update(uploads).where(uploads.c.id == upload_id).values(received=received))
            return _upload(_row(connection, upload_id))

    def complete_upload(self, upload_id: str) -> Upload:
        """Note that it is whole and its checksum right. Raises UploadError where bytes are missing."""
        with self._database.writing() as connection:
            row = _row(connection, upload_id)
            if row.received != row.bytes:
                raise UploadError(f"upload {upload_id} has {row.received} of {row.bytes} bytes: send the rest first")
            connection.execute(update(uploads).where(uploads.c.id == upload_id).values(complete=True))
            return _upload(_row(connection, upload_id))

    def drop_uploads(
        self,
        *,
        ids: Collection[str] | None = None,
        before_s: float = math.inf,
        unfinished_before_s: float = -math.inf,
        unbegun_before_s: float = -math.inf,
    ) -> list[str]:
        """Forget uploads, those with `ids` or all, that were announced before `before_s`, unless an unfinished job names them.

        Those that are not complete go where they were announced before `unfinished_before_s`, those of which nothing has
        come before `unbegun_before_s`. Returns the ids of those that went. A job is submitted before or after all of
        this, never between.
        """
        u = uploads.c
        abandoned = and_(u.created_s < unfinished_before_s, u.complete.is_(False))
        unbegun = and_(u.created_s < unbegun_before_s, u.received == 0)
        old_ones = select(u.id).where(or_(u.created_s < before_s, abandoned, unbegun))
        if ids is not None:
            old_ones = old_ones.where(u.id.in_(ids))
        with self._database.reading() as connection:
            # Asked at each start of an upload, and mostly for nothing.
            if connection.execute(old_ones.limit(1)).first() is None:
                return []
        with self._database.writing() as connection:
            old = list(connection.execute(old_ones).scalars())
            if not old:
                return []
            wanted = _in_use(connection, old)
            gone = [one for one in old if one not in wanted]
            for first in range(0, len(gone), IN_ONE_QUERY):
                connection.execute(delete(uploads).where(uploads.c.id.in_(gone[first : first + IN_ONE_QUERY])))
        return gone


def _row(connection: Connection, upload_id: str) -> Row[Any]:
    row = connection.execute(select(uploads).where(uploads.c.id == upload_id)).first()
    if row is None:
        raise UnknownUploadError(f"there is no upload {upload_id!r}")
    return row


def _upload(row: Row[Any]) -> Upload:
    return Upload(**row._mapping)


def _in_use(connection: Connection, ids: Collection[str]) -> dict[str, list[str]]:
    unfinished = select(jobs.c.id, jobs.c.request).where(jobs.c.state.in_(UNFINISHED)).order_by(jobs.c.seq)
    if len(ids) <= FEW:
        # Not all that wait are read for the few of a job that ends: an id is nothing else's part.
        unfinished = unfinished.where(or_(false(), *(cast(jobs.c.request, Text).contains(one) for one in ids)))
    wanted = frozenset(ids)  # of a list all would be gone through for each job
    found: dict[str, list[str]] = {}
    for row in connection.execute(unfinished):
        for upload_id in uploads_of(row.request) & wanted:
            found.setdefault(upload_id, []).append(row.id)
    return found


def leave_uploads(connection: Connection, left: Collection[str]) -> None:
    """What went with jobs that have ended, as if it had come long ago: nobody else removes it, so whoever collects next does.

    What another job is still to read stays as it is.
    """
    going = set(left) - _in_use(connection, left).keys()
    connection.execute(update(uploads).where(uploads.c.id.in_(going)).values(created_s=0.0))


def check_there(connection: Connection, request: dict[str, Any]) -> None:
    """That the uploads which a job names are there. Raises UnknownUploadError."""
    for upload_id in uploads_of(request):
        _row(connection, upload_id)


def uploads_of(request: dict[str, Any]) -> set[str]:
    """Ids of the uploads that a job's request names."""
    sources = [*request.get("data", {}).values(), request.get("corpus", {})]
    return {source["upload"] for source in sources if "upload" in source}


def dropped_with(request: dict[str, Any]) -> set[str]:
    """Ids of the uploads that go with the job that made the request, however it ends."""
    return uploads_of(request) if request.get("drop_uploads") else set()
