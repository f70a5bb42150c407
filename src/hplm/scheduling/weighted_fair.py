"""What goes before a newcomer where tenants take turns by weight."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


class WeightedFair:
    """What each of several tenants has waiting, in requests or in tokens; a tenant not named in `weights` has a weight of 1."""

    def __init__(self, waiting: Mapping[str, float], weights: Mapping[str, float]) -> None:
        self._waiting = dict(waiting)
        self._weights = weights
        amounts = np.array(list(waiting.values()), dtype=np.float64)
        weight = np.array([weights.get(tenant, 1.0) for tenant in waiting], dtype=np.float64)
        levels = amounts / weight
        order = np.argsort(levels)
        self._levels = levels[order]
        # Of those below a level all, of those above it the level times their weight.
        self._below = np.concatenate([[0.0], np.cumsum(amounts[order])])
        self._above = np.concatenate([np.cumsum(weight[order][::-1])[::-1], [0.0]])

    def before(self, tenant: str, own: float) -> float:
        """Until a tenant has had `own`: as much of each other tenant, by weight, or all that it has; and `own` itself."""
        level = own / self._weights.get(tenant, 1.0)
        place = int(np.searchsorted(self._levels, level))
        return float(self._below[place] + level * self._above[place]) - min(self._waiting.get(tenant, 0.0), own) + own
