"""Numbers, checks and retirement of versions, the same for tenants and domains.

Each number is given once, so the folder of a number that was not given yet must be free.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sqlalchemy import ColumnElement, Connection, Table, select, update

from hplm.errors import ConflictError

# Maps a version's number to its folder.
Folder = Callable[[int], Path]


def check_free(folder: Folder | None, number: int) -> None:
    """Raise ConflictError if the folder of the next number exists: another registry of this store gave the number.

    If a version were built here, that folder would look like the leftover of a killed job and be removed.
    """
    if folder is not None and folder(number).exists():
        raise ConflictError(
            f"version {number} has a folder, but this registry never gave that number: restore the registry that did, or "
            "remove the folder, which `hplm store verify` names (if the registry does not know the tenant or domain at all, "
            "`hplm store adopt` registers it)"
        )


def number_of(connection: Connection, versions: Table, version_id: int | None) -> int | None:
    """Return the number of a version in the table `versions`; None if there is no such version."""
    return connection.scalar(select(versions.c.number).where(versions.c.id == version_id))


def check_expected(what: str, current: int | None, expected: int | None) -> None:
    """Raise ConflictError if the current version of `what` is another than `expected`; None means no version."""
    if current == expected:
        return
    if expected is None:
        raise ConflictError(f"{what} exists already, at version {current}")
    if current is None:
        raise ConflictError(f"{what} was deleted meanwhile")
    raise ConflictError(f"{what} is at version {current}, not {expected}: it was changed meanwhile, look again")


def check_unpublished(
    connection: Connection, what: str, versions: Table, is_own: ColumnElement[bool], number: int
) -> None:
    """Raise ConflictError if `number` is among the versions of `what`, which `is_own` selects."""
    if connection.scalar(select(versions.c.id).where(is_own, versions.c.number == number)) is not None:
        raise ConflictError(f"{what} has had a version {number} already: take the next number")


def retire(connection: Connection, versions: Table, now_s: float, *which: ColumnElement[bool]) -> int:
    """Retire the kept versions that meet the conditions; return how many."""
    kept = update(versions).where(*which, versions.c.retired_s.is_(None))
    return connection.execute(kept.values(retired_s=now_s)).rowcount
