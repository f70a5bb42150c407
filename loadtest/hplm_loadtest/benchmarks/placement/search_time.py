"""How long the placement search takes for the paper's cluster, and the placement of many tenants."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from hplm.placement.cluster import Node
from hplm.placement.search.enumeration import SearchOptions, search
from hplm.placement.search.tenants import TenantLoad, place_tenants
from hplm.placement.simulation import simulate
from hplm.placement.stage_times import StageTimes
from hplm.placement.table1 import model_set, table1_cluster
from hplm_loadtest.benchmarks.placement.figure import Effort, FigureResult, Statement
from hplm_loadtest.benchmarks.placement.systems import DEVICE_BYTES, Traffic

DEVICES = 64
SECONDS = 600.0
MOST_SEARCH_S, MOST_TENANTS_S, MOST_DAY_S = 600.0, 60.0, 3600.0
DAY_S = 24 * 3600.0
TENANTS, NODES, BASES = 10_000, 8, 4
ADAPTER_BYTES = 1_500_000
# Requests/s of all tenants, and the exponent of their popularity.
TENANT_RATE, TENANT_SKEW = 400.0, 1.0


def search_time(effort: Effort) -> FigureResult:
    """Search once for 60 models on 64 devices, simulate a day of its placement, and place 10,000 tenants on eight nodes."""
    models = model_set("S3")
    traffic = Traffic("S3", "gamma", 60.0, 4.0, 5.0, SECONDS * (0.1 if effort.quick else 1.0))
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
    placed = place_tenants(tenants, nodes, of_base)
    tenants_s = time.monotonic() - started_s
    statements = [
        Statement(
            f"a search for {len(models)} models on {DEVICES} devices takes 10 minutes at most (our goal)",
            f"{found.seconds:.1f} s, {found.simulations:,} simulations of up to 20,000 of {len(requests):,} requests, "
            f"{found.attainment:.4f} in time",
            found.seconds <= MOST_SEARCH_S,
        ),
        Statement(
            f"placing {TENANTS:,} tenants takes a minute at most (our goal)",
            f"{tenants_s:.1f} s; {len(placed.rule.hot)} hot tenants, {placed.uncached_share:.1%} of the requests meet a node "
            "without the tenant in its host cache",
            tenants_s <= MOST_TENANTS_S,
        ),
    ]
    if not effort.quick:
        statements.append(
            Statement(
                f"a simulation of 24 hours of {DEVICES} devices takes an hour at most (the paper, and our goal)",
                f"{day_s:.1f} s for {len(whole_day):,} requests, {of_day.attainment:.4f} in time",
                day_s <= MOST_DAY_S,
            )
        )
    numbers = {"search_s": found.seconds, "tenants_s": tenants_s, "day_s": day_s}
    return FigureResult("search-time", "time of the searches", statements, numbers=numbers)
