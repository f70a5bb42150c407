"""How much waiting work goes before a new request if tenants take turns by weight."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


class WeightedFair:
    """The waiting work of each tenant, in requests or in tokens. A tenant without an entry in `weights` has weight 1."""

    def __init__(self, waiting: Mapping[str, float], weights: Mapping[str, float]) -> None:
        self._waiting = dict(waiting)
        self._weights = weights
        amounts = np.array(list(waiting.values()), dtype=np.float64)
        weight = np.array([weights.get(tenant, 1.0) for tenant in waiting], dtype=np.float64)
        levels = amounts / weight
        order = np.argsort(levels)
        self._levels = levels[order]
        # The total work of tenants below each level, and the total weight of tenants above it.
        self._below = np.concatenate([[0.0], np.cumsum(amounts[order])])
        self._above = np.concatenate([np.cumsum(weight[order][::-1])[::-1], [0.0]])

    def before(self, tenant: str, own: float) -> float:
        """Return the work that is done until a tenant has had `own`, with `own` included.

        Meanwhile each other tenant gets as much by weight, or all that it has.
        """
        level = own / self._weights.get(tenant, 1.0)
        place = int(np.searchsorted(self._levels, level))
        return float(self._below[place] + level * self._above[place]) - min(self._waiting.get(tenant, 0.0), own) + own
