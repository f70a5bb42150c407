"""`hplm bench waves`: a few requests at once to a server that is idle, again and again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import progress_bars
from hplm_loadtest.benchmarks.models import served_names
from hplm_loadtest.benchmarks.serving.response import ask_each
from hplm_loadtest.benchmarks.variants import serving
from hplm_loadtest.figures.pictures import cdf, check_picture
from hplm_loadtest.scenarios.open_loop import closed_loop, open_loop
from hplm_loadtest.scenarios.run import Run, goals_of
from hplm_loadtest.workloads.arrivals import BurstArrivals
from hplm_loadtest.workloads.plan import Mix
from hplm_loadtest.workloads.tenants import UniformTenants
from hplm_loadtest.workloads.texts import about_sent, texts

SIZES = (1, 2, 8, 32, 96)
PERIOD_S = 1.0
# Before a model whose queue is bounded Triton looks by itself every half second for what waits there.
KEPT_S = 0.4
WARM_UP, WARM_UP_IN_FLIGHT = 1024, 64


def waves(models: Path, sizes: Sequence[int], count: int, kind: str, picture: Path | None) -> Report:
    """`count` waves of each of `sizes` requests at once, one a second: until the first and until the last is answered.

    Tenants are drawn at random; each was asked once before.
    """
    check_picture(picture)
    sizes = sorted(set(sizes))
    names = served_names(models)
    sent = texts(kind, models)
    rng = np.random.default_rng(0)
    mix = Mix(UniformTenants(names), sent)
    runs: dict[int, Run] = {}
    with serving(models, plot={}, upper={}) as server, progress_bars() as progress:
        url = server.ports.grpc_url
        bar = progress.add_task("waves", total=len(sizes) + 1)
        ask_each(url, names, sent, rng)
        closed_loop(url, mix.draw(WARM_UP, rng), WARM_UP_IN_FLIGHT)
        progress.update(bar, advance=1)
        for size in sizes:
            arrivals = BurstArrivals(clients=size, stagger_s=0.0, period_s=PERIOD_S, count=count)
            runs[size] = open_loop(url, mix.plan(arrivals, arrivals.lasts_s, rng))
            progress.update(bar, advance=1)
    rows = [{"at_once": size, **row_of(run, size)} for size, run in runs.items()]
    kept = sum(row["kept"] for row in rows)
    goals = [
        Goal(
            "waves-kept", f"requests answered after a gap of {KEPT_S:g} s in their wave", 0, kept, "requests", "lower"
        ),
        Goal("waves-refused", "requests refused", 0, sum(row["refused"] for row in rows), "requests", "lower"),
        *goals_of("waves", rows),
    ]
    if picture is not None:
        cdf(
            picture,
            {f"{size} at once": 1000 * run.waits_s for size, run in runs.items()},
            title="Response time of requests that come together to an idle server",
        )
    about = {
        "waves": count,
        "period_s": PERIOD_S,
        "names": len(names),
        **about_sent(kind, sent, models),
    }
    return Report("waves", about, rows, goals)


def row_of(run: Run, size: int) -> dict[str, Any]:
    """Of waves of `size` requests. `kept`: who was answered after a gap of 0.4 s in which nobody of the wave was."""
    # Of each wave, in the order of the answers; one that has none is last.
    waited_s = np.sort(np.where(run.answered, run.done_s - run.planned_s, np.nan).reshape(-1, size))
    is_kept = np.maximum.accumulate(np.diff(waited_s, axis=1, prepend=0.0) > KEPT_S, axis=1)
    last_s = np.nan_to_num(waited_s[:, -1], nan=np.inf)
    return {
        **run.row(),
        "first_p50_ms": 1000 * float(np.median(np.nan_to_num(waited_s[:, 0], nan=np.inf))),
        "last_p50_ms": 1000 * float(np.median(last_s)),
        "last_worst_ms": 1000 * float(last_s.max()),
        "kept": int(np.count_nonzero(is_kept & ~np.isnan(waited_s))),
    }
