"""Lists the artifacts and other files on a store's disk, without the registry."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from os.path import isdir  # Path's own raises for a folder that only another user may read
from pathlib import Path
from typing import Any, Literal

from hplm.errors import ArtifactError, CorruptArtifactError
from hplm.store import artifact
from hplm.store.artifact import Artifact
from hplm.store.domain_version import LOWER_KIND, has_branch
from hplm.store.layout import Store, levels

Kind = Literal["base", "plot", "domain", "tenant", "bank", "upload", "scratch", "leftover"]
# The folder of each kind that lies directly in one folder of the store.
FLAT: dict[Kind, str] = {
    "base": "bases",
    "plot": "plots",
    "bank": "banks",
    "upload": "uploads",
    "scratch": "jobs",  # what a job continues from after its worker process was lost
}
_NAME = re.compile(r"[^.].*")
_NUMBER = re.compile(r"[1-9][0-9]*")
_LEFTOVER = re.compile(rf"\..+\.[0-9a-f]{{32}}\.({'|'.join(artifact.LEFTOVERS)})")


@dataclass(frozen=True)
class StoreEntry:
    """A folder or file of the store. `inode` and `changed_s` tell it from another that has its path later.

    `held`: a living process fills this folder, so it is no leftover although its name looks like one.
    """

    path: str
    kind: Kind
    inode: int
    changed_s: float
    held: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """The names in the path, such as `tenants`, the tenant's name and the version's number."""
        return tuple(self.path.split("/"))

    @property
    def number(self) -> int:
        """The number of a version of a tenant or domain."""
        return int(self.parts[-1])


@dataclass(frozen=True)
class Card:
    """The place of an artifact in the tree, as its manifest says.

    `base` is a fingerprint. `parent` is the path of the domain version that the artifact stands on, "" if the manifest
    does not name it. A bank has `members`, and `made_s`, which a copy of the store keeps. `fault` says why the artifact
    cannot be used; it is "" for a sound artifact.
    """

    entry: StoreEntry
    base: str = ""
    parent: str = ""
    members: tuple[str, ...] = ()
    made_s: float = 0.0
    about: dict[str, Any] | None = None
    fault: str = ""


def list_entries(store: Store) -> tuple[StoreEntry, ...]:
    """List artifacts, uploads and what killed processes left, by place and name. Reads no file."""
    entries: list[StoreEntry] = []
    for kind, folder in FLAT.items():
        entries += _within(store, store.root / folder, kind)
    for path in _folders(store.root / "plots"):
        entries += _leftovers(store, path)
    for base in _folders(store.root / "domains"):
        for domain in _folders(base):
            entries += _within(store, domain, "domain")
    for path in _folders(store.root / "tenants"):
        entries += _within(store, path, "tenant")
    return tuple(entries)


def is_unchanged(store: Store, entry: StoreEntry) -> bool:
    """Return whether the entry's path still holds the same folder or file."""
    return _entry(store, store.path(entry.path), entry.kind) == entry


def read_card(store: Store, entry: StoreEntry) -> Card:
    """Read what a base, PLOT, domain, tenant or bank says about itself. Does not check checksums."""
    folder = store.path(entry.path)
    try:
        opened = read_parts(folder, entry.kind)[0]
        meta = opened.meta
        match entry.kind:
            case "base":
                return Card(entry, opened.fingerprint, about={"lower_form": meta.get("config", {}).get("lower_form")})
            case "plot":
                return Card(entry, meta["base"], about={})
            case "domain":
                about = meta.get("domain", {})
                return Card(entry, meta["base"], about.get("parent", ""), about=about)
            case "bank":
                made_s = (folder / artifact.MANIFEST).stat().st_mtime
                return Card(entry, meta["base"], meta.get("domain", ""), bank_members(folder), made_s)
            case _:
                if meta["name"] != entry.parts[1]:
                    raise CorruptArtifactError(f"{folder} holds the card of another tenant")
                about = {**meta["about"], "task": meta["task"], "labels": meta["labels"], "texts": meta.get("texts", 1)}
                return Card(entry, meta["base"], about.get("domain", ""), about=about)
    except (ArtifactError, KeyError, TypeError, AttributeError, OSError) as error:
        return Card(entry, fault=str(error) if isinstance(error, ArtifactError) else f"its manifest lacks {error}")


def read_parts(folder: Path, kind: Kind) -> list[Artifact]:
    """Read the manifests of all artifacts in the folder of a base, PLOT, domain, tenant or bank. Raises as `read` does."""
    if kind == "plot":
        size = artifact.read(folder / "root", "plot-table").meta["size"]
        return [artifact.read(folder / level, "plot-table") for level in levels(size)]
    if kind == "domain":
        branch = [artifact.read(folder / "branch", "plot-table")] if has_branch(folder) else []
        return [artifact.read(folder / "lower", LOWER_KIND), *branch]
    return [artifact.read(folder, kind)]


def bank_members(folder: Path) -> tuple[str, ...]:
    """Return the names of the tenants in a bank. Raises CorruptArtifactError."""
    try:
        lines = artifact.read(folder, "bank").read_bytes("cards.jsonl", verify=True).splitlines()
        return tuple(json.loads(line)["card"]["name"] for line in lines)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CorruptArtifactError(f"{folder} is not a whole bank ({error!r}); build it again") from error


def _within(store: Store, folder: Path, kind: Kind) -> Iterator[StoreEntry]:
    """Yield the named entries of a folder, and its leftovers."""
    name = _NUMBER if kind in ("domain", "tenant") else _NAME
    for path in _children(folder):
        if name.fullmatch(path.name) and (isdir(path) or kind == "upload"):
            yield from filter(None, [_entry(store, path, kind)])
    yield from _leftovers(store, folder)


def _leftovers(store: Store, folder: Path) -> Iterator[StoreEntry]:
    for path in _children(folder):
        if _LEFTOVER.fullmatch(path.name):
            yield from filter(None, [_entry(store, path, "leftover", held=artifact.is_held(path))])


def _folders(folder: Path) -> list[Path]:
    return [path for path in _children(folder) if _NAME.fullmatch(path.name) and isdir(path)]


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        # A folder that only another user may read is skipped, and never removed.
        return []


def _entry(store: Store, path: Path, kind: Kind, *, held: bool = False) -> StoreEntry | None:
    """Return the entry at a path; None if it went meanwhile or only another user may read it."""
    try:
        about = path.stat()
    except (FileNotFoundError, PermissionError):
        return None
    # A rename into place changes only the change time.
    changed_s = max(about.st_mtime, about.st_ctime)
    if kind == "leftover":
        # If another machine fills the folder, its lock may be invisible here, and it may grow deep within.
        changed_s = max([changed_s, *_changes_within(path)])
    return StoreEntry(store.relative(path), kind, about.st_ino, changed_s, held)


def _changes_within(folder: Path) -> Iterator[float]:
    for parent, _, files in os.walk(folder):
        for name in (".", *files):
            with suppress(OSError):
                yield os.stat(os.path.join(parent, name)).st_mtime
