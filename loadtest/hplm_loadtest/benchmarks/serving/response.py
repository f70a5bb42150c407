"""The benchmark `hplm bench response`: HMI's Fig. 12, response time by number of tenants."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.charts import check_picture, line_chart
from hplm.reporting.progress import progress_bars
from hplm.workloads.arrivals import PeriodicArrivals
from hplm.workloads.tenants import RoundRobinTenants
from hplm_loadtest.benchmarks.benchmark_server import StageSettings
from hplm_loadtest.benchmarks.serving.open_load import Traffic, medians, run_plans_in_turns
from hplm_loadtest.scenarios.result_rows import combine_runs, load_goals
from hplm_loadtest.workloads.load_plan import LoadPlan, RequestMix

TENANTS = [100, 1_000, 5_000, 10_000]
PERIOD_S = 20.0
GOAL_P99_MS = 100.0


def response(
    models: Path,
    counts: Sequence[int],
    rounds: int,
    duration_s: float,
    text_kind: str,
    picture: Path | None,
    quantizations: Sequence[str] = (),
) -> Report:
    """Measure response times while each of `count` tenants sends one request every 20 s, for each count in turn.

    Each of the `quantizations` has a server of its own. Without them one server has the repository's settings. Each tenant got
    one request before. If the repository has fewer tenants than a count, several senders share a tenant, with a warning.
    """
    check_picture(picture)
    traffic = Traffic.read(models, text_kind)
    names = traffic.names
    if len(names) < max(counts):
        logging.getLogger(__name__).warning(
            "%s has %d tenants, not %d: several senders share one, see column `names`", models, len(names), max(counts)
        )

    def plan_senders(count: int) -> LoadPlan:
        senders = RequestMix(RoundRobinTenants([names[i % len(names)] for i in range(count)]), traffic.texts)
        return senders.plan(PeriodicArrivals(count, PERIOD_S), duration_s, traffic.rng)

    with ExitStack() as stack:
        progress = stack.enter_context(progress_bars())
        servers = {}
        for quantization in dict.fromkeys(quantizations or [""]):
            stage = {"quantization": quantization} if quantization else {}
            log = f"triton-bench{quantization and '-'}{quantization}.log"
            server = traffic.warm_server(StageSettings(stage, stage), tenants=max(counts), log=log)
            servers[quantization] = stack.enter_context(server)
        plans = {count: partial(plan_senders, count) for count in counts}
        metered = run_plans_in_turns(servers, plans, rounds, progress)
    rows = [
        {
            "tenants": count,
            **({"quantization": quantization} if quantization else {}),
            "names": min(count, len(names)),
            **combine_runs([run for run, _ in runs]),
            "cpu_ms": medians([cpu_ms for _, cpu_ms in runs]),
        }
        for (quantization, count), runs in metered.items()
    ]
    if picture is not None:
        draw(picture, rows)
    settings = {"period_s": PERIOD_S, "duration_s": duration_s, "rounds": rounds, **traffic.settings}
    return Report("response", settings, rows, goals(rows))


def goals(rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Return the goals of the rows; the goal on the 99th percentile only exists for 10,000 different tenants."""
    p99 = []
    for row in rows:
        if row["tenants"] == row["names"] == max(TENANTS):
            text = "p99 of 10,000 tenants, one request every 20 s each"
            quantization = row.get("quantization", "")
            name = f"response-p99{quantization and '-'}{quantization}"
            p99.append(Goal(name, text, GOAL_P99_MS, row["p99_ms"], "ms", "lower"))
    refused = sum(row["refused"] for row in rows)
    return [
        *p99,
        *load_goals("response", rows),
        Goal("response-refused", "requests refused", 0, refused, "requests", "lower"),
    ]


def draw(picture: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw three percentiles of the response time by number of tenants, for each quantization."""
    series: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        for percent in (50, 95, 99):
            name = f"{percent}th percentile" + (f", {row['quantization']}" if "quantization" in row else "")
            x, y = series.setdefault(name, ([], []))
            x.append(float(row["tenants"]))
            y.append(row[f"p{percent}_ms"])
    line_chart(
        picture,
        series,
        title="Response time, each tenant one request every 20 s",
        x_label="tenants",
        y_label="response time (ms)",
        log=True,
        limit=(f"goal at 10,000: {GOAL_P99_MS:.0f} ms", GOAL_P99_MS),
    )
