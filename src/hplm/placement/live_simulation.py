"""Predicts how a placement answers requests if every stage has the live server's queue, policy, admission and batching.

`simulate` follows the paper: a group computes requests one by one, and refuses on arrival what would be late. A live stage has
a `RequestQueue`, which decides by rules of its own. With policy `fcfs`, known times, batches of one request and one tenant,
groups of one stage answer as in `simulate`. So do pipelines in which every model takes the same time in every stage. Otherwise
the answers differ:

- A stage knows how long the later stages take for a request. It does not know which requests wait there. So it computes
  some requests that a later, slower stage refuses. With tight deadlines this costs most: at 1.2 times the latency, 0.73 of
  the requests were in time instead of 0.79 (eight BERT-1.3B on two groups of four stages, load 0.9).
- A learned cost model refuses earlier, because it leaves room for batches that take longer than usual.
- With several tenants or larger batches, a request that would be late behind at most two batches may wait. It is refused at
  its turn. Until then it counts in the length of its group's queue, and a later request may go to another group.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from hplm.errors import ConfigError
from hplm.placement.outcomes import REFUSED, ROUNDING_S, Outcomes
from hplm.placement.placement import Group, Placement
from hplm.placement.stage_times import StageTimes
from hplm.scheduling.cost import CostModel
from hplm.scheduling.known_cost import KnownCost
from hplm.scheduling.policies import Fcfs
from hplm.scheduling.policy import Batch, Budget, Policy, Waiting
from hplm.scheduling.queue import RefusedRequest, RequestQueue
from hplm.workloads.model_requests import ModelRequests

# Tokens of a second of computing if nothing else is set: about a nanosecond each. A power of two, so that it rounds nothing.
TOKENS_PER_S = 2.0**30
# A batch of one request, however long.
ONE_REQUEST = Budget(rows=1, row_tokens=2**62, max_requests=1, max_tenants=1)


def known_cost() -> KnownCost:
    """Return a cost model that knows the times of requests with `TOKENS_PER_S` tokens a second."""
    return KnownCost(1 / TOKENS_PER_S)


@dataclass(frozen=True)
class LiveQueues:
    """The settings of every stage's queue, see `RequestQueue`. By default a stage computes one request at a time, in order.

    A request has as many tokens in a stage as it takes seconds there, times `tokens_per_s`. `cost` makes the cost model of a
    stage. The default knows the times; the live server's `CostModel` learns them. Requests belong to one tenant, or with
    `tenant_of_model` to the tenant of their model, so that models get fair shares.
    """

    policy: Policy = field(default_factory=Fcfs)
    budget: Budget = ONE_REQUEST
    cost: Callable[[], CostModel] = known_cost
    tokens_per_s: float = TOKENS_PER_S
    capacity: int = 4096
    weights: Mapping[str, float] = field(default_factory=dict)
    starve_after_s: float = 2.0
    tenant_of_model: Mapping[str, str] = field(default_factory=dict)

    def open(self) -> RequestQueue:
        """Return an empty queue."""
        return RequestQueue(
            self.policy,
            self.budget,
            self.cost(),
            capacity=self.capacity,
            weights=self.weights,
            starve_after_s=self.starve_after_s,
        )


class _Stage:
    """A stage of a group: its queue, and the batch that it computes."""

    def __init__(self, queue: RequestQueue) -> None:
        self.queue = queue
        self.batch: Batch | None = None
        self.began_s = self.ends_s = 0.0


@dataclass(frozen=True)
class _Work:
    """A model in a group: the seconds and the tokens of each stage for one request, `[stages]`."""

    seconds: tuple[float, ...]
    tokens: tuple[int, ...]


class _LiveGroup:
    """A group whose stages have live queues."""

    def __init__(self, group: Group, queues: LiveQueues, models: dict[str, tuple[float, ...]]) -> None:
        self.group = group
        self.stages = [_Stage(queues.open()) for _ in range(group.config.stages)]
        self.work = {
            name: _Work(seconds, tuple(max(1, round(second * queues.tokens_per_s)) for second in seconds))
            for name, seconds in models.items()
        }

    def waiting(self, request: Waiting, name: str, stage: int) -> Waiting:
        """Return a request as it waits for a stage. Its deadline leaves the later stages their time."""
        work = self.work[name]
        later_s = sum(
            self.stages[later].queue.cost.bound(work.tokens[later], work.tokens[later] ** 2)
            for later in range(stage + 1, len(self.stages))
        )
        return Waiting(request.id, request.tenant, work.tokens[stage], request.arrived_s, request.deadline_s - later_s)

    def first_free_s(self, names: Callable[[int], str]) -> float:
        """Return when the first stage would have computed all that waits there, one by one."""
        first = self.stages[0]
        free_s = first.ends_s
        for request in first.queue.snapshot():
            free_s += self.work[names(request.id)].seconds[0]
        return free_s


class _Simulation:
    """The events of one simulation: ends of batches, and arrivals."""

    def __init__(self, placement: Placement, stage_times: StageTimes, requests: ModelRequests, queues: LiveQueues):
        self._stage_times = stage_times
        self._requests = requests
        self._groups = [
            _LiveGroup(group, queues, {name: _seconds(stage_times, name, number, group) for name in names})
            for number, (group, names) in enumerate(zip(placement.groups, placement.models, strict=True))
        ]
        self._of_model = [placement.groups_of(name) for name in requests.names]
        self._tenants = [queues.tenant_of_model.get(name, "") for name in requests.names]
        self._requests_by_id: dict[int, Waiting] = {}
        # Ends of batches: time, a number that keeps the order of equal times, group, stage.
        self._ends: list[tuple[float, int, int, int]] = []
        self._numbers = itertools.count()
        self._ended_s = np.full(len(requests), np.nan)
        self._taken_by = np.full(len(requests), REFUSED, np.int32)
        self._busy_s = np.zeros(stage_times.cluster.devices)

    def run(self) -> Outcomes:
        deadlines_s = (self._requests.times_s + (self._requests.deadlines_s + ROUNDING_S)).tolist()
        for request, now_s in enumerate(self._requests.times_s.tolist()):
            self._run_until(now_s)
            model = int(self._requests.models[request])
            if self._of_model[model]:
                arrived = Waiting(request, self._tenants[model], 1, now_s, deadlines_s[request])
                self._requests_by_id[request] = arrived
                group = self._shortest_queue(self._of_model[model])
                self._taken_by[request] = group
                self._offer(group, 0, arrived, now_s)
        self._run_until(float("inf"))
        return Outcomes(self._requests, self._ended_s, self._taken_by, self._busy_s)

    def _name_of(self, request: int) -> str:
        return self._requests.names[self._requests.models[request]]

    def _shortest_queue(self, numbers: tuple[int, ...]) -> int:
        lengths = [len(self._groups[number].stages[0].queue) for number in numbers]
        shortest = [number for number, length in zip(numbers, lengths, strict=True) if length == min(lengths)]
        if len(shortest) == 1:
            return shortest[0]
        return min(shortest, key=lambda number: (self._groups[number].first_free_s(self._name_of), number))

    def _offer(self, number: int, stage: int, request: Waiting, now_s: float) -> None:
        group = self._groups[number]
        waiting = group.waiting(request, self._name_of(request.id), stage)
        self._refuse(group.stages[stage].queue.offer(waiting, now_s))
        self._begin(number, stage, now_s)

    def _begin(self, number: int, stage: int, now_s: float) -> None:
        """Start the next batch of a stage, unless the stage computes or no request waits."""
        group = self._groups[number]
        state = group.stages[stage]
        if state.batch is not None or not len(state.queue):
            return
        taken = state.queue.take(now_s)
        self._refuse(taken.refused)
        if taken.policy_failure is not None:
            raise taken.policy_failure
        if taken.batch is not None:
            seconds = self._batch_seconds(group, stage, taken.batch)
            state.batch, state.began_s, state.ends_s = taken.batch, now_s, now_s + seconds
            self._busy_s[list(group.group.stage_devices(stage))] += seconds
            heapq.heappush(self._ends, (state.ends_s, next(self._numbers), number, stage))

    def _batch_seconds(self, group: _LiveGroup, stage: int, batch: Batch) -> float:
        """Return the seconds of a batch. Requests of different models are computed apart."""
        counts = Counter(self._name_of(request.id) for request in batch.requests)
        seconds = 0.0
        for name, count in counts.items():
            times = self._stage_times.model(name).batch_times
            whole, rest = divmod(count, len(times))
            seconds += group.work[name].seconds[stage] * (whole * times[-1] + (times[rest - 1] if rest else 0.0))
        return seconds

    def _run_until(self, now_s: float) -> None:
        while self._ends and self._ends[0][0] <= now_s:
            end_s, _, number, stage = heapq.heappop(self._ends)
            group = self._groups[number]
            state, batch = group.stages[stage], group.stages[stage].batch
            assert batch is not None
            state.queue.done(end_s - state.began_s)
            state.batch = None
            for waiting in batch.requests:
                if stage + 1 < len(group.stages):
                    self._offer(number, stage + 1, self._requests_by_id[waiting.id], end_s)
                else:
                    self._ended_s[waiting.id] = end_s
                    del self._requests_by_id[waiting.id]
            self._begin(number, stage, end_s)

    def _refuse(self, refused: list[RefusedRequest] | tuple[RefusedRequest, ...]) -> None:
        for one in refused:
            self._taken_by[one.request.id] = REFUSED
            del self._requests_by_id[one.request.id]


def simulate_live(
    placement: Placement, stage_times: StageTimes, requests: ModelRequests, queues: LiveQueues | None = None
) -> Outcomes:
    """Return how each request ends if the stages have live queues, by default first come, first served, one at a time.

    Raises ConfigError if a group cannot divide one of its models.
    """
    return _Simulation(placement, stage_times, requests, queues or LiveQueues()).run()


def _seconds(stage_times: StageTimes, name: str, number: int, group: Group) -> tuple[float, ...]:
    seconds = stage_times.of(name, group.config)
    if seconds is None:
        raise ConfigError(f"group {number} of configuration {group.config} cannot divide the model {name}")
    return seconds
