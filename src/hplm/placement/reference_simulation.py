"""The slow and obvious twin of `simulate`: one event after another, as the runtime of AlpaServe 4.3 works."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass

import numpy as np

from hplm.placement.outcomes import REFUSED, ROUNDING_S, Outcomes
from hplm.placement.placement import Group, Placement
from hplm.placement.stage_times import StageTimes
from hplm.workloads.model_requests import ModelRequests


@dataclass
class _Running:
    request: int
    seconds: tuple[float, ...]
    ends_s: float


class _GroupState:
    """A group: the requests that wait for each stage, first come, first served, and the request that each stage computes."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.waiting: list[deque[tuple[int, tuple[float, ...]]]] = [deque() for _ in range(group.config.stages)]
        self.running: list[_Running | None] = [None] * group.config.stages
        # When each stage ended its last request, 0 before the first. Only ties between groups need it.
        self.ended_s = [0.0] * group.config.stages

    @property
    def queue_length(self) -> int:
        """The number of requests whose first stage has not started."""
        return len(self.waiting[0])

    def finishes(self, new: tuple[float, ...], now_s: float) -> tuple[float, float]:
        """Return when the first stage would be free of all requests so far, and when a new request would end."""
        stages = len(self.running)
        free_s = [
            self.ended_s[stage] if running is None else running.ends_s for stage, running in enumerate(self.running)
        ]
        # Those farther down the pipeline came first. Each is followed through its remaining stages.
        for stage in reversed(range(stages)):
            for _, seconds in self.waiting[stage]:
                _follow(free_s, seconds, stage, now_s)
            if stage and (before := self.running[stage - 1]) is not None:
                _follow(free_s, before.seconds, stage, before.ends_s)
        first_free_s = free_s[0]
        return first_free_s, _follow(free_s, new, 0, now_s)


def _follow(free_s: list[float], seconds: tuple[float, ...], first_stage: int, ready_s: float) -> float:
    """Follow a request through stages from `first_stage` on, and note when each is free again. Return when it ends."""
    for stage in range(first_stage, len(free_s)):
        ready_s = max(ready_s, free_s[stage]) + seconds[stage]
        free_s[stage] = ready_s
    return ready_s


def simulate_by_events(placement: Placement, stage_times: StageTimes, requests: ModelRequests) -> Outcomes:
    """Return how each request ends. See `simulate`, which returns the same much sooner."""
    groups = [_GroupState(group) for group in placement.groups]
    of_model = [placement.groups_of(name) for name in requests.names]
    ended_s = np.full(len(requests), np.nan)
    taken_by = np.full(len(requests), REFUSED, np.int32)
    busy_s = np.zeros(stage_times.cluster.devices)
    # Ends of stages: time, a number that keeps the order of equal times, group, stage.
    ends: list[tuple[float, int, int, int]] = []
    numbers = itertools.count()

    def begin(number: int, stage: int, now_s: float) -> None:
        """Start the next waiting request of a stage, unless the stage computes or no request waits."""
        state = groups[number]
        if state.running[stage] is None and state.waiting[stage]:
            request, seconds = state.waiting[stage].popleft()
            ends_s = now_s + seconds[stage]
            state.running[stage] = _Running(request, seconds, ends_s)
            heapq.heappush(ends, (ends_s, next(numbers), number, stage))
            for device in state.group.stage_devices(stage):
                busy_s[device] += seconds[stage]

    def run_until(now_s: float) -> None:
        while ends and ends[0][0] <= now_s:
            end_s, _, number, stage = heapq.heappop(ends)
            state = groups[number]
            done = state.running[stage]
            assert done is not None
            state.running[stage], state.ended_s[stage] = None, end_s
            if stage + 1 < len(state.running):
                state.waiting[stage + 1].append((done.request, done.seconds))
                begin(number, stage + 1, end_s)
            else:
                ended_s[done.request] = end_s
            begin(number, stage, end_s)

    for request, now_s in enumerate(requests.times_s.tolist()):
        run_until(now_s)
        name = requests.names[requests.models[request]]
        choices = []
        for number in of_model[requests.models[request]]:
            seconds = stage_times.of(name, groups[number].group.config)
            assert seconds is not None, f"group {number} cannot divide {name}"
            first_free_s, end_s = groups[number].finishes(seconds, now_s)
            choices.append((groups[number].queue_length, first_free_s, number, end_s, seconds))
        if not choices:
            continue
        _, _, number, end_s, seconds = min(choices)
        if end_s <= now_s + (requests.deadlines_s[request] + ROUNDING_S):
            groups[number].waiting[0].append((request, seconds))
            taken_by[request] = number
            begin(number, 0, now_s)
    run_until(float("inf"))
    return Outcomes(requests, ended_s, taken_by, busy_s)
