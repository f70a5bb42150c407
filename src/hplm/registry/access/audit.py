"""The part of the registry that holds the audit log of manage requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, delete, insert, not_, or_, select

from hplm.registry.database import RegistryPart
from hplm.registry.schema import audit

# Seconds for which an entry is kept: 90 days.
KEEP_S = 90 * 86_400.0
# Most entries of each class of changes that succeeded, of other requests, and of refused requests without a valid key. No
# class pushes out entries of another: whoever asks without end must not empty the log of changes.
MOST_CHANGES = 200_000
MOST_OTHERS = 50_000
MOST_REFUSED = 10_000
# The action of a request that was refused before it was read, because its key was not valid.
REFUSED_ACTION = "-"


@dataclass(frozen=True)
class AuditEntry:
    """A manage request: when, whose, what and the outcome, which is `ok` or the code of an error.

    `key` is the public id of the key, None without a valid key. `role` is that of the key, `local` for a command on the store.
    `times` equal requests since the entry before are one entry. `details` says what was changed, such as the id of a new key;
    it holds no secret. `seq` is the order of the entries, 0 for a new entry.
    """

    at_s: float
    key: str | None
    role: str | None
    action: str
    subject: str
    outcome: str
    times: int = 1
    # Without a hash, because equal entries are found by the hash of an entry.
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)
    seq: int = 0


class Audit(RegistryPart):
    """The audit log. Entries are added and forgotten, never changed."""

    def add_audit(self, entries: Sequence[AuditEntry]) -> None:
        """Add entries in one transaction."""
        rows = [{name: value for name, value in vars(entry).items() if name != "seq"} for entry in entries]
        if rows:
            with self._database.writing() as connection:
                connection.execute(insert(audit), rows)

    def audit(
        self, *, key: str | None = None, subject: str | None = None, before: int | None = None, limit: int = 100
    ) -> list[AuditEntry]:
        """List at most `limit` entries, newest first: those of a key or a subject, and with a `seq` below `before`."""
        a = audit.c
        wanted = [column == value for column, value in ((a.key, key), (a.subject, subject)) if value is not None]
        if before is not None:
            wanted.append(a.seq < before)
        query = select(audit).where(*wanted).order_by(a.seq.desc()).limit(limit)
        with self._database.reading() as connection:
            return [AuditEntry(**row._mapping) for row in connection.execute(query)]

    def trim_audit(
        self,
        now_s: float,
        changes: Sequence[Collection[str]],
        *,
        most_changes: int = MOST_CHANGES,
        most_others: int = MOST_OTHERS,
        most_refused: int = MOST_REFUSED,
    ) -> None:
        """Forget entries older than `KEEP_S`, and the oldest beyond the bounds.

        Each of `changes` is a class of changes, given by its actions.
        """
        is_change = [and_(audit.c.outcome == "ok", audit.c.action.in_(actions)) for actions in changes]
        is_refused = and_(audit.c.action == REFUSED_ACTION, audit.c.key.is_(None))
        with self._database.writing() as connection:
            connection.execute(delete(audit).where(audit.c.at_s < now_s - KEEP_S))
            for which in is_change:
                _keep_newest(connection, which, most_changes)
            _keep_newest(connection, is_refused, most_refused)
            _keep_newest(connection, not_(or_(is_refused, *is_change)), most_others)


def _keep_newest(connection: Connection, which: ColumnElement[bool], most: int) -> None:
    newest = select(audit.c.seq).where(which).order_by(audit.c.seq.desc())
    if (last := connection.scalar(newest.offset(most).limit(1))) is not None:
        connection.execute(delete(audit).where(which, audit.c.seq <= last))
