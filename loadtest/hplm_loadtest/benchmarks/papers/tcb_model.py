"""Simulates TCB's own model of a server: every batch takes the same time, and an answer is worth 1 / length (TCB 5.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hplm.scheduling.cost import CostModel
from hplm.scheduling.policy import Budget, Policy, Waiting
from hplm.scheduling.queue import RequestQueue
from hplm.scheduling.simulator import simulate
from hplm.workloads.arrivals import PoissonArrivals
from hplm_loadtest.workloads.lengths import NormalLengths


@dataclass(frozen=True)
class TcbModel:
    """A server and its load. A batch of `rows` x `row_tokens` tokens takes `batch_s` seconds, whether it is full or not.

    About `requests` Poisson arrivals come at `overload` times the rate of full batches. Deadlines are uniform within
    `deadlines_s`. Utility is per second of `planned_s`, the time in which requests arrive.
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
        """Draw the requests. All policies get the same; each has a tenant of its own, so that fair shares have no effect."""
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
        """Return a policy's utility in the code of the live queue, which refuses only requests that it expects to be late."""
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
        return sum(outcome.request.utility for outcome in outcomes if outcome.in_time) / self.planned_s

    def most_per_s(self) -> float:
        """Return a utility per second that no policy can exceed, even if it knows all future requests.

        A request can be answered if a whole batch fits between its arrival and its deadline. The bound takes the shortest such
        requests first, because 1 / length per request is the most utility per token for them. It fills the rows of all batches
        that end by the last deadline. The bound ignores when a request may be chosen and how rows are filled, and counts a part
        of a request as a part of its utility.
        """
        arrivals = self.arrivals
        arrived_s, deadlines_s = (
            np.array([getattr(request, key) for request in arrivals]) for key in ("arrived_s", "deadline_s")
        )
        lengths = np.array([request.tokens for request in arrivals], dtype=np.float64)
        shortest = np.sort(lengths[arrived_s + self.batch_s <= deadlines_s])
        if not len(shortest):
            return 0.0
        batches = int((deadlines_s.max() - arrived_s.min()) / self.batch_s)
        # A request longer than a row takes a whole row.
        used = np.minimum(shortest, self.row_tokens)
        used_before = np.cumsum(used) - used
        parts = np.clip((self.rows * self.row_tokens * batches - used_before) / used, 0.0, 1.0)
        return float((parts / shortest).sum()) / self.planned_s
