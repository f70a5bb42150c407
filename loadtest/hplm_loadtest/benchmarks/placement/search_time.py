"""How long placement searches take for the paper's cluster and for many tenants, and how good the fast search is."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from hplm.placement.cluster import Node, uniform_cluster
from hplm.placement.search.enumeration import SearchOptions, search
from hplm.placement.search.tenants import TenantLoad, place_tenants
from hplm.placement.served_model import IntraCost, ServedModel
from hplm.placement.simulation import simulate
from hplm.placement.stage_times import StageTimes
from hplm.placement.table1 import model_set, table1_cluster
from hplm.reporting.benchmark_result import Goal, Report
from hplm.workloads.model_requests import ModelRequests
from hplm.workloads.model_traffic import gamma_requests
from hplm.workloads.popularity import power_law
from hplm_loadtest.benchmarks.placement.effort import Effort
from hplm_loadtest.benchmarks.placement.sweep import DEVICE_BYTES, Traffic

DEVICES = 64
SECONDS = 600.0
MOST_SEARCH_S, MOST_TENANTS_S, MOST_DAY_S = 600.0, 60.0, 3600.0
DAY_S = 24 * 3600.0
TENANTS, NODES, BASES = 10_000, 8, 4
ADAPTER_BYTES = 1_500_000
# Requests/s of all tenants, and the exponent of their popularity.
TENANT_RATE, TENANT_SKEW = 400.0, 1.0
# Random problems on which the fast search is compared with the full search, and the share of its attainment that we want.
PROBLEMS, QUICK_PROBLEMS = 400, 20
LEAST_SHARE = 0.98
PROBLEM_REQUESTS = 1500


def search_time(effort: Effort) -> Report:
    """Search once for 60 models on 64 devices, simulate a day of its placement, and place 10,000 tenants on eight nodes.

    Then compare the fast search with the full search on random problems.
    """
    models = model_set("S3")
    traffic = Traffic("S3", rate=60.0, seconds=SECONDS * (0.1 if effort.quick else 1.0))
    requests = traffic.requests(effort.rng())
    found = search(models, table1_cluster(DEVICES, DEVICE_BYTES), requests, SearchOptions(most_requests=20_000))
    nodes = [Node(f"node-{number}", 8, DEVICE_BYTES, 3 * 10**9) for number in range(1, NODES + 1)]
    weights = np.arange(1, TENANTS + 1, dtype=np.float64) ** -TENANT_SKEW
    rates = TENANT_RATE * weights / weights.sum()
    tenants = [
        TenantLoad(f"tenant-{number}", f"base-{number % BASES}", float(rate), ADAPTER_BYTES)
        for number, rate in enumerate(rates)
    ]
    whole_day = replace(traffic, seconds=DAY_S * (0.01 if effort.quick else 1.0)).requests(effort.rng())
    times = StageTimes(table1_cluster(DEVICES, DEVICE_BYTES), models)
    started_s = time.monotonic()
    of_day = simulate(found.placement, times, whole_day)
    day_s = time.monotonic() - started_s
    names = [node.name for node in nodes]
    of_base = {f"base-{number}": names[2 * number :] + names[: 2 * number] for number in range(BASES)}
    started_s = time.monotonic()
    place_tenants(tenants, nodes, of_base)
    tenants_s = time.monotonic() - started_s
    shares = np.array(
        effort.each(share_of_full, range(QUICK_PROBLEMS if effort.quick else PROBLEMS), "fast against full search")
    )
    rows = [
        {"what": f"search for {len(models)} models on {DEVICES} devices", "seconds": found.seconds},
        {"what": f"placement of {TENANTS:,} tenants on {NODES} nodes", "seconds": tenants_s},
        {"what": f"simulation of {len(whole_day):,} requests to {DEVICES} devices", "seconds": day_s},
    ]
    goals = [
        Goal("placement-search-s", f"{rows[0]['what']}", MOST_SEARCH_S, found.seconds, "s", "lower"),
        Goal("placement-tenants-s", f"{rows[1]['what']}", MOST_TENANTS_S, tenants_s, "s", "lower"),
        Goal(
            "placement-share-of-full",
            f"share in time of the fast search over that of the full search, worst of {len(shares)} random problems",
            LEAST_SHARE,
            float(shares.min()),
            "x",
            "higher",
        ),
    ]
    if not effort.quick:
        goals.append(Goal("placement-day-s", f"{rows[2]['what']}, of a day", MOST_DAY_S, day_s, "s", "lower"))
    settings = {
        "quick": effort.quick,
        "simulations": found.simulations,
        "in_time": found.attainment,
        "in_time_of_day": of_day.attainment,
        "mean_share_of_full": float(shares.mean()),
    }
    return Report("search-time", settings, rows, goals)


def share_of_full(seed: int) -> float:
    """Return the fast search's share of requests in time over that of the full search, for a random problem."""
    models, devices, requests = random_problem(np.random.default_rng(seed))
    cluster = uniform_cluster(devices, DEVICE_BYTES)
    fast = search(models, cluster, requests)
    full = search(models, cluster, requests, SearchOptions(method="full"))
    return fast.attainment / full.attainment if full.attainment else 1.0


def random_problem(rng: np.random.Generator) -> tuple[tuple[ServedModel, ...], int, ModelRequests]:
    """Draw models, a number of devices, and requests: loads of 0.1 to 1, cv 1 to 4, deadlines of 1.5 to 8 latencies."""
    models = []
    for number in range(int(rng.integers(3, 15))):
        layers, latency_s = int(rng.integers(4, 9)), float(rng.choice([0.1, 0.15, 0.3]))
        parts = rng.dirichlet(np.full(layers, 20.0))
        sizes = rng.uniform(2e9, 8e9) * parts
        intra = IntraCost(0.15) if rng.random() < 0.7 else None
        models.append(
            ServedModel(
                f"model-{number}",
                tuple((latency_s * parts).tolist()),
                tuple(int(size) for size in sizes),
                boundary_bytes=10**6,
                hop_s=0.0005,
                intra=intra,
            )
        )
    if rng.random() < 0.5:
        models = [replace(models[0], name=model.name) for model in models]
    devices = int(rng.integers(2, 9))
    shares = power_law([model.name for model in models], float(rng.uniform(0, 1.2)))
    mean_s = sum(shares[model.name] * model.latency_s for model in models)
    rate = float(rng.uniform(0.1, 1.0)) * devices / mean_s
    scale = float(rng.choice([1.5, 2, 3, 5, 8]))
    requests = gamma_requests(
        {name: share * rate for name, share in shares.items()},
        float(rng.choice([1, 2, 4])),
        {model.name: scale * model.latency_s for model in models},
        PROBLEM_REQUESTS / rate,
        rng,
    )
    return tuple(models), devices, requests
