"""The benchmark `hplm bench burst`: HMI's Fig. 13, distribution of response times in a burst."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hplm.reporting.benchmark_result import Report
from hplm.reporting.charts import cdf_chart, check_picture
from hplm.reporting.progress import progress_bars
from hplm.workloads.arrivals import BurstArrivals
from hplm_loadtest.benchmarks.serving.open_load import Traffic, run_plans_in_turns
from hplm_loadtest.scenarios.result_rows import combine_runs, load_goals

CLIENTS = 250


def burst(models: Path, scale: float, count: int, rounds: int, text_kind: str, picture: Path | None) -> Report:
    """Measure response times while 250 times `scale` clients send requests to random tenants.

    Clients start 0.05 s apart and send `count` requests each, one every 1.2 s. Each tenant got one request before.
    """
    check_picture(picture)
    traffic = Traffic.read(models, text_kind)
    arrivals = BurstArrivals(clients=max(1, round(CLIENTS * scale)), count=count)

    with progress_bars() as progress, traffic.warm_server() as server:
        plans = {"burst": lambda: traffic.mix().plan(arrivals, arrivals.duration_s, traffic.rng)}
        (metered,) = run_plans_in_turns({"hplm": server}, plans, rounds, progress).values()
    runs = [run for run, _ in metered]
    if picture is not None:
        cdf_chart(
            picture,
            {"hplm": 1000 * np.concatenate([run.waits_s for run in runs])},
            title=f"Response time in a burst of {arrivals.clients} clients",
        )
    rows = [{"clients": arrivals.clients, **combine_runs(runs)}]
    settings = {
        "stagger_s": arrivals.stagger_s,
        "period_s": arrivals.period_s,
        "count": count,
        "scale": scale,
        "rounds": rounds,
        "names": len(traffic.names),
        **traffic.settings,
    }
    return Report("burst", settings, rows, load_goals("burst", rows))
