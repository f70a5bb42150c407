"""Which tenants were served when: what is fair now depends on what was chosen before."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

# Tenants whose last batch is remembered; of others it is as if they had never had one.
MOST_TENANTS = 10_000


class Served:
    """`last`: the tenants of the last batch."""

    def __init__(self) -> None:
        self.last: frozenset[str] = frozenset()
        self._at_s: OrderedDict[str, float] = OrderedDict()

    def add(self, tenants: Iterable[str], now_s: float) -> None:
        """A batch of theirs begins."""
        self.last = frozenset(tenants)
        for tenant in self.last:
            self._at_s[tenant] = now_s
            self._at_s.move_to_end(tenant)
        while len(self._at_s) > MOST_TENANTS:
            self._at_s.popitem(last=False)

    def at_s(self, tenant: str) -> float:
        """When the tenant's last batch began, minus infinity where none is remembered."""
        return self._at_s.get(tenant, -math.inf)
