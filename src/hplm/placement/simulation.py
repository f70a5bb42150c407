"""Predicts how a placement answers requests (AlpaServe 4.3 and 5): the model that the placement search runs.

Each request goes to the group with the shortest queue among the groups that hold its model. The queue of a group has the
requests that have not begun their first stage. Of groups with equally short queues, the request goes to that whose first stage
is free earliest, then to the first. A group serves first come, first served. It refuses a request on arrival if the request
would miss its deadline. A request whose model no group holds is refused.
"""

from __future__ import annotations

import numpy as np

from hplm.errors import ConfigError
from hplm.placement.outcomes import ROUNDING_S, Outcomes
from hplm.placement.placement import Placement
from hplm.placement.stage_times import StageTimes
from hplm.workloads.model_requests import ModelRequests


def simulate(placement: Placement, stage_times: StageTimes, requests: ModelRequests) -> Outcomes:
    """Return how each request ends. Compiled: a million requests take about a tenth of a second.

    Raises ConfigError if numba is missing, or if a group cannot divide one of its models.
    """
    try:
        from hplm.placement.compiled_simulation import run
    except ImportError as error:
        raise ConfigError(f"the simulation needs numba ({error}): pip install 'hplm[place]'") from error
    groups, models = len(placement.groups), len(requests.names)
    number_of = {name: number for number, name in enumerate(requests.names)}
    stages_of = np.array([group.config.stages for group in placement.groups], np.int32)
    stage_s = np.zeros((groups, models, max(stages_of, default=1)))
    holders: list[list[int]] = [[] for _ in range(models)]
    for number, (group, names) in enumerate(zip(placement.groups, placement.models, strict=True)):
        for name in names:
            if (model := number_of.get(name)) is None:
                continue
            seconds = stage_times.of(name, group.config)
            if seconds is None:
                raise ConfigError(f"group {number} of configuration {group.config} cannot divide the model {name}")
            stage_s[number, model, : len(seconds)] = seconds
            holders[model].append(number)
    first_holder = np.cumsum([0, *map(len, holders)]).astype(np.int32)
    ended_s, taken_by, stage_busy_s = run(
        requests.times_s,
        requests.models,
        requests.deadlines_s + ROUNDING_S,
        stage_s,
        stages_of,
        first_holder,
        np.array([number for of_model in holders for number in of_model], np.int32),
    )
    busy_s = np.zeros(stage_times.cluster.devices)
    for number, group in enumerate(placement.groups):
        for stage in range(group.config.stages):
            busy_s[list(group.stage_devices(stage))] += stage_busy_s[number, stage]
    return Outcomes(requests, ended_s, taken_by, busy_s)
