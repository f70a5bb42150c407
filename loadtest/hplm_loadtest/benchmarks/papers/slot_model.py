"""TCB's own model of a server, in-process: every batch takes equally long, an answer is worth 1 / length (TCB 5.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hplm.scheduling.cost import CostModel
from hplm.scheduling.policy import Budget, Policy, Waiting
from hplm.scheduling.queue import RequestQueue
from hplm.scheduling.simulator import simulate
from hplm_loadtest.workloads.arrivals import PoissonArrivals
from hplm_loadtest.workloads.workload import NormalLengths


@dataclass(frozen=True)
class SlotModel:
    """A server whose batch of `rows` x `row_tokens` tokens takes `batch_s` seconds however full it is, and its load.

    Arrivals are Poisson, about `requests` of them, at `overload` times what full batches hold; deadlines are even within
    `deadlines_s`. Utility counts by the second of `planned_s`, the time in which requests arrive.
    """

    rows: int
    row_tokens: int
    variance: float
    batch_s: float
    overload: float
    deadlines_s: tuple[float, float]
    requests: int = 20_000

    @property
    def rate_per_s(self) -> float:
        mean = NormalLengths(variance=self.variance).drawn_mean
        return self.overload * self.rows * self.row_tokens / (mean * self.batch_s)

    @property
    def planned_s(self) -> float:
        return self.requests / self.rate_per_s

    @cached_property
    def arrivals(self) -> list[Waiting]:
        """The same for every policy, each of a tenant of its own: shares play no part."""
        rng = np.random.default_rng(0)
        lengths = NormalLengths(variance=self.variance)
        times_s = PoissonArrivals(self.rate_per_s).times(self.planned_s, rng)
        deadlines_s = times_s + rng.uniform(*self.deadlines_s, len(times_s))
        tokens = lengths.draw(len(times_s), rng)
        return [
            Waiting(number, f"t{number}", *values)
            for number, values in enumerate(zip(tokens.tolist(), times_s.tolist(), deadlines_s.tolist(), strict=True))
        ]

    def utility_per_s(self, policy: Policy) -> float:
        """Of a policy, through the live queue's own code: what it foresees to be late is refused, nothing else is."""
        arrivals = self.arrivals
        queue = RequestQueue(
            policy,
            Budget(self.rows, self.row_tokens, len(arrivals), len(arrivals)),
            CostModel.fit([(tokens, tokens * tokens, self.batch_s) for tokens in (1, 10, 100, 1000)]),
            capacity=len(arrivals),
            weights={},
            starve_after_s=math.inf,
        )
        outcomes = simulate(arrivals, queue, lambda batch: self.batch_s)
        return sum(one.request.utility for one in outcomes if one.in_time) / self.planned_s

    def most_per_s(self) -> float:
        """What no policy can exceed, whatever it knows of what will come.

        A request can be answered if a whole batch fits between its arrival and its deadline. Of those the shortest go first,
        for 1 / length a request is most by the token for them, as many as the rows of all batches hold that end by the last
        deadline: when each may be chosen and how rows are filled is let go, and part of a request may be put in for part of
        its utility.
        """
        arrivals = self.arrivals
        arrived_s, deadlines_s = (
            np.array([getattr(one, key) for one in arrivals]) for key in ("arrived_s", "deadline_s")
        )
        lengths = np.array([one.tokens for one in arrivals], dtype=np.float64)
        shortest = np.sort(lengths[arrived_s + self.batch_s <= deadlines_s])
        if not len(shortest):
            return 0.0
        batches = int((deadlines_s.max() - arrived_s.min()) / self.batch_s)
        # One that is longer than a row has a row to itself.
        taken = np.minimum(shortest, self.row_tokens)
        before = np.cumsum(taken) - taken
        parts = np.clip((self.rows * self.row_tokens * batches - before) / taken, 0.0, 1.0)
        return float((parts / shortest).sum()) / self.planned_s
