"""The benchmark `hplm bench overload`: goodput, and how soon requests are refused, if more arrive than can be answered."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.charts import check_picture, line_chart
from hplm.reporting.progress import progress_bars
from hplm.workloads.arrivals import PoissonArrivals
from hplm.workloads.deadlines import DeadlineClasses
from hplm_loadtest.benchmarks.serving.open_load import Traffic, run_plans_in_turns
from hplm_loadtest.scenarios.grpc_load import closed_loop
from hplm_loadtest.scenarios.outcomes import Run, kind_of
from hplm_loadtest.scenarios.result_rows import combine_runs, load_goals
from hplm_loadtest.scenarios.steady_rate import saturate, steady_rate
from hplm_loadtest.workloads.load_plan import LoadPlan

TIMES = [1.0, 3.0, 10.0]
GOAL_SHARE = 0.9
IN_FLIGHT = 256  # requests under way that fill the batches of both stages
WARM_UP = 512


def overload(
    models: Path,
    times: Sequence[float],
    rounds: int,
    duration_s: float,
    deadline_s: float,
    text_kind: str,
    picture: Path | None,
) -> Report:
    """Measure goodput at `times` the capacity: Poisson arrivals, random tenants, one deadline for all requests.

    The capacity is the rate of answers with 256 requests always under way, measured before each load. Each tenant got a request
    of one word before.
    """
    check_picture(picture)
    times = sorted(set(times))
    traffic = Traffic.read(models, text_kind)
    rng = traffic.rng
    without_deadline = traffic.mix()
    with_deadline = traffic.mix(DeadlineClasses({"all": (deadline_s, 1.0)}))
    # The capacity before each load, and whether its measurement left out the start.
    capacities: dict[float, list[tuple[float, bool]]] = {factor: [] for factor in times}
    with progress_bars() as progress, traffic.warm_server(texts=["hello"]) as server:
        url = server.ports.grpc_url
        warm_up = closed_loop(url, without_deadline.draw(WARM_UP, rng), IN_FLIGHT)

        def plan_overload(factor: float) -> LoadPlan:
            draw = partial(without_deadline.draw, rng=rng)
            run = saturate(url, draw, IN_FLIGHT, warm_up=warm_up, seconds=duration_s)
            capacities[factor].append(steady_rate(run))
            rate_per_s = factor * capacities[factor][-1][0]
            return with_deadline.plan(PoissonArrivals(rate_per_s), duration_s, rng)

        plans = {factor: partial(plan_overload, factor) for factor in times}
        metered = run_plans_in_turns({"hplm": server}, plans, rounds, progress)
    rows = []
    for (_, factor), runs in metered.items():
        rates, left_out = zip(*capacities[factor], strict=True)
        row = _row([(rate, run) for rate, (run, _) in zip(rates, runs, strict=True)], deadline_s)
        rows.append({"times": factor, **row, "start_left_out": all(left_out)})
    worst = rows[-1]
    text = f"answered in time at {worst['times']:g} times the capacity, over the capacity"
    goals = [
        Goal("overload-goodput", text, GOAL_SHARE, worst["share"], "", "higher"),
        *load_goals("overload", rows),
    ]
    if picture is not None:
        line_chart(
            picture,
            {
                "answered in time": (times, [row["goodput_per_s"] for row in rows]),
                "capacity without deadlines": (times, [row["capacity_per_s"] for row in rows]),
            },
            title=f"Goodput in overload, deadlines of {deadline_s:g} s",
            x_label="offered load, times the capacity",
            y_label="requests/s",
        )
    settings = {
        "rounds": rounds,
        "duration_s": duration_s,
        "deadline_s": deadline_s,
        "names": len(traffic.names),
        **traffic.settings,
    }
    return Report("overload", settings, rows, goals)


def _row(rounds: Sequence[tuple[float, Run]], deadline_s: float) -> dict[str, Any]:
    """Return one row for several rounds, each with the capacity measured before it."""
    capacities, runs = [capacity for capacity, _ in rounds], [run for _, run in rounds]
    goodput = [_goodput(run, deadline_s) for run in runs]
    shares = [per_s / capacity for per_s, capacity in zip(goodput, capacities, strict=True)]
    refused_ms = np.concatenate([_refused_ms(run) for run in runs])
    return {
        "share": median(shares),
        "share_spread": f"{min(shares):.2f}-{max(shares):.2f}",
        "capacity_per_s": median(capacities),
        **combine_runs(runs),
        "goodput_per_s": median(goodput),
        "late": sum(run.kinds["answered"] - run.in_time for run in runs),
        **{
            f"refused_p{percent}_ms": float(np.percentile(refused_ms, percent)) if len(refused_ms) else None
            for percent in (50, 99)
        },
    }


def _goodput(run: Run, deadline_s: float) -> float:
    """Return the answers in time per second, from one deadline after the start to the end of the plan.

    Before that no request can be late yet.
    """
    from_s = min(deadline_s, run.duration_s / 2)
    steady = run.answered_within(run.deadlines_s) & (run.done_s >= from_s) & (run.done_s <= run.duration_s)
    return float(np.count_nonzero(steady)) / (run.duration_s - from_s)


def _refused_ms(run: Run) -> npt.NDArray[np.float64]:
    """Return the time from plan to refusal of each refused request."""
    is_refused = np.array([kind_of(code) == "refused" for code in run.codes], dtype=np.bool_)
    return 1000 * (run.done_s - run.planned_s)[is_refused]
