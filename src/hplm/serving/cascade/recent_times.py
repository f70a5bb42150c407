"""How long each level has taken recently."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict

from hplm.cascade.level_times import KEEP_S, LevelTime

# The most tenants of a level whose own times are kept, at up to 30 KB each. Tenants that have sent nothing for longest leave.
MOST_TENANTS = 1024


class RecentTimes:
    """The recent times of levels by base and tenant. Safe to use from several threads.

    Tenants take turns in a level's queue, so the texts of a flood wait for much longer than those of another tenant. The
    flood's times must not keep the other tenant's texts from the level. So a tenant's own times decide, if there are enough.
    Else the times of all tenants decide, among which each tenant counts once in KEEP_S: they show a level that hangs.
    """

    def __init__(self) -> None:
        self._of_tenants: OrderedDict[tuple[str, str], _TenantTime] = OrderedDict()
        self._of_all: dict[str, LevelTime] = {}
        self._lock = threading.Lock()

    def add(self, base: str, tenant: str, seconds: float, now_s: float) -> None:
        """Do as `LevelTime.add`."""
        with self._lock:
            own = self._own(base, tenant)
            own.add(seconds, now_s)
            if now_s - own.shared_s >= KEEP_S:
                own.shared_s = now_s
                self._of_all.setdefault(base, LevelTime()).add(seconds, now_s)

    def expected_s(self, base: str, tenant: str, now_s: float, default_s: float) -> float:
        """Do as `LevelTime.expected_s`."""
        with self._lock:
            of_all = self._of_all.setdefault(base, LevelTime()).expected_s(now_s, default_s)
            return self._own(base, tenant).expected_s(now_s, of_all)

    def _own(self, base: str, tenant: str) -> _TenantTime:
        own = self._of_tenants.setdefault((base, tenant), _TenantTime())
        self._of_tenants.move_to_end((base, tenant))
        if len(self._of_tenants) > MOST_TENANTS:
            self._of_tenants.popitem(last=False)
        return own


class _TenantTime(LevelTime):
    """The times of one tenant. `shared_s`: when a time was last counted among those of all tenants."""

    def __init__(self) -> None:
        super().__init__()
        self.shared_s = -math.inf
