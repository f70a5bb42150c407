"""Numbers of versions: each is given once, so nothing can lie in the folder of one that was not given yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hplm.errors import ConflictError

# Where the version with a number goes.
Folder = Callable[[int], Path]


def check_free(folder: Folder | None, number: int) -> None:
    """Raises ConflictError where something lies there: of a registry that went on longer, or of one that was lost.

    To build beside it would make it look like what a killed job left, which is removed.
    """
    if folder is not None and folder(number).exists():
        raise ConflictError(
            f"version {number} has a folder, and this registry gave its number to nobody: restore the registry that did, or "
            "remove the folder, which `hplm store verify` names (under a name that the registry does not know, "
            "`hplm store adopt` registers it)"
        )
