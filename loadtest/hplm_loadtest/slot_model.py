"""TCB's own model of a server, in-process: every batch takes equally long, an answer is worth 1 / length (TCB 5.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hplm.scheduling.cost import CostModel
from hplm.scheduling.policy import Budget, Policy, Waiting
from hplm.scheduling.queue import RequestQueue
from hplm.scheduling.simulate import simulate
from hplm_loadtest.arrivals import PoissonArrivals
from hplm_loadtest.workload import NormalLengths


@dataclass(frozen=True)
class SlotModel:
    """A server whose batch of `rows` x `row_tokens` tokens takes `batch_s` seconds however full it is, and its load.

    Arrivals are Poisson, at `overload` times what full batches hold, over `batches` batches; deadlines are even within
    `deadlines_s`.
    """

    rows: int
    row_tokens: int
    variance: float
    batch_s: float
    overload: float
    deadlines_s: tuple[float, float]
    batches: int = 200

    def arrivals(self) -> list[Waiting]:
        """The same for every policy, each of a tenant of its own: shares play no part."""
        rng = np.random.default_rng(0)
        lengths = NormalLengths(variance=self.variance)
        rate_per_s = self.overload * self.rows * self.row_tokens / (lengths.mean * self.batch_s)
        times_s = PoissonArrivals(rate_per_s).times(self.batches * self.batch_s, rng)
        deadlines_s = times_s + rng.uniform(*self.deadlines_s, len(times_s))
        tokens = lengths.draw(len(times_s), rng)
        return [
            Waiting(number, f"t{number}", *values)
            for number, values in enumerate(zip(tokens.tolist(), times_s.tolist(), deadlines_s.tolist(), strict=True))
        ]

    def utility_per_s(self, policy: Policy) -> float:
        """Of a policy, through the live queue's own code: late requests are refused, nothing else is."""
        arrivals = self.arrivals()
        queue = RequestQueue(
            policy,
            Budget(self.rows, self.row_tokens, len(arrivals), len(arrivals)),
            CostModel.fit([(tokens, tokens * tokens, self.batch_s) for tokens in (1, 10, 100, 1000)]),
            capacity=len(arrivals),
            weights={},
            starve_after_s=math.inf,
        )
        outcomes = simulate(arrivals, queue, lambda batch: self.batch_s)
        return sum(one.request.utility for one in outcomes if one.in_time) / (self.batches * self.batch_s)

    def most_per_s(self) -> float:
        """What no policy can exceed that never idles, even one that knows all arrivals before.

        Time is cut into slots, each of a batch; a request can be answered if a whole slot lies between its arrival and its
        deadline. Of those the shortest go first, for 1 / length a request is most by the token for them, as many as all
        slots' rows hold together: when each may be chosen and how rows are filled is let go, and part of a request may be
        put in for part of its utility.
        """
        arrivals = self.arrivals()
        arrived_s, deadlines_s = (
            np.array([getattr(one, key) for one in arrivals]) for key in ("arrived_s", "deadline_s")
        )
        lengths = np.array([one.tokens for one in arrivals], dtype=np.float64)
        first_s = arrived_s.min(initial=np.inf)
        ends_s = first_s + (np.ceil((arrived_s - first_s) / self.batch_s) + 1) * self.batch_s
        can_be = ends_s <= deadlines_s
        slots = math.ceil((deadlines_s.max(initial=0.0) - first_s) / self.batch_s) if len(arrivals) else 0
        shortest = np.sort(lengths[can_be])
        before = np.cumsum(shortest) - shortest
        parts = np.clip((self.rows * self.row_tokens * slots - before) / shortest, 0.0, 1.0)
        return float((parts / shortest).sum()) / (self.batches * self.batch_s)
