"""The files that a job works on: uploads, or files on the server if its operator allows paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hplm.core.settings import ManagerSettings
from hplm.errors import ForbiddenError
from hplm.manage.request_parts import Source
from hplm.manage.uploads import Uploads


def pinned(source: Source, settings: ManagerSettings) -> dict[str, Any]:
    """Return a source as the job's request holds it. Raises ForbiddenError if the operator allows no paths."""
    if source.upload is not None:
        return {"upload": source.upload}
    if not settings.allow_paths:
        raise ForbiddenError(
            "this server takes no paths: upload the file (see `allow_paths` in the manager's settings)"
        )
    return {"path": source.path, "root": settings.data_root}


def locate(source: dict[str, Any], uploads: Uploads) -> Path:
    """Return the file of a pinned source. The job calls this again when it runs, because links may have changed.

    Raises ForbiddenError, UnknownUploadError or UploadError.
    """
    return inside(Path(source["root"]), source["path"]) if "path" in source else uploads.path(source["upload"])


def inside(root: Path, named: str) -> Path:
    """Return a regular file below `root` after following links. Raises ForbiddenError, which reveals nothing outside."""
    try:
        path = (root / named).resolve(strict=True)
        if path.is_relative_to(root.resolve(strict=True)) and path.is_file():
            return path
    except (OSError, RuntimeError, ValueError):
        pass  # missing, unreadable, a loop of links, a zero byte: the client learns only that the file cannot be used
    raise ForbiddenError(f"{named!r} is no file below the server's folder for files")
