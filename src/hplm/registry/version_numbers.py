"""Numbers of the versions of tenants and domains.

Each number is given once, so the folder of a number that was not given yet must be free.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection, Table, select

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
