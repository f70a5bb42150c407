"""Permits to wait for a load, such as of a tenant's weights.

A permit is held until its load finishes, even if the request has already been answered, so that hanging loads stay bounded.
"""

from __future__ import annotations

import threading
from collections import Counter


class LoadPermits:
    """`most` permits in all. A tenant gets one if it holds fewer than are free (Choudhury and Hahne, 1998).

    So a tenant that sends a flood while its files do not come takes half of the permits at most, rounded up. A tenant without a
    permit gets one if any is free. Safe to use from several threads.
    """

    def __init__(self, most: int) -> None:
        self._free = most
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, tenant: str) -> bool:
        """Take a permit for one more request of a tenant. Returns whether there was one."""
        with self._lock:
            if self._held.get(tenant, 0) >= self._free:
                return False
            self._held[tenant] += 1
            self._free -= 1
            return True

    def leave(self, tenant: str) -> None:
        """Give back a permit that `take` gave."""
        with self._lock:
            self._free += 1
            self._held[tenant] -= 1
            if not self._held[tenant]:
                # Of thousands of tenants only a few wait at a time.
                del self._held[tenant]
