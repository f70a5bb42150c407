"""The benchmark `hplm bench placement`: simulated placements of AlpaServe's models over one axis, with each policy.

A figure of AlpaServe's is a few options. Its Fig. 12, column S2, row "rate" is
`hplm bench placement --models S2 --axis rate --value 5 --value 10 --value 20 --value 40 --value 80`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hplm.placement.outcomes import Outcomes
from hplm.placement.search.enumeration import SearchOptions, search, selective_replication
from hplm.placement.served_model import ServedModel
from hplm.placement.simulation import simulate
from hplm.placement.stage_times import StageTimes
from hplm.placement.table1 import ModelSet, model_set, table1_cluster
from hplm.reporting.benchmark_result import Report
from hplm.reporting.charts import check_picture, line_chart
from hplm.workloads.model_requests import ModelRequests
from hplm.workloads.model_traffic import gamma_requests, resampled, trace_requests
from hplm.workloads.popularity import power_law
from hplm.workloads.traces import read_trace
from hplm_loadtest.benchmarks.placement.effort import Effort

Arrivals = Literal["steady", "skewed", "gamma"]
Axis = Literal["rate", "cv", "deadline", "devices"]
# The paper's 13 GB are read as 13 * 2^30 bytes, because one BERT-6.7B of 13.4 GB has to fit on a device, as in the paper.
DEVICE_BYTES = 13 * 2**30
# Clockwork places the models anew in each window of so many seconds, and a trace is fitted in such windows.
WINDOW_S = 60.0
# Requests that a search simulates at most; fewer for models of several sizes, which have many buckets to try.
MOST_REQUESTS, MOST_MIXED_REQUESTS, QUICK_MOST_REQUESTS = 20_000, 10_000, 4_000
SKEW = 0.5  # exponent of the power law of skewed popularity
PIPELINE_STAGES = 4  # of the policy `pipelines`


@dataclass(frozen=True)
class Traffic:
    """A workload of a set of models. `rate`: requests/s of all models. `deadline`: in multiples of a model's latency.

    steady: arrivals of the trace, dealt to the models one after another. skewed: arrivals of the trace, to random models by a
    power law. gamma: independent Gamma processes with rates by the same power law. `cv` multiplies the cv of each window of a
    trace; for gamma it is the cv. Without a trace, steady and skewed are gamma with equal and with skewed rates. `ranking`
    numbers the order of the models by popularity.
    """

    models: ModelSet
    arrivals: Arrivals = "gamma"
    rate: float = 40.0
    cv: float = 4.0
    deadline: float = 5.0
    seconds: float = 600.0
    trace: Path | None = None
    ranking: int = 0

    def requests(self, rng: np.random.Generator) -> ModelRequests:
        """Draw the requests."""
        models = model_set(self.models)
        names = tuple(model.name for model in models)
        deadlines = {model.name: self.deadline * model.latency_s for model in models}
        # The popular models of a set of several architectures are not all of the first architecture.
        ranked = tuple(names[number] for number in np.random.default_rng(self.ranking).permutation(len(names)))
        by_rank = power_law(ranked, 0.0 if self.arrivals == "steady" else SKEW)
        shares = {name: by_rank[name] for name in names}
        if self.arrivals == "gamma" or self.trace is None:
            rates = {name: self.rate * share for name, share in shares.items()}
            return gamma_requests(rates, self.cv, deadlines, self.seconds, rng)
        dealt = None if self.arrivals == "steady" else shares
        recorded = trace_requests(read_trace(self.trace), names, deadlines, rng, dealt)
        rate_scale = self.rate / (len(recorded) / recorded.duration_s)
        return resampled(
            recorded, WINDOW_S, deadlines, rng, rate_scale=rate_scale, cv_scale=self.cv, duration_s=self.seconds
        )


@dataclass(frozen=True)
class Point:
    """A point of a sweep. The placements are made for the requests `assumed`, and asked those of `traffic`."""

    traffic: Traffic
    devices: int
    assumed: Traffic
    policies: tuple[str, ...]
    quick: bool
    seed: int

    def outcomes(self) -> dict[str, Outcomes]:
        """Simulate the placement of each policy, all with the same requests."""
        models = model_set(self.traffic.models)
        times = StageTimes(table1_cluster(self.devices, DEVICE_BYTES), models)
        requests = self.traffic.requests(np.random.default_rng([self.seed, 0]))
        assumed = requests
        if self.assumed != self.traffic:
            assumed = self.assumed.requests(np.random.default_rng([self.seed, 1]))
        return {name: POLICIES[name](models, times, assumed, requests, self.options(models)) for name in self.policies}

    def options(self, models: Sequence[ServedModel]) -> SearchOptions:
        """Return the settings of a search by the paper's fast heuristic."""
        options = SearchOptions(full_up_to=0, most_requests=MOST_REQUESTS, refined=1, refining_simulations=60)
        if len({model.latency_s for model in models}) > 1:
            options = replace(options, most_buckets=2, most_splits=2, most_requests=MOST_MIXED_REQUESTS)
        return replace(options, most_requests=QUICK_MOST_REQUESTS) if self.quick else options


