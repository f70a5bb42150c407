"""The benchmark `hplm bench pipeline`: HMI's Table 6, what overlapping look-up, swapping and computing is worth."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hplm.engine.open_domains import choose_lookup_device
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.charts import bar_chart, check_picture
from hplm.reporting.progress import progress_bars
from hplm.triton.launcher.server import TritonServer
from hplm.workloads.tenants import UniformTenants
from hplm_loadtest.benchmarks.benchmark_server import StageSettings, on_each_server
from hplm_loadtest.benchmarks.served_repository import read_repository, single_text_tenants
from hplm_loadtest.scenarios.grpc_load import closed_loop
from hplm_loadtest.scenarios.outcomes import Run
from hplm_loadtest.scenarios.result_rows import unanswered_goal
from hplm_loadtest.scenarios.steady_rate import rate_columns, saturate
from hplm_loadtest.workloads.load_plan import RequestMix
from hplm_loadtest.workloads.texts import texts_of_kind

SWAPPING = {"coarse_prefetch": True, "fine_prefetch": True}
NO_SWAPPING = dict.fromkeys(SWAPPING, False)
# Texts whose n-grams the tables hold, and texts whose n-grams the lower layers must compute.
LOADS = {"known text": "pool", "new text": "unseen"}
GOAL = 1.25
SLOTS = 33  # fewer adapter slots than tenants, so that adapters are swapped
OVERLAY_WINDOWS = 64  # few computed windows are kept, so that new text stays new however often it comes
IN_FLIGHT = 64


def pipeline(models: Path, rounds: int, seconds: float, picture: Path | None, *, look_up_threads: int = 0) -> Report:
    """Measure throughput with full overlap, without overlapped look-up, without overlapped swapping, and without both.

    `look_up_threads` compute n-grams that no table has, see `LookupSettings.num_threads`. With several of them, even a server
    without overlap uses several cores.
    """
    check_picture(picture)
    names = single_text_tenants(models)
    rng = np.random.default_rng(0)
    tenants = UniformTenants(names)
    mixes = {load: RequestMix(tenants, texts_of_kind(kind, models)) for load, kind in LOADS.items()}
    runs: dict[tuple[str, str], list[Run]] = defaultdict(list)

    def measure(turn: int, variant: str, server: TritonServer) -> None:
        url = server.ports.grpc_url
        for load in LOADS:
            # A server's first calls take longest, so the second warm-up run tells the rate.
            for _ in range(2):
                warm_up = closed_loop(url, mixes[load].draw(2 * IN_FLIGHT, rng), IN_FLIGHT)
            draw = partial(mixes[load].draw, rng=rng)
            runs[variant, load].append(saturate(url, draw, IN_FLIGHT, warm_up=warm_up, seconds=seconds))

    with tempfile.NamedTemporaryFile(prefix="hplm-lock-") as lock, progress_bars() as progress:

        def settings_of(lock_settings: dict[str, Any], swapping: dict[str, Any]) -> StageSettings:
            return StageSettings(
                {**lock_settings, "overlay_windows": OVERLAY_WINDOWS, "num_threads": look_up_threads},
                {**lock_settings, **swapping, "num_slots": SLOTS, "host_cache_mb": 4096},
            )

        alone = {"exclusive_lock": lock.name}
        variants = {
            "full": settings_of({}, SWAPPING),
            "no pipelined look-up": settings_of(alone, SWAPPING),
            "no pipelined swapping": settings_of({}, NO_SWAPPING),
            "synchronous": settings_of(alone, NO_SWAPPING),
        }
        on_each_server(models, variants, rounds, progress, measure)
    columns = {point: rate_columns(point_runs) for point, point_runs in runs.items()}
    rates = {point: columns_of["requests_per_s"] for point, columns_of in columns.items()}
    gains = {(variant, load): rate / rates["synchronous", load] for (variant, load), rate in rates.items()}
    rows = [
        {"variant": variant, "load": load, **columns[variant, load], "over_synchronous": gain}
        for (variant, load), gain in gains.items()
    ]
    goals = [unanswered_goal("pipeline", [run for point_runs in runs.values() for run in point_runs])]
    for load in LOADS:
        text = f"full over synchronous, {load}"
        goals.append(Goal(f"pipeline-{load.split()[0]}", text, GOAL, gains["full", load], "x", "higher"))
    if picture is not None:
        bar_chart(
            picture,
            list(variants),
            {load: [rates[variant, load] for variant in variants] for load in LOADS},
            title="Throughput with and without overlap",
            x_label="look-up and loading beside computing",
            y_label="requests/s",
        )
    served = read_repository(models)
    settings = {"base": served.base.config.name, "tenants": len(names), "slots": SLOTS, "rounds": rounds}
    settings |= {"look_up_threads": look_up_threads or 1, "look_up_device": choose_lookup_device(served.plot).type}
    return Report("pipeline", {**settings, "seconds": seconds, "in_flight": IN_FLIGHT}, rows, goals)
