"""All tenants of one base in a store, loaded on first use and kept."""

from __future__ import annotations

from hplm.adapters import tenant as tenants
from hplm.adapters.tenant import Tenant, check_name
from hplm.errors import UnknownTenantError
from hplm.store.layout import Store


class TenantBank:
    """The tenants that were published when the bank was opened.

    A tenant whose files are broken fails alone, on its own requests, with an ArtifactError.
    """

    def __init__(self, store: Store, fingerprint: str, *, verify: bool = True) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._verify = verify
        self._names = frozenset(store.tenant_names())
        self._loaded: dict[str, Tenant] = {}

    def check(self, raw: bytes) -> str:
        """The tenant that a request names. Raises TenantNameError or UnknownTenantError, which name no other tenant."""
        name = check_name(raw.decode("utf-8", "replace"))
        if name not in self._names:
            raise UnknownTenantError(f"there is no tenant {name!r}")
        return name

    def get(self, name: str) -> Tenant:
        """A tenant with its weights. Raises CorruptArtifactError or WrongBaseError."""
        if name not in self._loaded:
            folder = self._store.tenant(name)
            self._loaded[name] = tenants.load(folder, fingerprint=self._fingerprint, verify=self._verify)
        return self._loaded[name]
