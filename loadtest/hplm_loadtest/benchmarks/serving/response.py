"""`hplm bench response`: HMI's Fig. 12, response time by number of tenants."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hplm.errors import InternalError
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import progress_bars
from hplm_loadtest.benchmarks.models import served_names
from hplm_loadtest.benchmarks.variants import serving
from hplm_loadtest.figures.pictures import check_picture, line_chart
from hplm_loadtest.scenarios.open_loop import closed_loop, open_loop
from hplm_loadtest.scenarios.processor import Milliseconds, ServerMeter, medians
from hplm_loadtest.scenarios.run import Run, goals_of
from hplm_loadtest.workloads.arrivals import PeriodicArrivals
from hplm_loadtest.workloads.plan import Mix
from hplm_loadtest.workloads.tenants import InTurn
from hplm_loadtest.workloads.texts import about_sent, texts

TENANTS = (100, 1_000, 5_000, 10_000)
PERIOD_S = 20.0
GOAL_P99_MS = 100.0
WARM_UP_IN_FLIGHT = 64


def response(
    models: Path,
    counts: Sequence[int],
    rounds: int,
    duration_s: float,
    kind: str,
    picture: Path | None,
    quantizations: Sequence[str] = (),
) -> Report:
    """Each of so many tenants sends one request every 20 s; a server started for this, the numbers of tenants in turn.

    With `quantizations` a server for each, which take turns; without, one with the stages as the repository has them.

    As each comes again and again, each is asked once before: what is read and checked then is no part of what is measured.
    Where the repository has fewer names than tenants are asked for, several senders share a name, with a warning.
    """
    check_picture(picture)
    names = served_names(models)
    if len(names) < max(counts):
        logging.getLogger(__name__).warning(
            "%s has %d tenants, not %d: several senders share one, see column `names`", models, len(names), max(counts)
        )
    sent = texts(kind, models)
    rng = np.random.default_rng(0)
    variants = list(dict.fromkeys(quantizations)) or [""]
    runs: dict[tuple[str, int], list[Run]] = {}
    costs: dict[tuple[str, int], list[Milliseconds]] = {}
    with ExitStack() as stack:
        progress = stack.enter_context(progress_bars())
        bar = progress.add_task("runs", total=len(variants) * (1 + rounds * len(counts)))
        servers = {}
        for name in variants:
            stage = {"quantization": name} if name else {}
            log = f"triton-bench{name and '-'}{name}.log"
            servers[name] = stack.enter_context(serving(models, plot=stage, upper=stage, log=log))
            ask_each(servers[name].ports.grpc_url, names[: max(counts)], sent, rng)
            progress.update(bar, advance=1)
        for turn in range(rounds):
            for count in counts:
                senders = Mix(InTurn([names[i % len(names)] for i in range(count)]), sent)
                for name in variants[:: -1 if turn % 2 else 1]:
                    plan = senders.plan(PeriodicArrivals(count, PERIOD_S), duration_s, rng)
                    meter = ServerMeter(servers[name])
                    run = open_loop(servers[name].ports.grpc_url, plan)
                    runs.setdefault((name, count), []).append(run)
                    costs.setdefault((name, count), []).append(meter.per_request(run))
                    progress.update(bar, advance=1)
    rows = [
        {
            "tenants": count,
            **({"quantization": name} if name else {}),
            "names": min(count, len(names)),
            **median_row(runs[name, count]),
            "cpu_ms": medians(costs[name, count]),
        }
        for name in variants
        for count in counts
    ]
    if picture is not None:
        places = [float(count) for count in counts]
        series = {
            f"{percent}th percentile" + (f", {name}" if name else ""): (
                places,
                [row[f"p{percent}_ms"] for row in rows if row.get("quantization", "") == name],
            )
            for name in variants
            for percent in (50, 95, 99)
        }
        line_chart(
            picture,
            series,
            title="Response time, each tenant one request every 20 s",
            x_label="tenants",
            y_label="response time (ms)",
            log=True,
            limit=(f"goal at 10,000: {GOAL_P99_MS:.0f} ms", GOAL_P99_MS),
        )
    goals = goals_of("response", rows)
    refused = sum(row["refused"] for row in rows)
    goals.append(Goal("response-refused", "requests refused", 0, refused, "requests", "lower"))
    for row in rows:
        # Of fewer tenants that many senders share it would be another figure.
        if row["tenants"] == row["names"] == max(TENANTS):
            text = "p99 of 10,000 tenants, one request every 20 s each"
            name = row.get("quantization", "")
            goal = Goal(f"response-p99{name and '-'}{name}", text, GOAL_P99_MS, row["p99_ms"], "ms", "lower")
            goals.insert(0, goal)
    about = {
        "period_s": PERIOD_S,
        "duration_s": duration_s,
        "rounds": rounds,
        **about_sent(kind, sent, models),
    }
    return Report("response", about, rows, goals)


def ask_each(url: str, names: Sequence[str], sent: Sequence[str], rng: np.random.Generator) -> None:
    """One request to each of `names`, as fast as they are answered. Raises InternalError where one is not."""
    run = closed_loop(url, Mix(InTurn(names), sent).draw(len(names), rng), WARM_UP_IN_FLIGHT)
    if bad := run.row()["errors"]:
        raise InternalError(f"not every tenant could be asked before it began: {bad}")


def median_row(runs: Sequence[Run]) -> dict[str, Any]:
    """One row for several rounds: medians of the figures, sums of what went wrong, the worst of what must hold in each."""
    rows = [run.row() for run in runs]
    p99 = [row["p99_ms"] for row in rows]
    errors: dict[str, int] = {}
    for row in rows:
        for code, count in row["errors"].items():
            errors[code] = errors.get(code, 0) + count
    medians = ("offered_per_s", "goodput_per_s", "in_time", "mean_ms", "p50_ms", "p95_ms", "p99_ms")
    return {
        "requests": sum(row["requests"] for row in rows),
        **{name: median(row[name] for row in rows) for name in medians},
        "p99_spread": f"{min(p99):.1f}-{max(p99):.1f} ms",
        **{kind: sum(row[kind] for row in rows) for kind in ("refused", "failed", "lost")},
        "errors": errors,
        "kept_up": min(row["kept_up"] for row in rows),
        "lag_p99_ms": max(row["lag_p99_ms"] for row in rows),
    }
