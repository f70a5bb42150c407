"""`hplm bench overload`: what is answered in time, and how soon the rest is refused, where more comes than can be done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import progress_bars
from hplm.triton.launcher.server import TritonServer
from hplm_loadtest.benchmarks.models import served_names
from hplm_loadtest.benchmarks.serving.response import ask_each, median_row
from hplm_loadtest.benchmarks.variants import serving
from hplm_loadtest.figures.pictures import check_picture, line_chart
from hplm_loadtest.scenarios.open_loop import closed_loop, open_loop
from hplm_loadtest.scenarios.run import Run, goals_of, kind_of
from hplm_loadtest.scenarios.steady import enough_requests, steady_rate
from hplm_loadtest.workloads.arrivals import PoissonArrivals
from hplm_loadtest.workloads.deadlines import DeadlineClasses
from hplm_loadtest.workloads.plan import Mix
from hplm_loadtest.workloads.tenants import UniformTenants
from hplm_loadtest.workloads.texts import about_sent, texts

TIMES = (1.0, 3.0, 10.0)
GOAL_SHARE = 0.9
# Enough to fill the batches of both stages.
IN_FLIGHT = 256
WARM_UP = 512


def overload(
    models: Path,
    times: Sequence[float],
    rounds: int,
    duration_s: float,
    deadline_s: float,
    kind: str,
    picture: Path | None,
) -> Report:
    """Goodput at `times` the capacity, Poisson arrivals, tenants drawn at random, each request with the same deadline.

    Capacity is what 256 requests always under way get answered, measured before each load. Each tenant is asked once
    before, with one word.
    """
    check_picture(picture)
    times = sorted(set(times))
    names = served_names(models)
    sent = texts(kind, models)
    rng = np.random.default_rng(0)
    unhurried = Mix(UniformTenants(names), sent)
    hurried = Mix(UniformTenants(names), sent, DeadlineClasses({"all": (deadline_s, 1.0)}))
    found: dict[float, list[tuple[float, Run]]] = {share: [] for share in times}
    steady = dict.fromkeys(times, True)
    with serving(models, plot={}, upper={}) as server, progress_bars() as progress:
        url = server.ports.grpc_url
        bar = progress.add_task("runs", total=1 + rounds * len(times))
        ask_each(url, names, ["hello"], rng)
        warm = closed_loop(url, unhurried.draw(WARM_UP, rng), IN_FLIGHT)
        progress.update(bar, advance=1)
        for _ in range(rounds):
            for share in times:
                count = enough_requests(WARM_UP / warm.span_s, duration_s, IN_FLIGHT)
                capacity, is_steady = _capacity(server, unhurried, count, rng)
                run = open_loop(url, hurried.plan(PoissonArrivals(share * capacity), duration_s, rng))
                found[share].append((capacity, run))
                steady[share] &= is_steady
                progress.update(bar, advance=1)
    rows = [
        {"times": share, **_row(rounds_of, deadline_s), "start_left_out": steady[share]}
        for share, rounds_of in found.items()
    ]
    worst = rows[-1]
    goals = [
        Goal(
            "overload-goodput",
            f"answered in time at {worst['times']:g} times the capacity, over the capacity",
            GOAL_SHARE,
            worst["share"],
            "",
            "higher",
        ),
        *goals_of("overload", rows),
    ]
    if picture is not None:
        line_chart(
            picture,
            {
                "answered in time": (times, [row["goodput_per_s"] for row in rows]),
                "what is answered without hurry": (times, [row["capacity_per_s"] for row in rows]),
            },
            title=f"More than can be done, deadlines of {deadline_s:g} s",
            x_label="offered, times what can be answered",
            y_label="requests/s",
        )
    about = {
        "rounds": rounds,
        "duration_s": duration_s,
        "deadline_s": deadline_s,
        "names": len(names),
        **about_sent(kind, sent, models),
    }
    return Report("overload", about, rows, goals)


def _capacity(server: TritonServer, mix: Mix, count: int, rng: np.random.Generator) -> tuple[float, bool]:
    return steady_rate(closed_loop(server.ports.grpc_url, mix.draw(count, rng), IN_FLIGHT))


def _row(rounds: Sequence[tuple[float, Run]], deadline_s: float) -> dict[str, Any]:
    """Of several rounds, each with the capacity before it."""
    capacities, runs = [capacity for capacity, _ in rounds], [run for _, run in rounds]
    goodput = [_goodput(run, deadline_s) for run in runs]
    shares = [per_s / capacity for per_s, capacity in zip(goodput, capacities, strict=True)]
    refused_ms = np.concatenate([_refused_ms(run) for run in runs])
    return {
        "share": median(shares),
        "share_spread": f"{min(shares):.2f}-{max(shares):.2f}",
        "capacity_per_s": median(capacities),
        **median_row(runs),
        "goodput_per_s": median(goodput),
        "late": sum(run.kinds["answered"] - run.in_time for run in runs),
        **{
            f"refused_p{percent}_ms": float(np.percentile(refused_ms, percent)) if len(refused_ms) else None
            for percent in (50, 99)
        },
    }


def _goodput(run: Run, deadline_s: float) -> float:
    """From one deadline after the start to the last request: before, nobody was in danger of being late yet."""
    from_s = min(deadline_s, run.duration_s / 2)
    steady = run.answered_within(run.deadlines_s) & (run.done_s >= from_s) & (run.done_s <= run.duration_s)
    return float(np.count_nonzero(steady)) / (run.duration_s - from_s)


def _refused_ms(run: Run) -> npt.NDArray[np.float64]:
    """Planned time to refusal, of each that was refused."""
    is_refused = np.array([kind_of(code) == "refused" for code in run.codes], dtype=np.bool_)
    return 1000 * (run.done_s - run.planned_s)[is_refused]
