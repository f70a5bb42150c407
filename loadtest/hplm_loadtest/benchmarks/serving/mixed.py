"""The benchmark `hplm bench mixed`: the bases of one server under load at once, each beside itself alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.progress import Progress

from hplm.core.roles import MANAGER, models_of, served_base
from hplm.errors import ConfigError
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import progress_bars
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from hplm.workloads.arrivals import PoissonArrivals
from hplm.workloads.tenants import UniformTenants
from hplm_loadtest.benchmarks.served_repository import single_text_tenants
from hplm_loadtest.scenarios.grpc_load import closed_loop, open_loop
from hplm_loadtest.scenarios.outcomes import Run
from hplm_loadtest.scenarios.result_rows import combine_runs, load_goals
from hplm_loadtest.workloads.load_plan import LoadPlan, RequestMix
from hplm_loadtest.workloads.texts import text_settings, texts_of_kind

GOAL_TIMES = 1.2
# Requests to each base before the first round, and how many of them are under way.
WARM_UP, IN_FLIGHT = 256, 16


@dataclass(frozen=True)
class BaseLoad:
    """The load of one base: requests per second, and what they are drawn from."""

    per_s: float
    mix: RequestMix


def mixed(models: Path, rates: Mapping[str, float], text_kind: str, rounds: int, duration_s: float) -> Report:
    """Start a server over `models` and measure it, see `measure`.

    `rates` are requests per second by the model of a base; tenants are random. Raises ConfigError for fewer than two bases.
    """
    if len(rates) < 2:
        raise ConfigError("a mixed load needs two bases or more, for example --rate hbert=120 --rate minilm=60")
    texts = texts_of_kind(text_kind, models)
    loads = {
        base: BaseLoad(
            rate, RequestMix(UniformTenants(single_text_tenants(models, served_base(models, base).name)), texts)
        )
        for base, rate in rates.items()
    }
    served = [name for name in models_of(models) if name != MANAGER.name]
    log = models.parent / "triton-bench.log"
    with TritonServer(models, free_ports(), models=served, log=log, tied=True) as server, progress_bars() as progress:
        server.wait_ready()
        report = measure(server.ports.grpc_url, loads, rounds, duration_s, progress)
    return replace(report, settings={**report.settings, **text_settings(text_kind, texts, models)})


def measure(url: str, loads: Mapping[str, BaseLoad], rounds: int, duration_s: float, progress: Progress) -> Report:
    """Measure the response times of each base alone, and of all bases together.

    Arrivals are Poisson. In each round every base gets the same load plan twice: alone, and while the others get theirs.
    """
    rng = np.random.default_rng(0)
    alone: dict[str, list[Run]] = {base: [] for base in loads}
    together: dict[str, list[Run]] = {base: [] for base in loads}
    for base, load in loads.items():
        closed_loop(url, load.mix.draw(WARM_UP, rng), IN_FLIGHT, model=base)
    bar = progress.add_task("loads", total=rounds * (len(loads) + 1))
    for turn in range(rounds):
        plans = {base: load.mix.plan(PoissonArrivals(load.per_s), duration_s, rng) for base, load in loads.items()}
        steps = [*([base] for base in loads), list(loads)]
        for chosen in steps[:: -1 if turn % 2 else 1]:
            runs = _at_once(url, {base: plans[base] for base in chosen})
            for base, run in runs.items():
                (alone if len(chosen) == 1 else together)[base].append(run)
            progress.update(bar, advance=1)
    rows = [
        {"base": base, "load": load, "per_s": loads[base].per_s, **combine_runs(found[base])}
        for base in loads
        for load, found in (("alone", alone), ("together", together))
    ]
    settings = {"rounds": rounds, "duration_s": duration_s}
    return Report("mixed", settings, rows, goals_of(rows, alone, together))


def _at_once(url: str, plans: Mapping[str, LoadPlan]) -> dict[str, Run]:
    """Send the plan of each base, all at the same time, each from a process of its own; return the runs by base."""
    with ThreadPoolExecutor(len(plans)) as pool:
        sending = {base: pool.submit(open_loop, url, plan, model=base) for base, plan in plans.items()}
        return {base: future.result() for base, future in sending.items()}


def goals_of(
    rows: Sequence[Mapping[str, Any]], alone: Mapping[str, Sequence[Run]], together: Mapping[str, Sequence[Run]]
) -> list[Goal]:
    """Return the goal on the 99th percentile of each base, the median over rounds, and that of every load."""
    p99 = [
        Goal(
            f"mixed-p99-{base}",
            f"p99 of {base} beside the other bases over its p99 alone",
            GOAL_TIMES,
            median(
                beside.row()["p99_ms"] / by_itself.row()["p99_ms"]
                for by_itself, beside in zip(alone[base], together[base], strict=True)
            ),
            "x",
            "lower",
        )
        for base in alone
    ]
    return [*p99, *load_goals("mixed", rows)]
