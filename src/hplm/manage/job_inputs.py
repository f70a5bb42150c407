"""The files that a job works on: uploaded ones, or such as lie on the server where its operator allows that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hplm.core.settings import ManagerSettings
from hplm.errors import ForbiddenError
from hplm.manage.request_parts import Source
from hplm.manage.uploads import Uploads


def pinned(source: Source, settings: ManagerSettings) -> dict[str, Any]:
    """A source as a job keeps it. Raises ForbiddenError where the operator allows no paths."""
    if source.upload is not None:
        return {"upload": source.upload}
    if not settings.allow_paths:
        raise ForbiddenError(
            "this server takes no paths: upload the file (see `allow_paths` in the manager's settings)"
        )
    return {"path": source.path, "root": settings.data_root}


def locate(source: dict[str, Any], uploads: Uploads) -> Path:
    """The file of a pinned source; asked again when the job runs, for links may have changed.

    Raises ForbiddenError, UnknownUploadError or UploadError.
    """
    return inside(Path(source["root"]), source["path"]) if "path" in source else uploads.path(source["upload"])


def inside(root: Path, named: str) -> Path:
    """A regular file below `root`, wherever links lead. Raises ForbiddenError, which tells nothing about what is outside."""
    try:
        found = (root / named).resolve(strict=True)
        if found.is_relative_to(root.resolve(strict=True)) and found.is_file():
            return found
    except (OSError, RuntimeError, ValueError):
        pass  # missing, unreadable, a loop of links, a zero byte: all the same to who asks
    raise ForbiddenError(f"{named!r} is no file below the server's folder for files")
