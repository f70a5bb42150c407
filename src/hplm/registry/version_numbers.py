"""Numbers of versions. Each number is given once, so the folder of a number that was not given yet must be free."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
