"""The bank of one base: the tenants that the catalog names, and how their weights are loaded."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from hplm.adapters import tenant as tenants
from hplm.adapters.bank_file import BankFile, signature
from hplm.adapters.tenant import Tenant, TenantCard
from hplm.core.names import check_name
from hplm.errors import CorruptArtifactError, MissingArtifactError, unusable
from hplm.registry.catalog import Catalog
from hplm.registry.records import ServedTenant
from hplm.store.layout import Store


class TenantBank:
    """The tenants that a catalog names. A tenant has a folder of its own, or is one of many in a bank file.

    A tenant whose files are broken fails alone, on its own requests, with an ArtifactError. Safe to use from several threads.
    """

    def __init__(self, store: Store, catalog: Catalog, fingerprint: str, *, verify: bool = True) -> None:
        self._store = store
        self._catalog = catalog
        self._fingerprint = fingerprint
        self._verify = verify
        self._banks: dict[Path, tuple[tuple[int, ...], Future[BankFile]]] = {}
        self._lock = threading.Lock()

    def resolve(self, raw: bytes, version_id: int | None = None) -> ServedTenant:
        """Return the tenant that a request names, at its current version or at the version that the stage before chose.

        Raises TenantNameError, UnknownTenantError or UnknownVersionError. The errors name no other tenant.
        """
        return self._catalog.find(_name(raw), version_id)

    def known(self, raw: bytes, version_id: int | None = None) -> ServedTenant | None:
        """Return the tenant as `resolve` does, but never wait for the registry: None for a version outside the catalog."""
        return self._catalog.known(_name(raw), version_id)

    def card(self, key: ServedTenant) -> TenantCard:
        """Load a tenant's card without its weights. Raises an ArtifactError."""
        folder = self._store.path(key.path)
        with _readable(folder):
            if is_banked(self._store, folder):
                return self._bank(folder, key.name).card(key.name)
            return tenants.load_card(folder)

    def load(self, key: ServedTenant) -> Tenant:
        """Load a tenant with its weights. Raises an ArtifactError."""
        folder = self._store.path(key.path)
        with _readable(folder):
            if is_banked(self._store, folder):
                tenant = self._bank(folder, key.name).load(key.name, verify=self._verify)
            else:
                tenant = tenants.load(folder, name=key.name, fingerprint=self._fingerprint, verify=self._verify)
        if self._verify and not tenant.is_finite:
            # The checksum is right, because the tenant was published so. Its scores would be NaN.
            raise CorruptArtifactError(f"{folder}: the weights of {key.name} hold NaN or infinity; fine-tune it again")
        return tenant

    def drop(self, paths: Iterable[str]) -> None:
        """Close the bank files among these artifacts: as long as a bank file is open, its bytes stay on the disk.

        A bank file that is being opened is closed after that.
        """
        for path in paths:
            with self._lock:
                self._banks.pop(self._store.path(path), None)

    def _bank(self, folder: Path, name: str) -> BankFile:
        """Return the open bank file; open it again if another bank has its path, or if one of its files was replaced."""
        try:
            published = signature(folder)
        except FileNotFoundError as error:
            raise MissingArtifactError(
                f"there is no whole bank in {folder}: `hplm store verify` tells what is lost"
            ) from error
        with self._lock:
            before = known = self._banks.get(folder)
            if known is None or known[0] != published:
                known = self._banks[folder] = published, Future()
        if known is not before:
            self._open(folder, known[1])
        bank = known[1].result()
        if name not in bank:
            raise CorruptArtifactError(f"{folder} lacks the tenant {name} that the registry names; build it again")
        return bank

    def _open(self, folder: Path, opened: Future[BankFile]) -> None:
        """Open a bank file for all threads that wait for `opened`. A failure is not remembered.

        Reading ten thousand cards takes a while, so threads share one reading.
        """
        try:
            opened.set_result(BankFile(folder, self._fingerprint))
        except BaseException as error:
            with self._lock:
                if (known := self._banks.get(folder)) is not None and known[1] is opened:
                    del self._banks[folder]
            opened.set_exception(error)


def _name(raw: bytes) -> str:
    return check_name(raw.decode("utf-8", "replace"))


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unusable(f"{folder} cannot be read", error) from error


def is_banked(store: Store, folder: Path) -> bool:
    """Return whether an artifact's folder is a bank file's."""
    return folder.parent == store.bank("any").parent
