"""Simulates a server: requests go through the live queue, and a formula says how long a batch takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from hplm.scheduling.policy import Batch, Waiting
from hplm.scheduling.queue import RequestQueue


@dataclass(frozen=True)
class Outcome:
    """How a request ended: answered or refused at `ended_s`."""

    request: Waiting
    ended_s: float
    kind: Literal["answered", "full", "deadline"]

    @property
    def in_time(self) -> bool:
        return self.kind == "answered" and self.ended_s <= self.request.deadline_s


def simulate(arrivals: Sequence[Waiting], queue: RequestQueue, service_s: Callable[[Batch], float]) -> list[Outcome]:
    """Run until all requests are answered or refused. `arrivals` are in the order of arrival."""
    outcomes: list[Outcome] = []
    now_s = 0.0
    next_arrival = 0
    while next_arrival < len(arrivals) or len(queue):
        if not len(queue):
            now_s = max(now_s, arrivals[next_arrival].arrived_s)
        next_arrival = _arrive(arrivals, next_arrival, now_s, queue, outcomes)
        taken = queue.take(now_s)
        outcomes += [Outcome(one.request, now_s, one.reason) for one in taken.refused]
        if taken.batch is None:
            continue
        end_s = now_s + service_s(taken.batch)
        next_arrival = _arrive(arrivals, next_arrival, end_s, queue, outcomes)
        queue.done(end_s - now_s)
        outcomes += [Outcome(request, end_s, "answered") for request in taken.batch.requests]
        now_s = end_s
    return outcomes


def _arrive(
    arrivals: Sequence[Waiting], first: int, until_s: float, queue: RequestQueue, outcomes: list[Outcome]
) -> int:
    while first < len(arrivals) and arrivals[first].arrived_s <= until_s:
        request = arrivals[first]
        outcomes += [
            Outcome(one.request, request.arrived_s, one.reason) for one in queue.offer(request, request.arrived_s)
        ]
        first += 1
    return first
