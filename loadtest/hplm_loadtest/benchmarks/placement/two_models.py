"""Fig. 2: two models on two devices, each on its own device or both as a pipeline of two stages (AlpaServe 3.1)."""

from __future__ import annotations

import math

import numpy as np

from hplm.placement.outcomes import Outcomes
from hplm.placement.placement import Group, ParallelConfig, Placement
from hplm.placement.simulation import simulate
from hplm.placement.stage_times import StageTimes
from hplm.placement.table1 import table1_cluster, table1_model
from hplm.workloads.model_traffic import gamma_requests
from hplm_loadtest.benchmarks.placement.figure import Chart, Effort, FigureResult, Statement

NAMES = ("model-1", "model-2")
RATE_PER_S = 1.5
SKEWED = {"model-1": 0.2 * 2 * RATE_PER_S, "model-2": 0.8 * 2 * RATE_PER_S}
# Subfigure, requests a second of each model, cv, and the paper's ratio of mean latencies.
CASES = (
    ("a: Poisson", dict.fromkeys(NAMES, RATE_PER_S), 1.0, 1.3),
    ("b: Gamma cv 3", dict.fromkeys(NAMES, RATE_PER_S), 3.0, 1.9),
    ("c: Poisson, 20 % and 80 %", SKEWED, 1.0, 6.6),
)
SECONDS = 200_000.0
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


def two_models(effort: Effort) -> FigureResult:
    """Simulate both placements. A request has no deadline."""
    models = [table1_model("BERT-6.7B", name) for name in NAMES]
    times = StageTimes(table1_cluster(2), models)
    simple = Placement((Group((0,), ParallelConfig()), Group((1,), ParallelConfig())), (NAMES[:1], NAMES[1:]))
    pipeline = Placement((Group((0, 1), ParallelConfig(2)),), (NAMES,))
    statements, charts, rows, numbers = [], [], [], {}
    for number, (case, rates, cv, papers) in enumerate(CASES):
        requests = gamma_requests(rates, cv, dict.fromkeys(NAMES, math.inf), effort.scale * SECONDS, effort.rng(number))
        outcomes = {"simple": simulate(simple, times, requests), "pipeline": simulate(pipeline, times, requests)}
        means = {name: float(each.latencies_s.mean()) for name, each in outcomes.items()}
        ratio = means["simple"] / means["pipeline"]
        charts.append(
            Chart(
                case,
                "share of requests",
                "latency (s)",
                SHARES,
                {name: np.quantile(each.latencies_s, SHARES).tolist() for name, each in outcomes.items()},
            )
        )
        rows.append(
            {"case": case, "requests": len(requests), **{f"mean {name} (s)": mean for name, mean in means.items()}}
        )
        statements.append(
            Statement(
                f"{case}: model parallelism reduces the mean latency {papers} times",
                f"{means['simple']:.2f} s to {means['pipeline']:.2f} s: {ratio:.2f} times",
                ratio > 1,
            )
        )
        numbers[f"speed-up {case}"] = ratio
    of_model = _means_by_model(outcomes["pipeline"])
    statements.append(
        Statement(
            "c: with the pipeline, requests to both models have the same latency",
            f"means of {of_model[0]:.3f} s and {of_model[1]:.3f} s",
            abs(of_model[0] / of_model[1] - 1) < 0.05,
        )
    )
    speed_ups = list(numbers.values())
    statements.append(
        Statement(
            "the gain grows with burstiness and with skew",
            ", ".join(f"{each:.2f}" for each in speed_ups),
            speed_ups == sorted(speed_ups),
        )
    )
    return FigureResult("2", "latency of two models on two devices", statements, charts, rows, numbers)


def _means_by_model(outcomes: Outcomes) -> list[float]:
    models = outcomes.requests.models
    return [float(outcomes.latencies_s[models == number].mean()) for number in range(len(outcomes.requests.names))]
