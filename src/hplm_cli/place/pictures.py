"""Pictures of a plan: how busy its groups are over time, and what other workloads and devices would bring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from hplm_builder.placement.plan_build import nodes_of, placement_of, stage_times_of, with_one_cut
from hplm_builder.placement.planned_workload import Scales, planned_requests
from hplm_builder.placement.planning import search_options

from hplm.errors import ConfigError
from hplm.placement.outcomes import Outcomes
from hplm.placement.placement import Placement
from hplm.placement.plan import Plan
from hplm.placement.search.enumeration import search
from hplm.placement.simulation import simulate
from hplm.placement.stage_times import StageTimes
from hplm.reporting.charts import line_chart

# Factors on the rate, the cv and the deadlines of a plan.
FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
# Points on the axis of time.
TIME_POINTS = 60
# Numbers of devices that are searched, at most.
DEVICE_POINTS = 6


def draw_pictures(plan: Plan, folder: Path, ending: str, most_stages: int) -> list[Path]:
    """Draw the pictures of a plan to a folder and return their files. `ending` is svg or png."""
    made = []
    placement, stage_times = placement_of(plan), stage_times_of(plan)
    outcomes = simulate(placement, stage_times, planned_requests(plan.assumptions))
    made.append(_utilisation(plan, placement, stage_times, outcomes, folder / f"utilisation.{ending}"))
    for name, scales in {
        "rate": lambda factor: Scales(rate=factor),
        "cv": lambda factor: Scales(cv=factor),
        "deadline": lambda factor: Scales(deadline=factor),
    }.items():
        path = folder / f"attainment-by-{name}.{ending}"
        made.append(_attainment(plan, placement, stage_times, name, scales, path))
    made.append(_by_devices(plan, folder / f"attainment-by-devices.{ending}", most_stages))
    return made


def busy_over_time(
    placement: Placement, stage_times: StageTimes, outcomes: Outcomes
) -> tuple[list[float], dict[int, list[float]]]:
    """Return the middle of each stretch of time, and each group's busy share in it, over its stages.

    A request counts in the stretch in which it ends.
    """
    requests = outcomes.requests
    edges = np.linspace(0, requests.duration_s, TIME_POINTS + 1)
    width = float(edges[1])
    shares = {}
    for number, (group, names) in enumerate(zip(placement.groups, placement.models, strict=True)):
        seconds = np.zeros(len(requests.names))
        for name in names:
            if name in requests.names:
                seconds[requests.names.index(name)] = sum(stage_times.of(name, group.config) or ())
        own = outcomes.groups == number
        busy, _ = np.histogram(outcomes.ended_s[own], edges, weights=seconds[requests.models[own]])
        shares[number] = (busy / (width * group.config.stages)).tolist()
    return (edges[:-1] + width / 2).tolist(), shares


def _utilisation(plan: Plan, placement: Placement, stage_times: StageTimes, outcomes: Outcomes, path: Path) -> Path:
    times, shares = busy_over_time(placement, stage_times, outcomes)
    series = {}
    for number, busy in shares.items():
        group = plan.groups[number]
        devices = ", ".join(map(str, group.devices))
        series[f"{group.node}, device{'s' if len(group.devices) > 1 else ''} {devices}"] = (times, busy)
    line_chart(path, series, title="Busy share of each group", x_label="time (s)", y_label="busy share of its stages")
    return path


def _attainment(
    plan: Plan,
    placement: Placement,
    stage_times: StageTimes,
    name: str,
    scales: Callable[[float], Scales],
    path: Path,
) -> Path:
    shares = [
        simulate(placement, stage_times, planned_requests(plan.assumptions, scales(factor))).attainment
        for factor in FACTORS
    ]
    unit = {"rate": "rate", "cv": "burstiness (cv)", "deadline": "deadlines"}[name]
    line_chart(
        path,
        {"this plan": (FACTORS, shares)},
        title=f"Requests in time by {unit}",
        x_label=f"factor on the plan's {unit}",
        y_label="share of requests in time",
        share=True,
        limit=("99 %", 0.99),
    )
    return path


def _by_devices(plan: Plan, path: Path, most_stages: int) -> Path:
    shares = attainment_by_devices(plan, most_stages)
    line_chart(
        path,
        {"best placement": (list(shares), list(shares.values()))},
        title="Requests in time by the number of devices",
        x_label="devices",
        y_label="share of requests in time",
        share=True,
        limit=("99 %", 0.99),
    )
    return path


def attainment_by_devices(plan: Plan, most_stages: int) -> Mapping[float, float]:
    """Return the share in time of the best placement on fewer devices, by their number; 0 if a base has no room."""
    nodes, requests = nodes_of(plan), planned_requests(plan.assumptions)
    total = nodes.cluster().devices
    options = search_options(most_stages, survive_any_node=False)
    shares: dict[float, float] = {}
    for count in sorted({max(1, round(total * point / DEVICE_POINTS)) for point in range(1, DEVICE_POINTS + 1)}):
        fewer = nodes.first(count)
        stage_times = StageTimes(fewer.cluster(), plan.models)
        try:
            found = search(plan.models, fewer.cluster(), requests, options, stage_times=stage_times)
        except ConfigError:
            shares[count] = 0.0
            continue
        shares[count] = simulate(with_one_cut(found.placement, fewer), stage_times, requests).attainment
    return shares
