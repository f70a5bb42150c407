"""Makes the batch that saturates the upper layers: texts whose n-grams the tables hold, of many tenants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import numpy as np

from hplm.adapters.tenant import Tenant
from hplm.engine.encode import EngineRequest
from hplm.engine.open_domain import open_features
from hplm_loadtest.benchmarks.served_repository import ServedRepository
from hplm_loadtest.scenarios.steady_rate import enough_requests
from hplm_loadtest.workloads.load_plan import Requests
from hplm_loadtest.workloads.texts import pool_texts

BATCH = 64
IN_FLIGHT = 2 * BATCH  # requests under way in a closed loop over such batches


@dataclass(frozen=True)
class SaturatingBatch:
    """One batch as the engine takes it, and the tenants and texts of the same batch as a client sends them."""

    requests: Sequence[EngineRequest]
    names: Sequence[str]
    texts: Sequence[str]

    @property
    def tokens(self) -> int:
        return sum(len(request.features) for request in self.requests)

    @property
    def tenants(self) -> list[Tenant]:
        return [request.tenant for request in self.requests]

    def repeat(self, times: int) -> Requests:
        """Return the batch's requests `times` times, without deadlines."""
        count = times * len(self.texts)
        return Requests([*self.names] * times, [*self.texts] * times, np.full(count, np.nan))


def batches_for(rate_per_s: float, seconds: float) -> int:
    """Return how many batches a closed loop of `IN_FLIGHT` requests needs, see `enough_requests`."""
    return ceil(enough_requests(rate_per_s, seconds, IN_FLIGHT) / BATCH)


def saturating_batch(models: Path, served: ServedRepository) -> SaturatingBatch:
    """Make a batch of `BATCH` texts of a fleet's pool. Raises DataError if the pool is missing."""
    tenants = served.load_tenants(BATCH)
    texts = (pool_texts(models) * BATCH)[:BATCH]
    encoder = served.base.load_text_encoder()
    root = served.store.table(served.plot.table, "root").parent
    domain = open_features(served.store, served.base, [root], miss=served.plot.miss)
    requests = [
        EngineRequest(tenants[i % len(tenants)], domain.features([encoded])[0])
        for i, encoded in enumerate(encoder.encode(texts))
    ]
    return SaturatingBatch(requests, [request.tenant.card.name for request in requests], texts)
