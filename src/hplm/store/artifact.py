"""Immutable, checksummed artifacts: folders written beside their place, flushed, then renamed into it.

An artifact is a folder with a `manifest.json` that names its kind, format, metadata and the size and SHA-256 of every
file. A crash at any instant leaves either no artifact or a whole one.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hplm.errors import CorruptArtifactError, MissingArtifactError
from hplm.runtime.crash_points import crash_point

# Rises with every change of what artifacts hold that an older version would misread.
FORMAT = 2
MANIFEST = "manifest.json"
LEFTOVERS = ("partial", "old")  # endings of folder names that only a killed process leaves


@dataclass(frozen=True)
class Artifact:
    """An artifact whose manifest has been read; `verify` has not necessarily been called."""

    folder: Path
    meta: dict[str, Any]
    files: dict[str, dict[str, Any]]

    def path(self, name: str) -> Path:
        """Return the path of a file. Raises CorruptArtifactError if the manifest does not name it."""
        if name not in self.files:
            raise CorruptArtifactError(f"{self.folder}: the manifest names no file {name!r}; build it again")
        return self.folder / name

    @property
    def fingerprint(self) -> str:
        """16 hex digits made from the checksums of all files. Equal contents have equal fingerprints."""
        listed = "\n".join(f"{name} {about['sha256']}" for name, about in sorted(self.files.items()))
        return hashlib.sha256(listed.encode()).hexdigest()[:16]

    def read_bytes(self, name: str, *, verify: bool) -> bytes:
        """Read a whole file; `verify` checks it in memory. Raises CorruptArtifactError, or OSError if the file is gone."""
        data = self.path(name).read_bytes()
        if verify and hashlib.sha256(data).hexdigest() != self.files[name]["sha256"]:
            raise CorruptArtifactError(
                f"{self.folder / name} does not match the checksum of its manifest; build it again"
            )
        return data

    def verify(self) -> None:
        """Check size and checksum of every file. Raises CorruptArtifactError naming the file and what is wrong."""
        for name, wanted in self.files.items():
            path = self.folder / name
            found = path.stat().st_size if path.is_file() else -1
            if found < 0:
                raise CorruptArtifactError(f"{path} is missing; build it again")
            if found != wanted["bytes"]:
                raise CorruptArtifactError(
                    f"{path} has {found} bytes, its manifest says {wanted['bytes']}: cut short or overwritten; build it again"
                )
            if sha256(path) != wanted["sha256"]:
                raise CorruptArtifactError(f"{path} does not match the checksum of its manifest; build it again")


def sha256(path: Path) -> str:
    """Return the hex digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read(folder: Path, kind: str) -> Artifact:
    """Read the manifest of the artifact in `folder`. Checks no files.

    Raises MissingArtifactError if there is none, CorruptArtifactError if the manifest is broken or of another kind.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise MissingArtifactError(f"no {kind} in {folder}; `hplm build --help` shows how to make one")
    try:
        manifest = json.loads(path.read_text())
        found_format, found_kind = manifest["format"], manifest["kind"]
        files = {
            str(name): {"bytes": int(f["bytes"]), "sha256": str(f["sha256"])} for name, f in manifest["files"].items()
        }
        artifact = Artifact(folder, dict(manifest["meta"]), files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptArtifactError(f"{path} is not a manifest ({error!r}); build the artifact again") from error
    if found_format != FORMAT:
        raise CorruptArtifactError(
            f"{path} has format {found_format}, this version reads {FORMAT}: build the store anew, the demo with "
            "`hplm build demo`, any other with `hplm build base`, `plot`, `domain` and `tenant` in this order"
        )
    if found_kind != kind:
        raise CorruptArtifactError(f"{path} is a {found_kind}, a {kind} was expected")
    return artifact


@contextmanager
def publish(folder: Path, kind: str, meta: dict[str, Any]) -> Iterator[Path]:
    """Write an artifact: yield the folder to fill, then add the manifest and move it to `folder`.

    An artifact that stood there is replaced. If the block raises, nothing changes. `meta` is read after the block.
    """
    with replacing(folder) as partial:
        yield partial
        crash_point("artifact.written")
        files = {}
        for path in sorted(partial.rglob("*")):
            if path.is_file():
                files[str(path.relative_to(partial))] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        manifest = {"format": FORMAT, "kind": kind, "meta": meta, "files": files}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill beside `folder`, make it durable and put it in place. Readers see one step.

    Some network file systems cannot swap two folders; there, replacing takes two renames. If the process is killed
    between them, the artifact is missing and its reader says so. Nothing half-written is ever in place.

    A lock tells the folder that a process fills from one that a killed process left, see `is_held`.
    """
    partial, old = (folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.{kind}") for kind in LEFTOVERS)
    new = [parent for parent in partial.parents if not parent.exists()]
    partial.mkdir(parents=True)
    held = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield partial
        for path in [*partial.rglob("*"), partial]:
            sync(path)
        crash_point("artifact.durable")
        if not folder.exists():
            partial.rename(folder)
        elif not _exchange(partial, folder):
            folder.rename(old)
            try:
                partial.rename(folder)
            except BaseException:
                old.rename(folder)
                raise
        for parent in (folder.parent, *(parent.parent for parent in new)):
            sync(parent)
        crash_point("artifact.placed")
    finally:
        os.close(held)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def is_held(partial: Path) -> bool:
    """Return whether a living process fills the folder. Its lock ends with the process, however the process ends."""
    try:
        handle = os.open(partial, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except PermissionError:
        # The folder belongs to another user, so it counts as held and stays.
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step (renameat2, RENAME_EXCHANGE); return False if the file system cannot do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(rename(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0)


def sync(path: Path) -> None:
    """Wait until everything that was written to a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
