"""What saturates the upper layers in-process: texts that the tables know, of as many tenants as there are, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hplm.engine.encode import EngineRequest
from hplm.engine.open_domain import open_lookup
from hplm_loadtest.benchmarks.models import Served
from hplm_loadtest.workloads.plan import Requests
from hplm_loadtest.workloads.texts import pool

BATCH = 64


@dataclass(frozen=True)
class Saturated:
    """One batch as the engine takes it, and the same texts as a client sends them."""

    requests: Sequence[EngineRequest]
    names: Sequence[str]
    texts: Sequence[str]

    @property
    def tokens(self) -> int:
        return sum(len(request.hidden) for request in self.requests)

    @property
    def reduced_size(self) -> int:
        return max(request.tenant.packed.reduced_size for request in self.requests)

    def sent(self, times: int) -> Requests:
        """All of them `times` times, without deadlines."""
        count = times * len(self.texts)
        return Requests([*self.names] * times, [*self.texts] * times, np.full(count, np.nan))


def saturated(models: Path, served: Served) -> Saturated:
    """BATCH texts of a fleet's pool. Raises DataError where there is none."""
    members = served.some(BATCH)
    texts = (pool(models) * BATCH)[:BATCH]
    encoder = served.base.load_text_encoder()
    lookup = open_lookup(served.store, served.base, served.plot.table, miss=served.plot.miss)
    requests = [
        EngineRequest(members[i % len(members)], lookup.hidden_states(one.ids, [len(one.ids)]))
        for i, one in enumerate(encoder.encode(texts))
    ]
    return Saturated(requests, [request.tenant.card.name for request in requests], texts)
