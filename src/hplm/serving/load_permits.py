"""Places for requests that came before what they need was loaded.

They keep them until that load ends, also where they were answered without it long before: what hangs keeps each in mind.
"""

from __future__ import annotations

import threading
from collections import Counter


class LoadPermits:
    """`most` places in all. A tenant gets one while it holds fewer than are free (Choudhury and Hahne, 1998).

    So one that floods, and whose files never come, takes half of them and one at most, and whoever comes after finds room while
    any is free. Safe to use from several threads.
    """

    def __init__(self, most: int) -> None:
        self._free = most
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, tenant: str) -> bool:
        """Whether there was a place for one more of its requests."""
        with self._lock:
            if self._held.get(tenant, 0) >= self._free:
                return False
            self._held[tenant] += 1
            self._free -= 1
            return True

    def leave(self, tenant: str) -> None:
        """Give back a place that `take` gave."""
        with self._lock:
            self._free += 1
            self._held[tenant] -= 1
            if not self._held[tenant]:
                # Of thousands of tenants few wait at a time.
                del self._held[tenant]
