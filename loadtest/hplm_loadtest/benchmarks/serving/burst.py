"""`hplm bench burst`: HMI's Fig. 13, distribution of response times in a burst."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hplm.reporting.benchmark_result import Report
from hplm.reporting.progress import progress_bars
from hplm_loadtest.benchmarks.models import served_names
from hplm_loadtest.benchmarks.serving.response import ask_each, median_row
from hplm_loadtest.benchmarks.variants import serving
from hplm_loadtest.figures.pictures import cdf, check_picture
from hplm_loadtest.scenarios.open_loop import open_loop
from hplm_loadtest.scenarios.run import Run, goals_of
from hplm_loadtest.workloads.arrivals import BurstArrivals
from hplm_loadtest.workloads.plan import Mix
from hplm_loadtest.workloads.tenants import UniformTenants
from hplm_loadtest.workloads.texts import about_sent, texts

CLIENTS = 250


def burst(models: Path, scale: float, count: int, rounds: int, kind: str, picture: Path | None) -> Report:
    """250 times `scale` clients started 0.05 s apart, each `count` requests, one every 1.2 s, to tenants drawn at random.

    Each tenant is asked once before.
    """
    check_picture(picture)
    names = served_names(models)
    sent = texts(kind, models)
    rng = np.random.default_rng(0)
    arrivals = BurstArrivals(clients=max(1, round(CLIENTS * scale)), count=count)
    mix = Mix(UniformTenants(names), sent)
    runs: list[Run] = []
    with serving(models, plot={}, upper={}) as server, progress_bars() as progress:
        bar = progress.add_task("runs", total=1 + rounds)
        ask_each(server.ports.grpc_url, names, sent, rng)
        progress.update(bar, advance=1)
        for _ in range(rounds):
            runs.append(open_loop(server.ports.grpc_url, mix.plan(arrivals, arrivals.lasts_s, rng)))
            progress.update(bar, advance=1)
    if picture is not None:
        cdf(
            picture,
            {"hplm": 1000 * np.concatenate([run.waits_s for run in runs])},
            title=f"Response time in a burst of {arrivals.clients} clients",
        )
    rows = [{"clients": arrivals.clients, **median_row(runs)}]
    about = {
        "stagger_s": arrivals.stagger_s,
        "period_s": arrivals.period_s,
        "count": count,
        "scale": scale,
        "rounds": rounds,
        "names": len(names),
        **about_sent(kind, sent, models),
    }
    return Report("burst", about, rows, goals_of("burst", rows))
