"""When each tenant was last served. A fair choice depends on earlier choices."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

# Tenants whose last batch is remembered. Any other tenant counts as never served.
MOST_TENANTS = 10_000


class ServiceHistory:
    """When each tenant's last batch began. `last` are the tenants of the last batch of all."""

    def __init__(self) -> None:
        self.last: frozenset[str] = frozenset()
        self._served_s: OrderedDict[str, float] = OrderedDict()

    def add(self, tenants: Iterable[str], now_s: float) -> None:
        """Note that a batch with these tenants begins."""
        self.last = frozenset(tenants)
        for tenant in self.last:
            self._served_s[tenant] = now_s
            self._served_s.move_to_end(tenant)
        while len(self._served_s) > MOST_TENANTS:
            self._served_s.popitem(last=False)

    def served_s(self, tenant: str) -> float:
        """Return when the tenant's last batch began, minus infinity if no batch is remembered."""
        return self._served_s.get(tenant, -math.inf)
