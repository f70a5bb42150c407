"""Fig. 17: what the parts of the placement search are worth, on models of six sizes (AlpaServe 6.6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hplm.placement.search.baselines import greedy_alone, round_robin
from hplm.placement.search.enumeration import search
from hplm.placement.simulation import simulate
from hplm.placement.stage_times import StageTimes
from hplm.placement.table1 import model_set, table1_cluster
from hplm_loadtest.benchmarks.placement.figure import (
    TARGET,
    Chart,
    Effort,
    FigureResult,
    Statement,
    crossing,
    ratio_text,
)
from hplm_loadtest.benchmarks.placement.systems import DEVICE_BYTES, MOST_REQUESTS, Asked, Traffic, options_for

SECONDS = 300.0
DEVICES = 64
ROUND_ROBIN, GREEDY, WHOLE = "round robin", "greedy", "greedy and group partitioning"
RATES = (20.0, 40.0, 60.0, 80.0, 110.0, 140.0)
CVS = (1.0, 2.0, 4.0, 6.0, 8.0, 12.0)
# By how much more rate and cv group partitioning reaches 99 % in the paper.
PAPER_RATE, PAPER_CV = 1.5, 1.3


def _attained(asked: Asked) -> dict[str, float]:
    models = model_set(asked.traffic.models)
    cluster = table1_cluster(asked.devices, DEVICE_BYTES)
    times, options = StageTimes(cluster, models), options_for(models, asked.quick)
    requests = asked.traffic.requests(np.random.default_rng(asked.seed))
    alone = replace(options, refined=0, most_requests=MOST_REQUESTS)
    return {
        ROUND_ROBIN: simulate(round_robin(models, cluster, stage_times=times), times, requests).attainment,
        GREEDY: greedy_alone(models, cluster, requests, alone, stage_times=times).attainment,
        WHOLE: search(models, cluster, requests, options, stage_times=times).attainment,
    }


def ablation(effort: Effort) -> FigureResult:
    """Vary the rate and the cv."""
    base = Traffic("S3", "gamma", 60.0, 4.0, 5.0, SECONDS * (0.3 if effort.quick else 1.0))
    axes: list[tuple[str, Sequence[float], list[Traffic]]] = [
        ("rate", rates := effort.points(RATES), [replace(base, rate=rate) for rate in rates]),
        ("cv", cvs := effort.points(CVS), [replace(base, cv=cv) for cv in cvs]),
    ]
    asked = [Asked(traffic, DEVICES, (effort.seed, 0), effort.quick) for _, _, each in axes for traffic in each]
    found = iter(effort.each(_attained, asked, "Fig. 17"))
    charts, statements, numbers = [], [], {}
    for (name, x, _), papers in zip(axes, (PAPER_RATE, PAPER_CV), strict=True):
        points = [next(found) for _ in x]
        curves = {each: [point[each] for point in points] for each in (ROUND_ROBIN, GREEDY, WHOLE)}
        charts.append(Chart(str(base.models), name, "share in time", x, curves))
        at = {each: crossing(x, values, TARGET) for each, values in curves.items()}
        whole, greedy = at[WHOLE], at[GREEDY]
        statements.append(
            Statement(
                f"group partitioning reaches 99 % at {papers} x the {name} of greedy placement alone",
                ratio_text(whole, greedy, f"{papers} x"),
                whole is not None and (greedy is None or whole >= greedy),
            )
        )
        if whole is not None and greedy is not None:
            numbers[f"ratio {name}"] = whole / greedy
        means = {each: float(np.mean(values)) for each, values in curves.items()}
        statements.append(
            Statement(
                f"{name}: round robin attains the least, and never 99 %",
                f"means {', '.join(f'{each} {mean:.3f}' for each, mean in means.items())}; round robin reaches 99 % "
                + ("never" if at[ROUND_ROBIN] is None else f"up to {at[ROUND_ROBIN]:.3g}"),
                means[ROUND_ROBIN] < means[GREEDY] <= means[WHOLE] and at[ROUND_ROBIN] is None,
            )
        )
    return FigureResult("17", "parts of the placement search", statements, charts, numbers=numbers)
