"""The benchmark `hplm bench access-throughput`: what keys and quotas cost, as a share of what a saturated server answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from hplm.access.access_mode import MODE_VARIABLE, OPEN, keys_environment
from hplm.core.roles import served_base
from hplm.errors import InternalError
from hplm.quotas.limits import Limits
from hplm.registry.access.limits import DEFAULT
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import progress_bars
from hplm_loadtest.benchmarks.access.keyed_repository import keyed_repository
from hplm_loadtest.benchmarks.benchmark_server import StageSettings, benchmark_server
from hplm_loadtest.benchmarks.serving.open_load import MeteredRun, ServerMeter, Traffic, medians
from hplm_loadtest.scenarios.grpc_load import closed_loop
from hplm_loadtest.scenarios.outcomes import ANSWERED
from hplm_loadtest.scenarios.steady_rate import enough_requests, rate_columns, steady_rate
from hplm_loadtest.workloads.load_plan import Requests

GOAL_SHARE = 0.97
WITHOUT, WITH = "without keys", "with keys and quotas"
# Quotas that no tenant uses up: each request is taken out of all three.
QUOTAS = Limits(requests_per_s=1e5, tokens_per_s=1e7, concurrent=10_000)


def access_throughput(models: Path, text_kind: str, rounds: int, in_flight: int, seconds: float) -> Report:
    """Measure two servers over the same models in turns, one of which needs keys: throughput at saturation.

    In each round both servers get the same requests in a closed loop of `seconds` with `in_flight` requests under way. The
    server with keys has a copy of the registry with a key and quotas for each tenant. Both count by tenant. Raises
    ConfigError if the registry is not a file.
    """
    traffic = Traffic.read(models, text_kind)
    mix, model = traffic.mix(), served_base(models).name
    loops: dict[str, list[MeteredRun]] = {WITHOUT: [], WITH: []}
    with keyed_repository(models) as repository, progress_bars() as progress:
        url, keys = repository.store.registry, repository.add_keys(traffic.names)
        repository.limit(DEFAULT, QUOTAS)
        registry = StageSettings({"registry": url}, {"registry": url})
        with (
            benchmark_server(models, log="triton-bench-open.log", environment={MODE_VARIABLE: OPEN}) as open_server,
            benchmark_server(models, registry, log="triton-bench-keys.log", environment=keys_environment()) as keyed,
        ):
            servers = {WITHOUT: open_server, WITH: keyed}

            def run(name: str, requests: Requests) -> MeteredRun:
                if name == WITH:
                    requests = replace(requests, keys=[keys[tenant] for tenant in requests.tenants])
                meter = ServerMeter(servers[name])
                done = closed_loop(servers[name].ports.grpc_url, requests, in_flight, model=model)
                return MeteredRun(done, meter.per_request(done))

            count = in_flight * 4
            for name in servers:
                warm = run(name, mix.draw(count, traffic.rng)).run
                if errors := warm.row()["errors"]:
                    raise InternalError(f"not every request was answered before the benchmark: {errors}")
                count = enough_requests(len(warm) / warm.duration_s, seconds, in_flight)
            bar = progress.add_task("rounds", total=rounds * 2)
            for turn in range(rounds):
                requests = mix.draw(count, traffic.rng)
                for name in list(servers)[:: -1 if turn % 2 else 1]:
                    loops[name].append(run(name, requests))
                    progress.update(bar, advance=1)
    rows: list[dict[str, Any]] = [
        {
            "server": name,
            **rate_columns([run for run, _ in metered]),
            "unanswered": sum(code != ANSWERED for run, _ in metered for code in run.codes),
            "cpu_ms": medians([cpu_ms for _, cpu_ms in metered]),
        }
        for name, metered in loops.items()
    ]
    shares = [
        steady_rate(keyed_run)[0] / steady_rate(open_run)[0]
        for (open_run, _), (keyed_run, _) in zip(loops[WITHOUT], loops[WITH], strict=True)
    ]
    goals = [
        Goal(
            "58-throughput",
            "throughput with keys and quotas over that without",
            GOAL_SHARE,
            median(shares),
            "x",
            "higher",
        ),
        Goal("58-unanswered", "requests not answered", 0, sum(row["unanswered"] for row in rows), "requests", "lower"),
    ]
    settings = {
        "rounds": rounds,
        "in_flight": in_flight,
        "seconds": seconds,
        "names": len(traffic.names),
        "share_by_round": shares,
        **traffic.settings,
    }
    return Report("access-throughput", settings, rows, goals)
