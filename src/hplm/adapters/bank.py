"""All tenants of one base in a store: which there are now, and loading one."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from hplm.adapters import tenant as tenants
from hplm.adapters.bank_file import BankFile
from hplm.adapters.tenant import Tenant, check_name
from hplm.errors import ArtifactError, CorruptArtifactError, MissingArtifactError, UnknownTenantError
from hplm.store.artifact import MANIFEST
from hplm.store.layout import Store

Signature = tuple[int, int]


@dataclass(frozen=True)
class TenantKey:
    """A tenant as it was published when a request asked for it: `published` changes with every update."""

    name: str
    published: Signature


class TenantBank:
    """The tenants published in a store, at any moment: its folders, then its bank files.

    A tenant added, replaced or deleted while serving shows at the next request. One whose files are broken fails alone,
    on its own requests, with an ArtifactError. Safe to use from several threads.
    """

    def __init__(self, store: Store, fingerprint: str, *, verify: bool = True) -> None:
        self._store = store
        self._tenants = str(store.tenant(""))  # paths are joined as strings: it is done for every request
        self._fingerprint = fingerprint
        self._verify = verify
        self._banks: dict[Path, tuple[Signature, BankFile]] = {}
        self._listed: int | None = None
        self._folders: list[Path] = []
        for folder in self._current_banks():
            self._open(folder)

    def resolve(self, raw: bytes) -> TenantKey:
        """The tenant that a request names. Raises TenantNameError or UnknownTenantError, which name no other tenant."""
        name = check_name(raw.decode("utf-8", "replace"))
        # Two calls of the operating system a request: a few microseconds buy updates without a restart.
        if (published := _published(f"{self._tenants}/{name}")) is not None:
            return TenantKey(name, published)
        for folder in self._current_banks():
            if (bank := self._open(folder)) is not None and name in bank[1]:
                return TenantKey(name, bank[0])
        raise UnknownTenantError(f"there is no tenant {name!r}")

    def load(self, key: TenantKey) -> Tenant:
        """A tenant with its weights, at the version published now. Raises UnknownTenantError or an ArtifactError."""
        folder = self._store.tenant(key.name)
        for attempt in range(3):
            published = _published(folder)
            try:
                if published is not None:
                    return tenants.load(folder, fingerprint=self._fingerprint, verify=self._verify)
                return self._load_banked(key.name)
            except (ArtifactError, OSError) as error:
                # Replaced while it was read: read the new one. Broken as it stands: say so.
                if attempt == 2 or _published(folder) == published:
                    if isinstance(error, MissingArtifactError):
                        raise UnknownTenantError(f"there is no tenant {key.name!r}") from error
                    if isinstance(error, OSError):
                        raise CorruptArtifactError(f"{folder} cannot be read: {error}") from error
                    raise
        raise AssertionError("unreachable")

    def _load_banked(self, name: str) -> Tenant:
        for folder in self._current_banks():
            if (bank := self._open(folder)) is not None and name in bank[1]:
                return bank[1].load(name, verify=self._verify)
        raise UnknownTenantError(f"there is no tenant {name!r}")

    def _open(self, folder: Path) -> tuple[Signature, BankFile] | None:
        """The bank file as it is now, opened again where it was replaced."""
        published = _published(folder)
        if published is None:
            return None
        known = self._banks.get(folder)
        if known is None or known[0] != published:
            try:
                known = published, BankFile(folder, self._fingerprint)
            except ArtifactError as error:
                if known is None:
                    raise
                # The bank that was replaced is still mapped: its tenants are answered as before, and the log says why.
                logging.getLogger(__name__).error("bank %s cannot be opened, the one before goes on: %s", folder, error)
                known = published, known[1]
            self._banks[folder] = known
        return known

    def _current_banks(self) -> list[Path]:
        """Bank files as they are now; the folder is listed again when something in it was added or removed."""
        changed = _changed(self._store.root / "banks")
        if changed != self._listed:
            self._listed = changed
            self._folders = self._store.banks()
        return self._folders


def _published(folder: Path | str) -> Signature | None:
    """What tells one publication from another: the inode and time of its manifest. None where there is none."""
    try:
        found = os.stat(f"{folder}/{MANIFEST}")
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _changed(folder: Path) -> int | None:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return None
