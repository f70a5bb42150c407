"""The benchmark `hplm bench waves`: a few requests at once to an idle server, again and again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.charts import cdf_chart, check_picture
from hplm.reporting.progress import progress_bars
from hplm.workloads.arrivals import BurstArrivals
from hplm_loadtest.benchmarks.serving.open_load import WARM_UP_IN_FLIGHT, Traffic, run_plans_in_turns
from hplm_loadtest.scenarios.grpc_load import closed_loop
from hplm_loadtest.scenarios.outcomes import Run
from hplm_loadtest.scenarios.result_rows import load_goals
from hplm_loadtest.workloads.load_plan import LoadPlan

SIZES = [1, 2, 8, 32, 96]
PERIOD_S = 1.0
# A request answered after a gap of this many seconds was kept by Triton: Triton checks a model's bounded queue every half
# second if nothing else wakes it.
KEPT_S = 0.4
WARM_UP = 1024


def waves(models: Path, sizes: Sequence[int], count: int, text_kind: str, picture: Path | None) -> Report:
    """Measure the time until the first and until the last answer of a wave of requests sent at once.

    Each size in `sizes` has `count` waves, one per second. Tenants are random; each tenant got one request before.
    """
    check_picture(picture)
    traffic = Traffic.read(models, text_kind)
    mix = traffic.mix()

    def plan_waves(size: int) -> LoadPlan:
        arrivals = BurstArrivals(clients=size, stagger_s=0.0, period_s=PERIOD_S, count=count)
        return mix.plan(arrivals, arrivals.duration_s, traffic.rng)

    with progress_bars() as progress, traffic.warm_server() as server:
        closed_loop(server.ports.grpc_url, mix.draw(WARM_UP, traffic.rng), WARM_UP_IN_FLIGHT)
        plans = {size: partial(plan_waves, size) for size in sorted(set(sizes))}
        metered = run_plans_in_turns({"hplm": server}, plans, 1, progress)
    runs = {size: run for (_, size), ((run, _),) in metered.items()}
    rows = [{"at_once": size, **wave_row(run, size)} for size, run in runs.items()]
    kept = sum(row["kept"] for row in rows)
    text = f"requests answered after a gap of {KEPT_S:g} s in their wave"
    goals = [
        Goal("waves-kept", text, 0, kept, "requests", "lower"),
        Goal("waves-refused", "requests refused", 0, sum(row["refused"] for row in rows), "requests", "lower"),
        *load_goals("waves", rows),
    ]
    if picture is not None:
        cdf_chart(
            picture,
            {f"{size} at once": 1000 * run.waits_s for size, run in runs.items()},
            title="Response time of requests that come together to an idle server",
        )
    settings = {"waves": count, "period_s": PERIOD_S, "names": len(traffic.names), **traffic.settings}
    return Report("waves", settings, rows, goals)


def wave_row(run: Run, size: int) -> dict[str, Any]:
    """Return the row of a run of waves of `size` requests.

    The column `kept` counts the requests that were answered after a gap of 0.4 s without any answer in their wave.
    """
    # Answers of each wave in order of time; a request without an answer is NaN and comes last.
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
