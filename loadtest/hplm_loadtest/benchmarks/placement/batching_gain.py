"""Fig. 15: what batches of several requests gain for large models, whose small batches fill a GPU already (AlpaServe 6.5).

The stages have live queues. A batch holds requests of one model. A batch of n requests of Table 1's models takes about 5 % less
than n times the time of one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hplm.placement.live_simulation import LiveQueues, simulate_live
from hplm.placement.placement import Placement
from hplm.placement.search.baselines import selective_replication
from hplm.placement.search.enumeration import search
from hplm.placement.stage_times import StageTimes
from hplm.placement.table1 import model_set, table1_cluster
from hplm.scheduling.policy import Budget
from hplm.workloads.model_requests import ModelRequests
from hplm_loadtest.benchmarks.placement.figure import Chart, Effort, FigureResult, Statement
from hplm_loadtest.benchmarks.placement.systems import (
    CLOCKWORK,
    DEVICE_BYTES,
    SEARCHED,
    WINDOW_S,
    Asked,
    Traffic,
    options_for,
)

# Requests/s of each of the 32 models, and the cv.
RATE_PER_S, CV = 4.0, 4.0
DEVICES = 48
SECONDS, QUICK_SECONDS = 120.0, 30.0
SCALES = (1.0, 1.5, 2.0, 4.0, 8.0, 12.0)
BATCHES = (1, 2, 4, 8)
# Below this scale the paper says that batches cannot help.
TIGHT = 2.0


@dataclass(frozen=True)
class _Point:
    """A workload, and the largest batches to compare."""

    asked: Asked
    batches: Sequence[int]


def _queues(names: Sequence[str], batch: int) -> LiveQueues:
    budget = Budget(rows=1, row_tokens=2**62, max_requests=batch, max_tenants=1)
    # A tenant of a model each, so that a batch has one model.
    return LiveQueues(budget=budget, tenant_of_model={name: name for name in names})


def _attained(point: _Point) -> dict[str, float]:
    asked = point.asked
    models = model_set(asked.traffic.models)
    cluster = table1_cluster(asked.devices, DEVICE_BYTES)
    times, options = StageTimes(cluster, models), options_for(models, asked.quick)
    requests = asked.traffic.requests(np.random.default_rng(asked.seed))
    searched = search(models, cluster, requests, options, stage_times=times).placement
    windows = []
    for start_s in np.arange(0.0, requests.duration_s, WINDOW_S):
        inside = requests.where((requests.times_s >= start_s) & (requests.times_s < start_s + WINDOW_S))
        window = replace(
            inside, times_s=inside.times_s - start_s, duration_s=min(WINDOW_S, requests.duration_s - start_s)
        )
        placement = selective_replication(models, cluster, window, options, stage_times=times).placement
        windows.append((placement, window))

    def in_time(placed: Sequence[tuple[Placement, ModelRequests]], batch: int) -> float:
        queues = _queues(requests.names, batch)
        done = sum(int(simulate_live(each, times, own, queues).in_time.sum()) for each, own in placed)
        return done / len(requests)

    return {
        **{f"{SEARCHED}, mb={batch}": in_time([(searched, requests)], batch) for batch in point.batches},
        **{f"{CLOCKWORK}, mb={batch}": in_time(windows, batch) for batch in (1, 2)},
    }


def batching_gain(effort: Effort) -> FigureResult:
    """Vary the deadline and the largest batch."""
    x = effort.points(SCALES)
    seconds = QUICK_SECONDS if effort.quick else SECONDS
    base = Traffic("S1", "gamma", 32 * RATE_PER_S, CV, 5.0, seconds)
    batches = BATCHES[:2] if effort.quick else BATCHES
    points = [
        _Point(Asked(replace(base, scale=scale), DEVICES, (effort.seed, 0), effort.quick), batches) for scale in x
    ]
    found = effort.each(_attained, points, "Fig. 15")
    curves = {name: [point[name] for point in found] for name in found[0]}
    one, two = (curves[f"{SEARCHED}, mb={batch}"] for batch in (1, 2))
    largest = curves[f"{SEARCHED}, mb={batches[-1]}"]
    clockwork_gain = [b - a for a, b in zip(curves[f"{CLOCKWORK}, mb=1"], curves[f"{CLOCKWORK}, mb=2"], strict=True)]
    gain = [b - a for a, b in zip(one, two, strict=True)]
    statements = [
        Statement(
            "with tight deadlines batches gain nothing",
            f"mb=2 minus mb=1 below {TIGHT:g} x latency: "
            + ", ".join(f"{each:+.3f}" for scale, each in zip(x, gain, strict=True) if scale < TIGHT),
            all(abs(each) < 0.01 for scale, each in zip(x, gain, strict=True) if scale < TIGHT),
        ),
        Statement(
            "batches of more than two gain nothing more",
            f"mb={batches[-1]} minus mb=2: at most {max(b - a for a, b in zip(two, largest, strict=True)):+.3f}",
            max(b - a for a, b in zip(two, largest, strict=True)) < 0.01,
        ),
        Statement(
            "with loose deadlines batches gain a little, Clockwork++ slightly more than the search",
            f"at {x[-1]:g} x latency {gain[-1]:+.3f}, Clockwork++ {clockwork_gain[-1]:+.3f}",
            -0.001 <= gain[-1] < 0.1 and clockwork_gain[-1] >= gain[-1] - 0.001,
        ),
    ]
    chart = Chart("S1", "deadline / latency", "share in time", x, curves)
    return FigureResult("15", "attainment with batches", statements, [chart])
