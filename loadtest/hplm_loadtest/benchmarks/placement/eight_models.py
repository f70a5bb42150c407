"""Figs 4 to 7: eight models on eight devices, replicated or as pipelines (AlpaServe 3.2 and 3.3).

The paper says that each model gets 20 requests/s, which is five times what the devices can compute. We take 20 requests/s for
all models together, 60 % of what eight devices can compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hplm.placement.outcomes import Outcomes
from hplm.placement.placement import Group, ParallelConfig, Placement
from hplm.placement.served_model import ServedModel
from hplm.placement.simulation import simulate
from hplm.placement.stage_times import StageTimes
from hplm.placement.table1 import table1_cluster, table1_model
from hplm.workloads.model_requests import ModelRequests
from hplm.workloads.model_traffic import gamma_requests
from hplm_loadtest.benchmarks.placement.figure import Chart, Effort, FigureResult, Statement, first_reaching

DEVICES = 8
NAMES = tuple(f"model-{number}" for number in range(1, DEVICES + 1))
RATE_PER_S, CV = 20.0, 3.0
SECONDS = 20_000.0
# Memory of a device as multiples of a model's size.
BUDGETS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
RATES = (4.0, 8.0, 12.0, 18.0, 24.0, 27.0)
CVS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
SCALES = (1.5, 2.5, 5.0, 10.0, 20.0, 40.0)
OVERHEADS = (1.0, 1.1, 1.2, 1.3, 1.5)
# Models that a device of 13 GB holds.
HELD = 2
REPLICATION, PIPELINE = "replication", "model parallelism"

Pair = Mapping[str, Outcomes]


def replication(held: int) -> Placement:
    """Return a placement in which each device holds `held` models, and each model has as many replicas."""
    groups = tuple(Group((device,), ParallelConfig()) for device in range(DEVICES))
    models = tuple(tuple(sorted(NAMES[(device + i) % DEVICES] for i in range(held))) for device in range(DEVICES))
    return Placement(groups, models)


def pipelines(stages: int) -> Placement:
    """Return groups of `stages` devices that each hold all models."""
    groups = tuple(
        Group(tuple(range(first, first + stages)), ParallelConfig(stages)) for first in range(0, DEVICES, stages)
    )
    return Placement(groups, (NAMES,) * len(groups))


def fewest_stages(budget: float) -> int:
    """Return the stages of the shortest pipelines in which each group holds all models."""
    return next(stages for stages in (1, 2, 4, 8) if stages * budget >= DEVICES)


def _models() -> list[ServedModel]:
    return [table1_model("BERT-2.7B", name) for name in NAMES]


def _requests(effort: Effort, rate_per_s: float, cv: float, deadline_s: float = math.inf) -> ModelRequests:
    rates = dict.fromkeys(NAMES, rate_per_s / DEVICES)
    return gamma_requests(rates, cv, dict.fromkeys(NAMES, deadline_s), effort.scale * SECONDS, effort.rng())


def _pair(requests: ModelRequests, held: int, stages: int) -> Pair:
    times = StageTimes(table1_cluster(DEVICES), _models())
    return {
        REPLICATION: simulate(replication(held), times, requests),
        PIPELINE: simulate(pipelines(stages), times, requests),
    }


def _latency_charts(x_label: str, x: Sequence[float], pairs: Sequence[Pair]) -> list[Chart]:
    def curves(of: Callable[[Outcomes], float]) -> dict[str, list[float]]:
        return {name: [of(pair[name]) for pair in pairs] for name in (REPLICATION, PIPELINE)}

    return [
        Chart("mean", x_label, "latency (s)", x, curves(lambda outcomes: float(outcomes.latencies_s.mean()))),
        Chart(
            "P99", x_label, "latency (s)", x, curves(lambda outcomes: float(np.quantile(outcomes.latencies_s, 0.99)))
        ),
    ]


def _gains(chart: Chart) -> list[float]:
    """Return replication's value divided by that of model parallelism, at each point."""
    return [one / other for one, other in zip(chart.curves[REPLICATION], chart.curves[PIPELINE], strict=True)]


def _shown(x: Sequence[float], values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f} at {at:g}" for at, value in zip(x, values, strict=True))


def memory_budget(effort: Effort) -> FigureResult:
    """Fig. 4: latency by the memory of a device."""
    x = BUDGETS
    requests = _requests(effort, RATE_PER_S, CV)
    charts = _latency_charts(
        "models that fit a device", x, [_pair(requests, int(each), fewest_stages(each)) for each in x]
    )
    gains = _gains(charts[0])
    statements = [
        Statement(
            "model parallelism has the lower latency if memory is limited",
            f"mean of replication / mean of model parallelism: {_shown(x, gains)}",
            gains[0] > 1 and max(gains) == gains[0],
        ),
        Statement(
            "if a device holds all models, model parallelism gains nothing",
            f"ratio {gains[-1]:.2f} at {x[-1]:g} models",
            abs(gains[-1] - 1) < 0.01,
        ),
    ]
    return FigureResult("4", "latency by memory of a device", statements, charts)


