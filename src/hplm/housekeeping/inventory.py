"""What lies on a store's disk, whatever the registry says."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from os.path import isdir, isfile  # Path's own fail on what another user keeps to itself
from pathlib import Path
from typing import Any, Literal

from hplm.errors import ArtifactError, CorruptArtifactError
from hplm.store import artifact
from hplm.store.layout import Store, levels

Kind = Literal["base", "plot", "domain", "tenant", "bank", "upload", "scratch", "leftover"]
FLAT: dict[Kind, str] = {
    "base": "bases",
    "plot": "plots",
    "bank": "banks",
    "upload": "uploads",
    "scratch": "jobs",  # what a job goes on from when its worker was lost
}
_NAME = re.compile(r"[^.].*")
_NUMBER = re.compile(r"[1-9][0-9]*")
_LEFTOVER = re.compile(rf"\..+\.[0-9a-f]{{32}}\.({'|'.join(artifact.LEFTOVERS)})")


@dataclass(frozen=True)
class Found:
    """A folder or file of the store; `inode` and `changed_s` tell it from another that later has its path.

    `held`: a leftover that is none, as a living process fills it.
    """

    path: str
    kind: Kind
    inode: int
    changed_s: float
    held: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """The path's names: `tenants`, the tenant's name, its number and so on."""
        return tuple(self.path.split("/"))

    @property
    def number(self) -> int:
        """The version's number; what lies in a tenant's folder itself, as it once did, is its first."""
        return int(self.parts[-1]) if self.kind == "domain" or len(self.parts) == 3 else 1


@dataclass(frozen=True)
class Card:
    """What an artifact's manifest says about its place in the tree.

    `base` is a fingerprint, `parent` the path of the domain version that it stands on, "" where it does not say; a bank
    has `members`, and `made_s`, which a copy of the store keeps. `fault` says why it cannot be used, "" where it can.
    """

    found: Found
    base: str = ""
    parent: str = ""
    members: tuple[str, ...] = ()
    made_s: float = 0.0
    about: dict[str, Any] | None = None
    fault: str = ""


def look(store: Store) -> tuple[Found, ...]:
    """Everything that is an artifact, an upload or left over from making one, by its place and name. Reads no file."""
    found: list[Found] = []
    for kind, folder in FLAT.items():
        found += _within(store, store.root / folder, kind)
    for path in _folders(store.root / "plots"):
        found += _leftovers(store, path)
    for base in _folders(store.root / "domains"):
        for domain in _folders(base):
            found += _within(store, domain, "domain")
    found += _leftovers(store, store.root / "tenants")
    for path in _folders(store.root / "tenants"):
        if isfile(path / artifact.MANIFEST) and (one := _found(store, path, "tenant")):
            found.append(one)
        found += _within(store, path, "tenant")
    return tuple(found)


def again(store: Store, found: Found) -> bool:
    """Whether what was found is still what lies there."""
    return _found(store, store.path(found.path), found.kind) == found


def read_card(store: Store, found: Found) -> Card:
    """What a base, PLOT, domain, tenant or bank says of itself; checksums are not looked at."""
    folder = store.path(found.path)
    try:
        match found.kind:
            case "base":
                return Card(found, artifact.read(folder, "base").fingerprint)
            case "plot":
                meta = artifact.read(folder / "root", "plot-table").meta
                for level in levels(meta.get("size", 3)):
                    artifact.read(folder / level, "plot-table")
                return Card(found, meta["base"], about={})
            case "domain":
                artifact.read(folder / "lower", "lower")
                meta = artifact.read(folder / "branch", "plot-table").meta
                about = meta.get("domain", {})
                return Card(found, meta["base"], about.get("parent", ""), about=about)
            case "bank":
                meta = artifact.read(folder, "bank").meta
                made_s = (folder / artifact.MANIFEST).stat().st_mtime
                return Card(found, meta["base"], meta.get("domain", ""), bank_members(folder), made_s)
            case _:
                meta = artifact.read(folder, "tenant").meta
                if meta["name"] != found.parts[1]:
                    raise CorruptArtifactError(f"{folder} holds the card of another tenant")
                about = {**meta["about"], "task": meta["task"], "labels": meta["labels"], "texts": meta.get("texts", 1)}
                return Card(found, meta["base"], about.get("domain", ""), about=about)
    except (ArtifactError, KeyError, TypeError, AttributeError, OSError) as error:
        return Card(found, fault=str(error) if isinstance(error, ArtifactError) else f"its manifest lacks {error}")


def bank_members(folder: Path) -> tuple[str, ...]:
    """Names of the tenants in a bank. Raises CorruptArtifactError."""
    try:
        lines = artifact.read(folder, "bank").read_bytes("cards.jsonl", verify=True).splitlines()
        return tuple(json.loads(line)["card"]["name"] for line in lines)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CorruptArtifactError(f"{folder} is not a whole bank ({error!r}); build it again") from error


def _within(store: Store, folder: Path, kind: Kind) -> Iterator[Found]:
    """What lies in a folder under a name of its own, and what is left over there."""
    name = _NUMBER if kind in ("domain", "tenant") else _NAME
    for path in _children(folder):
        if name.fullmatch(path.name) and (isdir(path) or kind == "upload"):
            yield from filter(None, [_found(store, path, kind)])
    yield from _leftovers(store, folder)


def _leftovers(store: Store, folder: Path) -> Iterator[Found]:
    for path in _children(folder):
        if _LEFTOVER.fullmatch(path.name):
            yield from filter(None, [_found(store, path, "leftover", held=artifact.is_held(path))])


def _folders(folder: Path) -> list[Path]:
    return [path for path in _children(folder) if _NAME.fullmatch(path.name) and isdir(path)]


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        # What another user keeps to itself is not looked into, and never removed.
        return []


def _found(store: Store, path: Path, kind: Kind, *, held: bool = False) -> Found | None:
    """None where it went while we looked, or is another user's alone."""
    try:
        about = path.stat()
    except (FileNotFoundError, PermissionError):
        return None
    # A rename into place shows in the change time only.
    changed_s = max(about.st_mtime, about.st_ctime)
    if kind == "leftover":
        # One that another machine fills may be held where nobody here can see it, and grow deep within.
        changed_s = max([changed_s, *_changes_within(path)])
    return Found(store.relative(path), kind, about.st_ino, changed_s, held)


def _changes_within(folder: Path) -> Iterator[float]:
    for parent, _, files in os.walk(folder):
        for name in (".", *files):
            with suppress(OSError):
                yield os.stat(os.path.join(parent, name)).st_mtime
