"""The part of `hplm serve` that leases quotas from the registry, so that all servers together keep to them."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from hplm.access.limit_book import LimitBook
from hplm.access.quotas import FILE_VARIABLE, file_of, remove_dead_files
from hplm.errors import RegistryError
from hplm.quotas.limits import NOTHING, Limits, Use
from hplm.quotas.quota_file import QuotaFile
from hplm.registry.access.limits import ALIVE_S
from hplm.registry.registry import Registry
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.store.layout import Store

# Seconds between two settlements of the tenants that ask. A lease lasts for 0.1 s of a tenant's quota.
SETTLE_EVERY_S = 0.02
# Seconds between two signs that this server lives.
ANNOUNCE_EVERY_S = 1.0
# Seconds after the first sign during which a server gives more signs and leases as if there were other servers. All servers
# begin at once when a registry gets its first limit, and do not know of each other yet.
JOINING_S, JOINING_EVERY_S = 1.0, 0.1
# Seconds for which a stage goes by a lease. After that it limits by itself, as if its server were the only one. A slow
# registry must not do that, so this is much longer than a settlement takes.
LEASED_S = 3.0
# Seconds after a tenant's last request at which its lease goes back.
IDLE_S = 0.5
# Seconds between two looks whether the account of a tenant that asks for nothing now can fill its lease.
FILL_EVERY_S = 0.05


class QuotaKeeper:
    """Leases quotas for one server. It writes the registry, which serving processes never do.

    A server that is alone on its registry needs no leases: its stages limit by themselves. While the registry cannot be
    written, each server limits by itself too, and the log says so. Raises RegistryError or OSError on construction.
    """

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.server = secrets.token_hex(8)
        self.path = file_of(store, self.server)
        remove_dead_files(self.path.parent)
        self._registry = Registry.open(store)
        self._book = LimitBook(store)
        self._file = QuotaFile(self.path)
        self._file.keep()
        self._servers = 1
        # The last sign, and the first sign after a time without signs.
        self._announced_s = self._joined_s = -math.inf
        # Of each tenant: all spending as last read, the part of it that the registry has yet to book, and when the tenant
        # last asked while its quotas are leased.
        self._totals: dict[str, Use] = {}
        self._unbooked: dict[str, Use] = {}
        self._asked_s: dict[str, float] = {}
        # When the leases of such tenants were last settled.
        self._settled_s: dict[str, float] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="hplm-quotas", daemon=True)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that tell stages of the file."""
        return {FILE_VARIABLE: str(self.path)}

    def start(self) -> None:
        """Announce this server, and begin to lease. Call it before Triton starts: the other servers must know in time."""
        self.step()
        self._book.start()
        self._thread.start()

    def stop(self) -> None:
        """Give all leases back. Call it after Triton has ended."""
        self._stopped.set()
        self._thread.join(timeout=5.0)
        with suppress(RegistryError):
            self._registry.end_server(self.server)
        self._book.close()
        self._registry.close()
        self._file.close()
        with suppress(OSError):
            self.path.unlink()

    def step(self) -> None:
        """Do what is due now. Raises nothing: a registry that cannot be written is logged."""
        if self._book.is_empty and not self._asked_s:
            # A registry without limits is not written at all.
            return
        now_s = self._clock()
        self._read_spending()
        try:
            self._announce(now_s)
            is_sharing = self._servers > 1 or self._is_joining(now_s)
            if is_sharing:
                self._asked_s.update(dict.fromkeys(self._unbooked, now_s))
                self._settle(now_s)
            else:
                # A server that is alone books nothing.
                self._unbooked.clear()
            idle = [tenant for tenant, asked_s in self._asked_s.items() if now_s - asked_s > IDLE_S]
            self._give_back(idle if is_sharing else list(self._asked_s))
        except RegistryError as error:
            self._bound_unbooked(now_s)
            log_rate_limited(f"quotas are not shared among servers now, each server limits by itself: {error.wire()}")

    def _read_spending(self) -> None:
        """Read what tenants have spent since the last step."""
        for tenant, total in self._file.marked().items():
            since = total.less(self._totals.get(tenant, NOTHING))
            self._unbooked[tenant] = self._unbooked.get(tenant, NOTHING).plus(since)
            self._totals[tenant] = total

    def _bound_unbooked(self, now_s: float) -> None:
        """Bound the spending that is booked later to the most that a lease holds, for tenants without a lease in force.

        The stages limit such tenants by themselves. Booked in full, a long failure would leave tenants a debt as long.
        """
        for tenant, spent in list(self._unbooked.items()):
            if now_s - self._settled_s.get(tenant, -math.inf) <= LEASED_S:
                continue
            if (limits := self._limits_of(tenant)) is None:
                del self._unbooked[tenant]
            else:
                rates = limits.requests, limits.tokens
                most = (0.0 if rate is None else rate.capacity for rate in rates)
                self._unbooked[tenant] = Use(*map(min, spent, most))

    def _announce(self, now_s: float) -> None:
        """Give a sign that this server lives if it is time, and learn how many servers there are."""
        if (silent_s := now_s - self._announced_s) > ALIVE_S:
            self._joined_s = now_s
        elif silent_s < (JOINING_EVERY_S if self._is_joining(now_s) else ANNOUNCE_EVERY_S):
            return
        # Before the call: a registry that cannot be written is not asked more often.
        self._announced_s = now_s
        self._servers = self._registry.announce_server(self.server)
        self._file.set_servers(self._servers)

    def _is_joining(self, now_s: float) -> bool:
        return now_s - self._joined_s < JOINING_S

    def _settle(self, now_s: float) -> None:
        """Book what was spent, and lease again."""
        due = [tenant for tenant, settled_s in self._settled_s.items() if now_s - settled_s >= FILL_EVERY_S]
        spent = {**dict.fromkeys(due, NOTHING), **self._unbooked}
        limits = {tenant: found for tenant in spent if (found := self._limits_of(tenant)) is not None}
        leased: dict[str, Use] = {}
        if limits:
            leased = self._registry.settle_quotas(self.server, {tenant: spent[tenant] for tenant in limits}, limits)
        self._unbooked.clear()
        until_s = self._clock() + LEASED_S
        for tenant, lease in leased.items():
            self._file.lease(tenant, limits[tenant], lease, self._totals.get(tenant, NOTHING), now_s, until_s)
            self._settled_s[tenant] = now_s

    def _give_back(self, tenants: list[str]) -> None:
        if not tenants:
            return
        limits = {tenant: self._book.of(tenant) or Limits() for tenant in tenants}
        self._registry.give_back_quotas(self.server, limits)
        for tenant in tenants:
            self._file.release(tenant, self._clock())
            del self._asked_s[tenant]
            self._settled_s.pop(tenant, None)

    def _limits_of(self, tenant: str) -> Limits | None:
        found = self._book.of(tenant)
        return None if found is None or (found.requests is None and found.tokens is None) else found

    def _loop(self) -> None:
        while not self._stopped.wait(SETTLE_EVERY_S):
            try:
                self.step()
            except Exception as error:
                log_rate_limited("quotas could not be leased", error)
