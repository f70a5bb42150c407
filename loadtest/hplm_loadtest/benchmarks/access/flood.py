"""The benchmark `hplm bench access-flood`: response times of tenants beside a tenant at ten times its share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any

import numpy as np

from hplm.errors import ConfigError
from hplm.quotas.limits import Limits
from hplm.registry.access.limits import DEFAULT
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import progress_bars
from hplm.workloads.arrivals import PoissonArrivals
from hplm.workloads.tenants import UniformTenants
from hplm_loadtest.benchmarks.access.keyed_repository import KNOWN_S, keyed_repository
from hplm_loadtest.benchmarks.serving.open_load import Traffic
from hplm_loadtest.scenarios.grpc_load import closed_loop, open_loop
from hplm_loadtest.scenarios.outcomes import Run
from hplm_loadtest.scenarios.result_rows import combine_runs, load_goals
from hplm_loadtest.scenarios.steady_rate import saturate, steady_rate
from hplm_loadtest.workloads.load_plan import LoadPlan, RequestMix, Requests

GOAL_TIMES = 1.5
SHARES, QUOTAS = "fair shares alone", "quotas"
QUIET, FLOOD = "without", "with"
IN_FLIGHT = 128  # requests under way that fill the batches of both stages
WARM_UP = 256


@dataclass(frozen=True)
class FloodLoad:
    """The load. A tenant's share is the capacity over the number of tenants.

    `load`: what each other tenant sends, in shares. `times`: what the flooding tenant sends, in shares. `quota`: each tenant's
    quota of requests a second, in shares, in the runs with quotas.
    """

    rounds: int = 5
    duration_s: float = 15.0
    tenants: int = 10
    load: float = 0.5
    times: float = 10.0
    quota: float = 2.0


def access_flood(models: Path, load: FloodLoad, text_kind: str) -> Report:
    """Measure the response times of tenants without and with a tenant that floods a server, which needs keys.

    Arrivals are independent of each other. In each round the other tenants' requests are the same in all four runs, which come
    in turns: with fair shares alone and with quotas, without and with the flood. Raises ConfigError.
    """
    traffic = Traffic.read(models, text_kind)
    if len(traffic.names) < load.tenants:
        raise ConfigError(f"--tenants: {models} has {len(traffic.names)} tenants of single texts, not {load.tenants}")
    flooding, *others = traffic.names[: load.tenants]
    runs: dict[tuple[str, str], list[tuple[Run, Run]]] = {
        (limited, flooded): [] for limited in (SHARES, QUOTAS) for flooded in (QUIET, FLOOD)
    }
    with ExitStack() as stack:
        repository = stack.enter_context(keyed_repository(models))
        keys = repository.add_keys([flooding, *others])
        server = stack.enter_context(repository.server())
        server.start()
        progress = stack.enter_context(progress_bars())
        bar = progress.add_task("runs", total=load.rounds * len(runs))
        url, rng = server.ports.grpc_url, traffic.rng

        def with_keys(requests: Requests) -> Requests:
            return replace(requests, keys=[keys[tenant] for tenant in requests.tenants])

        def draw(count: int) -> Requests:
            return with_keys(RequestMix(UniformTenants([flooding, *others]), traffic.texts).draw(count, rng))

        warm_up = closed_loop(url, draw(WARM_UP), IN_FLIGHT, model=repository.model)
        capacity, _ = steady_rate(saturate(url, draw, IN_FLIGHT, warm_up=warm_up, seconds=load.duration_s))
        share = capacity / load.tenants
        for turn in range(load.rounds):
            usual = RequestMix(UniformTenants(others), traffic.texts)
            plan = usual.plan(PoissonArrivals(load.load * share * len(others)), load.duration_s, rng)
            flood = RequestMix(UniformTenants([flooding]), traffic.texts)
            both = _merged(plan, flood.plan(PoissonArrivals(load.times * share), load.duration_s, rng))
            for limited, flooded in list(runs)[:: -1 if turn % 2 else 1]:
                repository.limit(DEFAULT, Limits(load.quota * share) if limited == QUOTAS else Limits())
                sleep(KNOWN_S)
                sent = both if flooded == FLOOD else plan
                run = open_loop(url, replace(sent, requests=with_keys(sent.requests)), model=repository.model)
                floods = np.array([tenant == flooding for tenant in sent.requests.tenants], dtype=np.bool_)
                runs[limited, flooded].append((run.select(~floods), run.select(floods)))
                progress.update(bar, advance=1)
    rows, goals = [], []
    for limited in (SHARES, QUOTAS):
        for flooded in (QUIET, FLOOD):
            others_runs, flood_runs = zip(*runs[limited, flooded], strict=True)
            rows.append({"limited_by": limited, "flood": flooded, **combine_runs(others_runs), **_flood(flood_runs)})
        ratios = _ratios(runs[limited, QUIET], runs[limited, FLOOD])
        text = f"the others' p99 with the flood over that without, {limited}"
        goals.append(Goal(f"58-flood-{limited.split()[0]}", text, GOAL_TIMES, median(ratios), "x", "lower"))
        rows.append(
            {"ratios_with": limited, "p99_ratio": median(ratios), "by_round": [round(one, 2) for one in ratios]}
        )
    settings = {
        "rounds": load.rounds,
        "duration_s": load.duration_s,
        "tenants": load.tenants,
        "load": load.load,
        "times": load.times,
        "quota": load.quota,
        "capacity_per_s": capacity,
        **traffic.settings,
    }
    measured = [row for row in rows if "requests" in row]
    refused = sum(row["refused"] for row in measured)
    goals.append(Goal("58-flood-refused", "requests of the others that were refused", 0, refused, "requests", "lower"))
    return Report("access-flood", settings, rows, [*goals, *load_goals("58-flood", measured)])


def _ratios(quiet: Sequence[tuple[Run, Run]], flood: Sequence[tuple[Run, Run]]) -> list[float]:
    """Return the others' 99th percentile with the flood over that without, by round."""
    return [
        with_flood.percentile_ms(99) / without.percentile_ms(99)
        for (without, _), (with_flood, _) in zip(quiet, flood, strict=True)
    ]


def _flood(runs: Sequence[Run]) -> dict[str, Any]:
    """Return what the flooding tenant got, a second."""
    seconds = sum(run.duration_s for run in runs)
    return {
        "flood_offered_per_s": sum(map(len, runs)) / seconds,
        "flood_answered_per_s": sum(run.kinds["answered"] for run in runs) / seconds,
    }


def _merged(first: LoadPlan, second: LoadPlan) -> LoadPlan:
    """Return one plan of the requests of both."""
    times_s = np.concatenate([first.times_s, second.times_s])
    order = np.argsort(times_s, kind="stable")
    both = [(*first.requests.tenants, *second.requests.tenants), (*first.requests.texts, *second.requests.texts)]
    tenants, texts = ([column[index] for index in order] for column in both)
    deadlines_s = np.full(len(order), np.nan)
    return LoadPlan(times_s[order], Requests(tenants, texts, deadlines_s), max(first.duration_s, second.duration_s))