Policy = Callable[[Sequence[ServedModel], StageTimes, ModelRequests, ModelRequests, SearchOptions], Outcomes]


def searched(changed: dict[str, Any]) -> Policy:
    """Return the policy of one search with some changed settings, for the requests that are assumed."""

    def policy(
        models: Sequence[ServedModel],
        times: StageTimes,
        assumed: ModelRequests,
        requests: ModelRequests,
        options: SearchOptions,
    ) -> Outcomes:
        found = search(models, times.cluster, assumed, replace(options, **changed), stage_times=times)
        return simulate(found.placement, times, requests)

    return policy


def clockwork(
    models: Sequence[ServedModel],
    times: StageTimes,
    assumed: ModelRequests,
    requests: ModelRequests,
    options: SearchOptions,
) -> Outcomes:
    """Simulate Clockwork++: replicas are placed anew for each window's own requests, at no cost, with empty queues."""
    options = replace(options, cover_every_model=False, survive_any_node=False)
    ended_s = np.full(len(requests), np.nan)
    groups = np.full(len(requests), -1, dtype=np.int32)
    busy_s = np.zeros(times.cluster.devices)
    for start_s in np.arange(0.0, requests.duration_s, WINDOW_S):
        inside = (requests.times_s >= start_s) & (requests.times_s < start_s + WINDOW_S)
        if not inside.any():
            continue
        own = requests.where(inside)
        window = replace(
            own, times_s=own.times_s - start_s, duration_s=min(WINDOW_S, requests.duration_s - float(start_s))
        )
        placed = selective_replication(models, times.cluster, window, options, stage_times=times).placement
        outcomes = simulate(placed, times, window)
        ended_s[inside], groups[inside] = outcomes.ended_s + start_s, outcomes.groups
        busy_s += outcomes.busy_s
    return Outcomes(requests, ended_s, groups, busy_s)


POLICIES: dict[str, Policy] = {
    "search": searched({}),
    "replication": searched({"sizes": (1,), "most_stages": 1, "most_intra": 1}),
    "pipelines": searched({"sizes": (PIPELINE_STAGES,), "most_intra": 1, "most_buckets": 1}),
    "clockwork": clockwork,
}


def placement_sweep(
    traffic: Traffic,
    devices: int,
    axis: Axis,
    values: Sequence[float],
    policies: Sequence[str],
    *,
    changed: bool = False,
    effort: Effort,
    picture: Path | None = None,
) -> Report:
    """Simulate each policy at each value of the axis: share of requests in time, mean and 99th percentile of the latency.

    `changed`: the placements are made for requests of which other models are popular.
    """
    check_picture(picture)
    points = []
    for value in sorted(set(values)):
        new: dict[str, Any] = {} if axis == "devices" else {axis: value}
        of_point = replace(traffic, **new)
        assumed = replace(of_point, ranking=traffic.ranking + 1) if changed else of_point
        count = round(value) if axis == "devices" else devices
        points.append(Point(of_point, count, assumed, tuple(policies), effort.quick, effort.seed))
    found = effort.each(Point.outcomes, points, f"{traffic.models} over {axis}")
    rows: list[dict[str, Any]] = []
    for value, outcomes in zip(sorted(set(values)), found, strict=True):
        for name, one in outcomes.items():
            answered_s = one.latencies_s[~np.isnan(one.latencies_s)]
            mean_s, p99_s = (answered_s.mean(), np.quantile(answered_s, 0.99)) if len(answered_s) else (np.nan, np.nan)
            rows.append(
                {
                    axis: round(value) if axis == "devices" else value,
                    "policy": name,
                    "in_time": one.attainment,
                    "mean_s": float(mean_s),
                    "p99_s": float(p99_s),
                    "requests": len(one.requests),
                }
            )
    if picture is not None:
        labels = {"rate": "requests/s", "cv": "cv of the gaps", "deadline": "deadline / latency", "devices": "devices"}
        series = {
            name: (
                [row[axis] for row in rows if row["policy"] == name],
                [row["in_time"] for row in rows if row["policy"] == name],
            )
            for name in policies
        }
        title = f"{traffic.models}, {traffic.arrivals} arrivals" + (", other models are popular" if changed else "")
        line_chart(picture, series, title=title, x_label=labels[axis], y_label="share of requests in time", share=True)
    settings = {
        "models": traffic.models,
        "arrivals": traffic.arrivals,
        "rate": traffic.rate,
        "cv": traffic.cv,
        "deadline": traffic.deadline,
        "seconds": traffic.seconds,
        "devices": devices,
        "changed": changed,
        "trace": None if traffic.trace is None else str(traffic.trace),
    }
    return Report("placement", settings, rows)
