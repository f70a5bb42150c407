"""The benchmark `hplm bench route`: what it costs to call the model `hplm` instead of the model of a tenant's base."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from hplm_client import Client

from hplm.core import wire
from hplm.core.roles import served_base
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import progress_bars
from hplm_loadtest.benchmarks.serving.open_load import MeteredRun, ServerMeter, Traffic, medians
from hplm_loadtest.scenarios.grpc_load import closed_loop
from hplm_loadtest.scenarios.outcomes import ANSWERED
from hplm_loadtest.scenarios.steady_rate import enough_requests, rate_columns, steady_rate

GOAL_MS = 0.5
GOAL_SHARE = 0.9
# Pairs of requests, one to each model, before the pairs that count.
WARM_UP_PAIRS = 50


def route(models: Path, text_kind: str, rounds: int, pairs: int, in_flight: int, seconds: float) -> Report:
    """Measure both models of one server in turns: response times of single requests, and throughput at saturation.

    Each round sends `pairs` of the same request to both models, one request at a time, and then a closed loop of `seconds`
    with `in_flight` requests to each. Each tenant got one request before.
    """
    traffic = Traffic.read(models, text_kind)
    mix, called = traffic.mix(), (served_base(models).name, wire.ROUTER)
    waits_ms: dict[str, list[float]] = defaultdict(list)
    costs_ms: list[float] = []
    loops: dict[str, list[MeteredRun]] = defaultdict(list)
    with progress_bars() as progress, traffic.warm_server(with_router=True) as server:
        url = server.ports.grpc_url
        count = in_flight * 4
        for model in called:
            warm = closed_loop(url, mix.draw(count, traffic.rng), in_flight, model=model)
            count = enough_requests(len(warm) / warm.duration_s, seconds, in_flight)
        bar = progress.add_task("rounds", total=rounds * 3)
        for turn in range(rounds):
            drawn = mix.draw(WARM_UP_PAIRS + pairs, traffic.rng)
            found = alternating_waits_ms(url, called, list(zip(drawn.tenants, drawn.texts, strict=True)))[
                WARM_UP_PAIRS:
            ]
            for model, column in zip(called, found.T.tolist(), strict=True):
                waits_ms[model] += column
            costs_ms.append(float(np.subtract(*np.median(found, axis=0)[::-1])))
            progress.update(bar, advance=1)
            requests = mix.draw(count, traffic.rng)
            for model in called[:: -1 if turn % 2 else 1]:
                meter = ServerMeter(server)
                run = closed_loop(url, requests, in_flight, model=model)
                loops[model].append(MeteredRun(run, meter.per_request(run)))
                progress.update(bar, advance=1)
    rows = [
        {
            "model": model,
            "p50_ms": float(np.percentile(waits_ms[model], 50)),
            "p99_ms": float(np.percentile(waits_ms[model], 99)),
            **rate_columns([run for run, _ in loops[model]]),
            "unanswered": sum(code != ANSWERED for run, _ in loops[model] for code in run.codes),
            "cpu_ms": medians([cpu_ms for _, cpu_ms in loops[model]]),
        }
        for model in called
    ]
    settings: dict[str, Any] = {
        "rounds": rounds,
        "pairs": pairs,
        "in_flight": in_flight,
        "seconds": seconds,
        "names": len(traffic.names),
        "cost_ms_by_round": costs_ms,
        **traffic.settings,
    }
    shares = [
        steady_rate(through)[0] / steady_rate(direct)[0]
        for (direct, _), (through, _) in zip(*(loops[model] for model in called), strict=True)
    ]
    return Report("route", settings, rows, goals(median(costs_ms), median(shares), rows))


def alternating_waits_ms(
    url: str, models: tuple[str, str], requests: Sequence[tuple[str, str]]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Send each request to both models, one request at a time; return the milliseconds `[requests, 2]`.

    The models take turns at being the first.
    """
    waits_ms = np.zeros((len(requests), 2))
    with Client(url, model=models[0]) as direct, Client(url, model=models[1]) as through:
        for number, request in enumerate(requests):
            order = [(0, direct), (1, through)]
            for column, client in order[:: -1 if number % 2 else 1]:
                start_s = time.perf_counter()
                client.predict(*request)
                waits_ms[number, column] = 1000 * (time.perf_counter() - start_s)
    return waits_ms


def goals(cost_ms: float, share: float, rows: Sequence[dict[str, Any]]) -> list[Goal]:
    """Return the goals of the benchmark."""
    unanswered = float(sum(row["unanswered"] for row in rows))
    return [
        Goal(
            "route-cost",
            "p50 through hplm less p50 of the base's model, one request at a time",
            GOAL_MS,
            cost_ms,
            "ms",
            "lower",
        ),
        Goal("route-share", "throughput through hplm over that of the base's model", GOAL_SHARE, share, "x", "higher"),
        Goal("route-unanswered", "requests not answered", 0, unanswered, "requests", "lower"),
    ]
