"""The limits of all tenants in memory, which a thread keeps up to date."""

from __future__ import annotations

import threading

from hplm.quotas.limits import Limits
from hplm.registry.access.limits import DEFAULT
from hplm.registry.catalog import POLL_EVERY_S
from hplm.registry.registry import Registry
from hplm.runtime.polling import Poller
from hplm.store.layout import Store


class LimitBook:
    """The limits of a registry. If the registry cannot be read, the known limits hold, and the log says why.

    Safe to use from several threads. Raises RegistryError on construction.
    """

    def __init__(self, store: Store) -> None:
        self._registry = Registry.open_read_only(store)
        self._refreshing = threading.Lock()
        self._generation = 0
        self._own: dict[str, Limits] = {}
        # By tenant, with the default's where the tenant has none. Replaced as a whole: requests read it without a lock.
        self._limits: dict[str, Limits] = {}
        self._default = Limits()
        self._poller = Poller(
            self.refresh,
            name="hplm-limits",
            every_s=POLL_EVERY_S,
            fault="the registry cannot be read, the known limits hold",
        )
        try:
            self.refresh()
        except BaseException:
            self._registry.close()
            raise

    def start(self) -> None:
        """Start to poll the registry."""
        self._poller.start()

    def close(self) -> None:
        """Stop polling. The known limits stay known."""
        self._poller.close()
        self._registry.close()

    @property
    def is_empty(self) -> bool:
        """Whether no tenant is limited."""
        return self._default.is_none and all(limits.is_none for limits in self._limits.values())

    def of(self, tenant: str) -> Limits | None:
        """Return the limits of a tenant, None if nothing is limited."""
        found = self._limits.get(tenant, self._default)
        return None if found.is_none else found

    def refresh(self) -> None:
        """Apply what has changed since the last time. Raises RegistryError."""
        with self._refreshing:
            if self._registry.generation() == self._generation:
                return
            changes = self._registry.limits_since(self._generation)
            self._generation = changes.generation
            if not changes.limits and not changes.full:
                return
            own = dict(changes.limits) if changes.full else {**self._own, **changes.limits}
            self._own = own
            self._default = own.get(DEFAULT, Limits())
            self._limits = {tenant: limits.over(self._default) for tenant, limits in own.items() if tenant != DEFAULT}