def arrival_rate(effort: Effort) -> FigureResult:
    """Fig. 5: latency by the rate of requests. Pipelines have eight stages."""
    x = RATES
    charts = _latency_charts("requests/s", x, [_pair(_requests(effort, rate, CV), HELD, DEVICES) for rate in x])
    gains = _gains(charts[0])
    statements = [
        Statement(
            "at a low rate, model parallelism greatly reduces latency; near saturation it is worse than replication",
            f"mean of replication / mean of model parallelism: {_shown(x, gains)}",
            max(gains) > 1 and gains[-1] < 1,
        )
    ]
    return FigureResult("5", "latency by rate", statements, charts)


def burstiness(effort: Effort) -> FigureResult:
    """Fig. 6: latency by the cv of the gaps between requests. Pipelines have eight stages."""
    x = CVS
    charts = _latency_charts("cv", x, [_pair(_requests(effort, RATE_PER_S, cv), HELD, DEVICES) for cv in x])
    gains = _gains(charts[0])
    statements = [
        Statement(
            "the more bursty the requests, the larger is the gain of model parallelism",
            f"mean of replication / mean of model parallelism: {_shown(x, gains)}",
            gains == sorted(gains) and gains[-1] > 1,
        )
    ]
    return FigureResult("6", "latency by burstiness", statements, charts)


def deadline_scale(effort: Effort) -> FigureResult:
    """Fig. 7: attainment by the deadline, with the real latencies (a) and with a chosen overhead of pipelines (b)."""
    x = SCALES
    latency_s = _models()[0].latency_s
    asked = [_requests(effort, RATE_PER_S, CV, scale * latency_s) for scale in x]
    pairs = [_pair(requests, HELD, DEVICES) for requests in asked]
    real = {name: [pair[name].attainment for pair in pairs] for name in (REPLICATION, PIPELINE)}
    with_overhead: dict[str, list[float]] = {REPLICATION: real[REPLICATION]}
    for overhead in OVERHEADS:
        # Stages of equal length whose sum is `overhead` times the latency on one device.
        even = (overhead * latency_s / DEVICES,) * DEVICES
        models = [
            replace(model, layer_s=even, layer_bytes=(1,) * DEVICES, hop_s=0, boundary_bytes=0) for model in _models()
        ]
        times = StageTimes(table1_cluster(DEVICES), models)
        with_overhead[f"overhead {overhead:g}"] = [
            simulate(pipelines(DEVICES), times, requests).attainment for requests in asked
        ]
    ahead = [one - other for one, other in zip(real[PIPELINE], real[REPLICATION], strict=True)]
    free = with_overhead["overhead 1"]
    dear = with_overhead[f"overhead {OVERHEADS[-1]:g}"]
    statements = [
        Statement(
            "a: with tight deadlines (below 10 x latency) model parallelism attains more; with loose ones it no longer does",
            f"attainment of model parallelism minus that of replication: {_shown(x, ahead)}",
            all(each > 0 for scale, each in zip(x, ahead, strict=True) if 1.5 < scale < 10) and ahead[-1] <= 0,
        ),
        Statement(
            "b: without overhead, model parallelism always attains more",
            f"least difference {min(one - other for one, other in zip(free, real[REPLICATION], strict=True)):.3f}",
            all(one >= other for one, other in zip(free, real[REPLICATION], strict=True)),
        ),
        Statement(
            "b: with a large overhead, model parallelism attains more only if deadlines are tight",
            f"overhead {OVERHEADS[-1]:g} minus replication: "
            + _shown(x, [one - other for one, other in zip(dear, real[REPLICATION], strict=True)]),
            any(one > other for one, other in zip(dear, real[REPLICATION], strict=True))
            and dear[-1] < real[REPLICATION][-1],
        ),
    ]
    charts = [
        Chart("a: real latencies", "deadline / latency", "share in time", x, real),
        Chart("b: chosen overhead", "deadline / latency", "share in time", x, with_overhead),
    ]
    numbers = {}
    if (overtakes := first_reaching(x, [-each for each in ahead], 0.0)) is not None:
        numbers["scale from which replication attains more"] = overtakes
    return FigureResult("7", "attainment by deadline", statements, charts, numbers=numbers)
