"""Fig. 14: attainment if the requests differ from those that a placement was made for (AlpaServe 6.4).

The paper takes two random hours of one trace. Here other models are popular in the requests that come than in those that the
search knew, and the arrivals are drawn anew. Clockwork++ knows the requests that come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hplm.placement.search.baselines import clockwork, selective_replication
from hplm.placement.search.enumeration import search
from hplm.placement.simulation import simulate
from hplm.placement.stage_times import StageTimes
from hplm.placement.table1 import model_set, table1_cluster
from hplm_loadtest.benchmarks.placement.figure import Chart, Effort, FigureResult, Statement
from hplm_loadtest.benchmarks.placement.systems import (
    CLOCKWORK,
    DEVICE_BYTES,
    REPLICATED,
    SEARCHED,
    WINDOW_S,
    Asked,
    Traffic,
    Variable,
    options_for,
)

SECONDS = 600.0
REPEATS = 3
DEVICES = 64
VARIABLES: dict[Variable, Sequence[float]] = {
    "rate": (10.0, 20.0, 40.0, 60.0, 80.0, 120.0),
    "cv": (1, 2, 4, 6, 8, 12),
    "deadline scale": (1.0, 2.0, 3.0, 5.0, 7.5, 10.0),
}
KNOWN = f"{REPLICATED}, requests known"


@dataclass(frozen=True)
class _Pair:
    """The requests that placements are made for, and the requests that come."""

    assumed: Asked
    actual: Asked


def _attained(pair: _Pair) -> dict[str, float]:
    models = model_set(pair.actual.traffic.models)
    cluster = table1_cluster(pair.actual.devices, DEVICE_BYTES)
    times, options = StageTimes(cluster, models), options_for(models, pair.actual.quick)
    assumed = pair.assumed.traffic.requests(np.random.default_rng(pair.assumed.seed))
    actual = pair.actual.traffic.requests(np.random.default_rng(pair.actual.seed))
    searched = search(models, cluster, assumed, options, stage_times=times)
    replicated = selective_replication(models, cluster, assumed, options, stage_times=times)
    return {
        SEARCHED: simulate(searched.placement, times, actual).attainment,
        REPLICATED: simulate(replicated.placement, times, actual).attainment,
        CLOCKWORK: clockwork(models, cluster, actual, WINDOW_S, options, stage_times=times).attainment,
        KNOWN: selective_replication(models, cluster, actual, options, stage_times=times).attainment,
    }


def robustness(effort: Effort) -> FigureResult:
    """Vary rate, cv and deadline of the requests that are assumed and of those that come."""
    base = Traffic("S2", "skewed", 40.0, 4.0, 5.0, SECONDS * (0.3 if effort.quick else 1.0), effort.trace)
    repeats = 1 if effort.quick else REPEATS
    cells = [(variable, effort.points(values)) for variable, values in VARIABLES.items()]
    pairs = []
    for variable, x in cells:
        for value in x:
            traffic = base.with_value(variable, value)
            for repeat in range(repeats):
                known, came = replace(traffic, ranking=2 * repeat), replace(traffic, ranking=2 * repeat + 1)
                pairs.append(
                    _Pair(
                        Asked(known, DEVICES, (effort.seed, 2 * repeat), effort.quick),
                        Asked(came, DEVICES, (effort.seed, 2 * repeat + 1), effort.quick),
                    )
                )
    found = iter(effort.each(_attained, pairs, "Fig. 14"))
    charts, behind, lost, all_points = [], 0.0, [], []
    for variable, x in cells:
        points = []
        for _ in x:
            repeated = [next(found) for _ in range(repeats)]
            points.append({name: float(np.mean([each[name] for each in repeated])) for name in repeated[0]})
        curves = {name: [point[name] for point in points] for name in points[0]}
        charts.append(Chart(f"{base.models}, other models are popular", variable, "share in time", x, curves))
        behind = max(behind, *(point[CLOCKWORK] - point[SEARCHED] for point in points))
        lost += [point[KNOWN] - point[REPLICATED] for point in points]
        all_points += points
    mean = {name: float(np.mean([point[name] for point in all_points])) for name in all_points[0]}
    statements = [
        Statement(
            "if the requests change, selective replication attains clearly less",
            f"{mean[REPLICATED]:.3f} on average; {mean[KNOWN]:.3f} if it knew the requests",
            mean[KNOWN] - mean[REPLICATED] > 0.01,
        ),
        Statement(
            "a static placement of the search still attains more than Clockwork++, which knows the requests",
            f"{mean[SEARCHED]:.3f} on average, Clockwork++ {mean[CLOCKWORK]:.3f}; behind it by at most {max(0.0, behind):.3f}",
            mean[SEARCHED] > mean[CLOCKWORK],
        ),
    ]
    return FigureResult("14", "attainment after the requests have changed", statements, charts)
