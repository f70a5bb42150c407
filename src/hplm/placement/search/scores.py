"""The score of a placement: the simulator decides which of two placements is better."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hplm.placement.outcomes import Outcomes
from hplm.placement.placement import Placement
from hplm.placement.simulation import simulate
from hplm.placement.stage_times import StageTimes
from hplm.workloads.model_requests import ModelRequests


@dataclass(frozen=True, order=True)
class Score:
    """The quality of a placement. Of two scores the greater is better, compared field by field.

    copies: the copies of models that were required and exist. 0 if none were required.
    attainment: the share of requests that were answered in time.
    slack: the mean share of the deadline that was left when a request was answered; 0 for a request that was not in time.
    """

    copies: int
    attainment: float
    slack: float


def score_of(outcomes: Outcomes, copies: int = 0) -> Score:
    """Return the score of simulated outcomes."""
    requests = outcomes.requests
    if not len(requests):
        return Score(copies, 1.0, 1.0)
    in_time = outcomes.in_time
    used = outcomes.latencies_s[in_time] / requests.deadlines_s[in_time]
    return Score(copies, outcomes.attainment, float(np.sum(1.0 - used)) / len(requests))


class Simulator:
    """Simulates placements under one workload, and counts the simulations."""

    def __init__(self, stage_times: StageTimes, requests: ModelRequests) -> None:
        self.stage_times = stage_times
        self.requests = requests
        self.simulations = 0

    def run(self, placement: Placement) -> Outcomes:
        """Simulate a placement."""
        self.simulations += 1
        return simulate(placement, self.stage_times, self.requests)


def in_windows(requests: ModelRequests, most: int, windows: int = 8) -> ModelRequests:
    """Return about `most` of the requests: `windows` equally spaced stretches of time, put end to end.

    Within a stretch every request is kept, so that rates and bursts stay as they are.
    """
    if len(requests) <= most:
        return requests
    share = most / len(requests)
    spacing_s = requests.duration_s / windows
    length_s = spacing_s * share
    window = np.minimum((requests.times_s / spacing_s).astype(np.int64), windows - 1)
    offset_s = requests.times_s - window * spacing_s
    kept = offset_s < length_s
    return ModelRequests(
        requests.names,
        (window * length_s + offset_s)[kept],
        requests.models[kept],
        requests.deadlines_s[kept],
        requests.duration_s * share,
    )
