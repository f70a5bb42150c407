"""Profiles in a store: one small JSON file for each measurement, in the folder `profiles/BASE`."""

from __future__ import annotations

import json
import os
import re
import uuid
from contextlib import suppress
from pathlib import Path

from hplm.errors import ConfigError, CorruptArtifactError
from hplm.profiles.profile import Conditions, Profile
from hplm.store.artifact import sync
from hplm.store.layout import Store

# The time of the measurement in UTC, and the digest of its conditions. Names sort by time.
_NAME = re.compile(r"(\d{8}T\d{6}Z)-([0-9a-f]{12})\.json")
# Profiles of equal conditions that stay; older files are removed when a new profile is written.
KEPT = 5


def write_profile(store: Store, profile: Profile) -> Path:
    """Keep a profile beside its base; return its file. Earlier profiles stay, up to KEPT of equal conditions.

    Readers see a whole file or none, also if this process is killed. Raises OSError.
    """
    folder = store.profiles(profile.base)
    folder.mkdir(parents=True, exist_ok=True)
    digest = profile.conditions.digest
    path = folder / f"{re.sub('[-:]', '', profile.measured_at)}-{digest}.json"
    if not _NAME.fullmatch(path.name):
        raise ConfigError(f"measured_at must be like 2026-01-31T12:00:00Z, got {profile.measured_at!r}")
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.write_text(json.dumps(profile.to_json(), indent=2) + "\n")
        sync(partial)
        partial.rename(path)
        sync(folder)
    finally:
        partial.unlink(missing_ok=True)
    for old in [each for each in _files(folder) if each.name.endswith(f"{digest}.json")][KEPT:]:
        with suppress(FileNotFoundError):  # another process may remove the same file
            old.unlink()
    return path


def read_profiles(store: Store, base: str) -> list[Profile]:
    """Return the kept profiles of a base, the newest first. Raises CorruptArtifactError if a file cannot be read."""
    return [_read(path) for path in _files(store.profiles(base))]


def find_profile(store: Store, base: str, conditions: Conditions, *, full: bool = False) -> Profile | None:
    """Return the newest profile of a base under equal conditions, or None. With `full`, only of kind `full`.

    Raises CorruptArtifactError if a file cannot be read.
    """
    for path in _files(store.profiles(base)):
        if path.name.endswith(f"-{conditions.digest}.json"):
            profile = _read(path)
            if profile.conditions == conditions and (profile.kind == "full" or not full):
                return profile
    return None


def _files(folder: Path) -> list[Path]:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(names, reverse=True) if _NAME.fullmatch(name)]


def _read(path: Path) -> Profile:
    try:
        return Profile.from_json(json.loads(path.read_text()), str(path))
    except (OSError, ValueError, ConfigError) as error:
        raise CorruptArtifactError(
            f"{path} is no profile ({error}): remove it, and measure with `hplm profile --models MODELS --name NAME`"
        ) from error
