"""The systems that AlpaServe is compared with, and the workloads that they are asked with (AlpaServe 6.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from hplm.placement.search.baselines import clockwork, selective_replication
from hplm.placement.search.enumeration import SearchOptions, search
from hplm.placement.served_model import ServedModel
from hplm.placement.stage_times import StageTimes
from hplm.placement.table1 import ModelSet, model_set, table1_cluster
from hplm.workloads.model_requests import ModelRequests
from hplm.workloads.model_traffic import gamma_requests, resampled, trace_requests
from hplm.workloads.popularity import power_law
from hplm.workloads.traces import read_trace

Kind = Literal["steady", "skewed", "gamma"]
# What the figures vary about a workload.
Variable = Literal["rate", "cv", "deadline scale"]
SEARCHED, REPLICATED, CLOCKWORK = "search", "selective replication", "Clockwork++"
# The paper's 13 GB are read as 13 * 2^30 bytes, because one BERT-6.7B of 13.4 GB has to fit on a device, as in the paper.
DEVICE_BYTES = 13 * 2**30
# Clockwork places the models anew in each window of so many seconds, and the trace is fitted in such windows.
WINDOW_S = 60.0
# Requests that a search simulates, at most: each simulation of so many takes about a millisecond.
MOST_REQUESTS, QUICK_MOST_REQUESTS = 20_000, 4_000
# The same for models of several sizes.
MOST_MIXED_REQUESTS = 10_000
# The exponent of the skewed workload's power law.
SKEW = 0.5


@dataclass(frozen=True)
class Traffic:
    """A workload of a set of models. `rate`: requests/s of all models. `scale`: deadlines as multiples of latencies.

    steady: arrivals of the trace, dealt to the models one after another. skewed: arrivals of the trace, to random models by a
    power law. gamma: independent Gamma processes with rates by the same power law. `cv` multiplies the cv of each window of a
    trace; for gamma it is the cv. Without a trace, steady and skewed are gamma with equal and with skewed rates. `ranking`
    numbers the order of the models by popularity.
    """

    models: ModelSet
    kind: Kind
    rate: float
    cv: float
    scale: float
    seconds: float
    trace: Path | None = None
    ranking: int = 0

    def with_value(self, variable: Variable, value: float) -> Traffic:
        """Return the workload with another value of a variable."""
        if variable == "rate":
            return replace(self, rate=value)
        return replace(self, cv=value) if variable == "cv" else replace(self, scale=value)

    def requests(self, rng: np.random.Generator) -> ModelRequests:
        """Draw the requests."""
        models = model_set(self.models)
        names = tuple(model.name for model in models)
        deadlines = {model.name: self.scale * model.latency_s for model in models}
        # The popular models of a set of several architectures are not all of the first architecture.
        ranked = tuple(names[number] for number in np.random.default_rng(self.ranking).permutation(len(names)))
        by_rank = power_law(ranked, 0.0 if self.kind == "steady" else SKEW)
        shares = {name: by_rank[name] for name in names}
        if self.kind == "gamma" or self.trace is None:
            rates = {name: self.rate * share for name, share in shares.items()}
            return gamma_requests(rates, self.cv, deadlines, self.seconds, rng)
        recorded = trace_requests(
            read_trace(self.trace), names, deadlines, rng, None if self.kind == "steady" else shares
        )
        rate_scale = self.rate / (len(recorded) / recorded.duration_s)
        return resampled(
            recorded, WINDOW_S, deadlines, rng, rate_scale=rate_scale, cv_scale=self.cv, duration_s=self.seconds
        )


def options_for(models: Sequence[ServedModel], quick: bool) -> SearchOptions:
    """Return the settings of a search by the paper's fast heuristic, which is shorter for models of several sizes.

    For these there are many buckets to try.
    """
    options = SearchOptions(
        full_up_to=0, most_requests=QUICK_MOST_REQUESTS if quick else MOST_REQUESTS, refined=1, refining_simulations=60
    )
    if len({model.latency_s for model in models}) > 1:
        options = replace(
            options, most_buckets=2, most_splits=2, most_requests=QUICK_MOST_REQUESTS if quick else MOST_MIXED_REQUESTS
        )
    return options


@dataclass(frozen=True)
class Asked:
    """A comparison of systems: the workload, the devices, and the number of the random source."""

    traffic: Traffic
    devices: int
    seed: tuple[int, int]
    quick: bool


def attainments(asked: Asked) -> dict[str, float]:
    """Return the share of requests in time with each system, all asked the same requests."""
    models = model_set(asked.traffic.models)
    cluster = table1_cluster(asked.devices, DEVICE_BYTES)
    requests = asked.traffic.requests(np.random.default_rng(asked.seed))
    options = options_for(models, asked.quick)
    times = StageTimes(cluster, models)
    return {
        SEARCHED: search(models, cluster, requests, options, stage_times=times).attainment,
        REPLICATED: selective_replication(models, cluster, requests, options, stage_times=times).attainment,
        CLOCKWORK: clockwork(models, cluster, requests, WINDOW_S, options, stage_times=times).attainment,
    }
