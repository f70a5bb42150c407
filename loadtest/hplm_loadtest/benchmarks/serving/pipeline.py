"""`hplm bench pipeline`: HMI's Table 6, what doing things at the same time is worth."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hplm.engine.open_domains import choose_lookup_device
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import progress_bars
from hplm_loadtest.benchmarks.models import read, served_names
from hplm_loadtest.benchmarks.variants import serving
from hplm_loadtest.figures.pictures import bars, check_picture
from hplm_loadtest.scenarios.open_loop import closed_loop
from hplm_loadtest.scenarios.run import Run, unanswered
from hplm_loadtest.scenarios.steady import LEAST_WAVES, enough_requests, steady_rate
from hplm_loadtest.workloads.plan import Mix
from hplm_loadtest.workloads.tenants import UniformTenants
from hplm_loadtest.workloads.texts import pool, texts

SWAPPING = {"coarse_prefetch": True, "fine_prefetch": True}
NO_SWAPPING = dict.fromkeys(SWAPPING, False)
# What is sent: texts whose windows the tables know, or texts that the lower layers must be computed for.
LOADS = ("known text", "new text")
GOAL = 1.25
SLOTS = 33
IN_FLIGHT = 64


def pipeline(models: Path, rounds: int, seconds: float, picture: Path | None, *, look_up_threads: int = 0) -> Report:
    """Throughput with everything at the same time, without either kind of it, and with nothing.

    `look_up_threads` compute what no table has, see `LookupSettings.num_threads`: with more than one, what does one after
    another uses several cores too.
    """
    check_picture(picture)
    names = served_names(models)
    rng = np.random.default_rng(0)
    tenants = UniformTenants(names)
    sent = {"known text": Mix(tenants, pool(models)), "new text": Mix(tenants, texts("unseen", models))}
    found: dict[tuple[str, str], list[float]] = {}
    runs: list[Run] = []
    with tempfile.NamedTemporaryFile(prefix="hplm-lock-") as lock, progress_bars() as progress:
        alone = {"exclusive_lock": lock.name}
        variants: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "full": ({}, SWAPPING),
            "no pipelined look-up": (alone, {**alone, **SWAPPING}),
            "no pipelined swapping": ({}, NO_SWAPPING),
            "synchronous": (alone, {**alone, **NO_SWAPPING}),
        }
        bar = progress.add_task("pipeline", total=rounds * len(variants))
        for _ in range(rounds):
            for variant, (plot, upper) in variants.items():
                # Few windows remembered: new text stays new however often it comes. Few slots: adapters are swapped.
                plot = {**plot, "overlay_windows": 64, "num_threads": look_up_threads}
                with serving(models, plot=plot, upper={**upper, "num_slots": SLOTS, "host_cache_mb": 4096}) as server:
                    for load in LOADS:
                        url = server.ports.grpc_url
                        # The first calls of a server take longest: how many it does a second is told from the second time.
                        for _ in range(2):
                            run = closed_loop(url, sent[load].draw(2 * IN_FLIGHT, rng), IN_FLIGHT)
                        count = max(LEAST_WAVES * IN_FLIGHT, enough_requests(len(run) / run.span_s, seconds, IN_FLIGHT))
                        run = closed_loop(url, sent[load].draw(count, rng), IN_FLIGHT)
                        found.setdefault((variant, load), []).append(steady_rate(run)[0])
                        runs.append(run)
                progress.update(bar, advance=1)
    rows = [
        {
            "variant": variant,
            "load": load,
            "requests_per_s": median(rates),
            "over_synchronous": median(rates) / median(found["synchronous", load]),
            "spread": f"{min(rates):.1f}-{max(rates):.1f}",
        }
        for (variant, load), rates in found.items()
    ]
    goals = [
        Goal(
            f"pipeline-{load.split()[0]}",
            f"full over synchronous, {load}",
            GOAL,
            median(found["full", load]) / median(found["synchronous", load]),
            "x",
            "higher",
        )
        for load in LOADS
    ]
    goals.append(unanswered("pipeline", runs))
    if picture is not None:
        series = {load: [median(found[variant, load]) for variant in variants] for load in LOADS}
        bars(
            picture,
            list(variants),
            series,
            title="What doing things at the same time is worth",
            x_label="",
            y_label="requests/s",
        )
    served = read(models)
    about = {"base": served.base.config.name, "tenants": len(names), "slots": SLOTS, "rounds": rounds}
    about |= {"look_up_threads": look_up_threads or 1, "look_up_device": choose_lookup_device(served.plot).type}
    return Report("pipeline", {**about, "seconds": seconds, "in_flight": IN_FLIGHT}, rows, goals)
