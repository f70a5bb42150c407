"""The served tenants of one base, or all tenants over their default bases, kept up to date from the registry."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from hplm.cascade.plan import CascadePlan
from hplm.errors import RegistryUnavailableError, UnknownTenantError, UnknownVersionError
from hplm.registry.records import Changes, DomainVersion, ServedTenant, WithdrawnTenant
from hplm.registry.registry import Registry
from hplm.runtime.polling import Poller
from hplm.store.layout import Store

# Seconds between polls of the registry; a published version is served within one interval. A poll takes 0.3 ms.
POLL_EVERY_S = 0.2
# A replaced or deleted version still answers requests that were under way, for this long. Its files are kept longer.
REMEMBER_S = 60.0


class Catalog:
    """A dictionary of the served tenants that a thread keeps up to date.

    It holds the tenants of `base`. With `base` None it holds every tenant as its default base serves it.

    If the registry cannot be read any more, the known tenants stay served, `failures` grows and the log says why. The
    thread calls `on_forgotten` with versions that can no longer be found. Raises RegistryError on construction. Safe to
    use from several threads.
    """

    def __init__(
        self,
        store: Store,
        base: str | None,
        *,
        on_forgotten: Callable[[Sequence[ServedTenant]], None] = lambda versions: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._base = base
        self._on_forgotten = on_forgotten
        self._forgotten: list[ServedTenant] = []
        self._clock = clock
        self._registry = Registry.open_read_only(store)
        self._refreshing = threading.Lock()
        self._generation = 0
        self._published: dict[str, ServedTenant] = {}
        self._plans: dict[str, CascadePlan] = {}
        self._replaced: dict[int, tuple[float, ServedTenant]] = {}
        self._lineages: dict[int, tuple[DomainVersion, ...]] = {}  # by id of a domain version
        self._poller = Poller(
            self.refresh,
            name="hplm-catalog",
            every_s=POLL_EVERY_S,
            fault="the registry cannot be read, the known tenants stay served",
            afterwards=self._report_forgotten,
            clock=clock,
        )
        try:
            self.refresh()
        except BaseException:
            self._registry.close()
            raise

    def __len__(self) -> int:
        return len(self._published)

    def __contains__(self, name: str) -> bool:
        return name in self._published

    def start(self) -> None:
        """Start to poll the registry."""
        self._poller.start()

    def close(self) -> None:
        """Stop polling. The known tenants stay known."""
        self._poller.close()
        self._registry.close()

    @property
    def failures(self) -> int:
        """The number of polls that failed or took too long."""
        return self._poller.failures

    def find(self, name: str, version_id: int | None = None) -> ServedTenant:
        """Return the served version of a tenant, or the version `version_id` that another stage found earlier.

        Raises UnknownTenantError, UnknownVersionError, or RegistryUnavailableError if the registry cannot be read.
        """
        tenant = self.known(name, version_id)
        if tenant is None:
            assert version_id is not None
            tenant = self._read_version(name, version_id)
        return tenant

    def known(self, name: str, version_id: int | None = None) -> ServedTenant | None:
        """Do as `find` without reading the registry, which may hang; return None for a version that only it may know."""
        tenant = self._published.get(name)
        if version_id is None:
            if tenant is None:
                # Looked up again after the check: a poll publishes what it read before it counts as a success.
                is_blind = self._poller.is_blind()
                tenant = self._published.get(name)
                if tenant is None and is_blind:
                    raise RegistryUnavailableError("the registry cannot be read now, and this tenant is not known")
                if tenant is None:
                    raise UnknownTenantError(f"there is no tenant {name!r}")
            return tenant
        if tenant is None or tenant.version_id != version_id:
            _, tenant = self._replaced.get(version_id, (0.0, None))
        if tenant is not None and tenant.name != name:
            raise UnknownVersionError(f"there is no such version of tenant {name!r}")
        return tenant

    def _read_version(self, name: str, version_id: int) -> ServedTenant:
        """Read a version that was current only between two polls, or will be current at the next poll."""
        if self._poller.is_blind():
            # Reading could take seconds, and few threads do it.
            raise RegistryUnavailableError("the registry cannot be read now")
        tenant = None
        if 0 < version_id < 2**63:
            with suppress(UnknownVersionError):
                tenant = self._with_lineage(self._registry.served_version(version_id), self._lineages)
        if tenant is None or tenant.name != name or self._base not in (None, tenant.base):
            raise UnknownVersionError(f"there is no such version of tenant {name!r}")
        self._replaced[version_id] = self._clock(), tenant
        return tenant

    def served(self) -> list[ServedTenant]:
        """Return all tenants as they are now."""
        return list(self._published.values())

    def retained(self) -> list[ServedTenant]:
        """Return the served versions, and replaced versions that requests under way may still name."""
        return [*self._published.values(), *(tenant for _, tenant in list(self._replaced.values()))]

    def plan_of(self, name: str) -> CascadePlan | None:
        """Return the plan of a tenant's cascade that is in force; None if there is none. Does not read the registry.

        A plan is in force while each level that was published with it is the current version over its base.
        """
        return self._plans.get(name)

    def lineage(self, domain: str) -> tuple[str, ...]:
        """Return the folders of a domain's current version and of the versions above it. Raises UnknownDomainError.

        Only for the catalog of one base.
        """
        assert self._base is not None
        current = self._registry.current_domain(self._base, domain)
        return tuple(version.path for version in self._registry.lineage(current.id))

    def refresh(self) -> None:
        """Apply what has changed since the last time. Raises RegistryError."""
        with self._refreshing:
            now = self._clock()
            if self._registry.generation() != self._generation:
                self._apply(self._registry.changes_since(self._generation), now)
            old = [number for number, (since, _) in list(self._replaced.items()) if now - since > REMEMBER_S]
            for number in old:
                _, tenant = self._replaced.pop(number)
                if self._published.get(tenant.name) != tenant:  # otherwise the tenant was rolled back to this version
                    self._forgotten.append(tenant)

    def _apply(self, changes: Changes, now: float) -> None:
        """Replace the view. Other threads see the old view or the new one; if this fails, the old one stays."""
        if changes.full and self._published and not changes.published:
            # The registry was lost and is being made anew: its tenants are about to be adopted.
            raise RegistryUnavailableError(
                f"the registry names no tenant, though {len(self._published):,} were known; "
                "`hplm store adopt` registers the artifacts in the store"
            )
        # In another registry the same ids belong to other versions.
        lineages = {} if changes.full else self._lineages
        published = {} if changes.full else dict(self._published)
        replaced = {} if changes.full else self._replaced
        told: tuple[ServedTenant | WithdrawnTenant, ...] = (*changes.withdrawn, *changes.published)
        plans = {} if changes.full else dict(self._plans)
        for changed in told:
            plans.pop(changed.name, None)
            before = published.get(changed.name)
            if before is not None and before.base == changed.base:
                del published[changed.name]
                replaced[before.version_id] = now, before
        for tenant in changes.published:
            if tenant.is_default if self._base is None else tenant.base == self._base:
                published[tenant.name] = self._with_lineage(tenant, lineages)
        if changes.full:
            self._forgotten += [tenant for tenant in self.retained() if published.get(tenant.name) != tenant]
        self._lineages, self._published, self._replaced = lineages, published, replaced
        self._plans = {**plans, **changes.plans}
        self._generation = changes.generation

    def _with_lineage(self, tenant: ServedTenant, lineages: dict[int, tuple[DomainVersion, ...]]) -> ServedTenant:
        """Return the tenant with its lineage."""
        lineage = lineages.get(tenant.domain_version_id)
        if lineage is None:
            lineage = lineages[tenant.domain_version_id] = tuple(self._registry.lineage(tenant.domain_version_id))
        return replace(tenant, lineage=tuple(version.path for version in lineage))

    def _report_forgotten(self) -> None:
        if not self._forgotten:
            return
        forgotten, self._forgotten = self._forgotten, []
        try:
            self._on_forgotten(forgotten)
        except Exception:
            self._forgotten = forgotten + self._forgotten
            logging.getLogger(__name__).exception("replaced versions are not dropped yet; the next poll tries again")
