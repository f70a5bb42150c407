"""The tenants of one base as the registry names them, followed while it serves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from hplm.errors import RegistryUnavailableError, UnknownTenantError, UnknownVersionError
from hplm.store.layout import Store
from hplm.store.records import Changes, DomainVersion, ServedTenant
from hplm.store.registry import Registry

# How old a view of the registry may be: what is published is served within this time, and a look takes 0.3 ms.
LOOK_EVERY_S = 0.2
# What was replaced or deleted is still answered to requests that were under way; files are kept longer than this.
REMEMBER_S = 60.0
COMPLAIN_EVERY_S = 30.0


class Catalog:
    """Finding a tenant is a look in a dictionary; a thread keeps it up to date.

    Where the registry cannot be read any more, what was known goes on being served, `failures` counts and the log says
    why. Raises RegistryError on construction. Safe to use from several threads.
    """

    def __init__(self, store: Store, base: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._base = base
        self._clock = clock
        self._registry = Registry.open_read_only(store)
        self._refreshing = threading.Lock()
        self._generation = 0
        self._published: dict[str, ServedTenant] = {}
        self._replaced: dict[int, tuple[float, ServedTenant]] = {}
        self._lineages: dict[int, tuple[DomainVersion, ...]] = {}
        self._stopped = threading.Event()
        self._complained_s = -COMPLAIN_EVERY_S
        self._is_blind = False
        self.failures = 0
        self._thread = threading.Thread(target=self._follow, name="hplm-catalog", daemon=True)
        try:
            self.refresh()
        except BaseException:
            self._registry.close()
            raise

    def __len__(self) -> int:
        return len(self._published)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def close(self) -> None:
        """Follow no more; what is known stays known."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self._registry.close()

    def find(self, name: str, version_id: int | None = None) -> ServedTenant:
        """What is served of a tenant now, or the version that another stage has found, which may have been replaced since.

        Raises UnknownTenantError, UnknownVersionError.
        """
        found = self._published.get(name)
        if version_id is None:
            if found is None:
                raise UnknownTenantError(f"there is no tenant {name!r}")
            return found
        if found is None or found.version_id != version_id:
            _, found = self._replaced.get(version_id) or self._ask(name, version_id)
        if found.name != name:
            raise UnknownVersionError(f"there is no such version of tenant {name!r}")
        return found

    def _ask(self, name: str, version_id: int) -> tuple[float, ServedTenant]:
        """A version that was current only between two looks of this catalog, or will be at the next."""
        if self._is_blind:
            # Asking could take seconds, and all requests come through here.
            raise RegistryUnavailableError("the registry cannot be read now")
        try:
            if not 0 < version_id < 2**63:
                raise UnknownVersionError(str(version_id))
            found = self._registry.served_version(version_id)
            if found.name != name or self.lineage(found.domain_version_id)[0].base != self._base:
                raise UnknownVersionError(found.name)
        except UnknownVersionError:
            raise UnknownVersionError(f"there is no such version of tenant {name!r}") from None
        self._replaced[version_id] = asked = self._clock(), found
        return asked

    def served(self) -> list[ServedTenant]:
        """All tenants as they are now."""
        return list(self._published.values())

    def lineage(self, domain_version_id: int) -> tuple[DomainVersion, ...]:
        """A domain's version, its parent and so on to the root. Raises UnknownVersionError, RegistryError."""
        found = self._lineages.get(domain_version_id)
        if found is None:
            found = self._lineages[domain_version_id] = tuple(self._registry.lineage(domain_version_id))
        return found

    def check_domain(self, name: str) -> None:
        """Raises UnknownDomainError where the base has no such domain."""
        self._registry.domain(self._base, name)

    def refresh(self) -> None:
        """Take in what has changed since the last time. Raises RegistryError."""
        with self._refreshing:
            now = self._clock()
            if self._registry.generation() != self._generation:
                self._take_in(self._registry.changes_since(self._generation), now)
            old = [number for number, (since, _) in list(self._replaced.items()) if now - since > REMEMBER_S]
            for number in old:
                self._replaced.pop(number, None)

    def _take_in(self, changes: Changes, now: float) -> None:
        if changes.full and self._published:
            if not changes.published:
                # It was lost and is being made anew: what it will name is about to be adopted.
                raise RegistryUnavailableError(
                    f"the registry names no tenant, though {len(self._published):,} were known; "
                    "`hplm store adopt` registers what lies in the store"
                )
            # Another registry: its ids are others' here.
            self._lineages.clear()
            self._replaced.clear()
            self._published = {}
        # Another base's tenants have another server: here nobody learns that they exist.
        own = {one.name for one in changes.published if self.lineage(one.domain_version_id)[0].base == self._base}
        for name in (*changes.removed, *(one.name for one in changes.published if one.name not in own)):
            if (before := self._published.pop(name, None)) is not None:
                self._replaced[before.version_id] = now, before
        for one in changes.published:
            if one.name not in own:
                continue
            before = self._published.get(one.name)
            if before is not None and before.version_id != one.version_id:
                self._replaced[before.version_id] = now, before
            self._published[one.name] = one
        self._generation = changes.generation

    def _follow(self) -> None:
        while not self._stopped.wait(LOOK_EVERY_S):
            try:
                self.refresh()
                self._is_blind = False
            except Exception as error:
                self._is_blind = True
                self.failures += 1
                if self._clock() - self._complained_s >= COMPLAIN_EVERY_S:
                    self._complained_s = self._clock()
                    logging.getLogger(__name__).error("what is known goes on being served: %r", error)
