"""The benchmark `hplm bench batching`: TCB's Figs. 9 to 14, batching modes on real servers and row slots in-process.

The servers differ only in the mode, except that `slotted` also has the policy `slotted_das`, which chooses the row slots.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from hplm.core.text import TextEncoder
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.charts import check_picture, line_charts
from hplm.reporting.progress import progress_bars
from hplm.triton.launcher.server import TritonServer
from hplm.workloads.arrivals import PoissonArrivals
from hplm.workloads.deadlines import DeadlineClasses
from hplm.workloads.tenants import UniformTenants
from hplm_loadtest.benchmarks.benchmark_server import StageSettings, on_each_server
from hplm_loadtest.benchmarks.engine.row_slots import slot_speeds
from hplm_loadtest.benchmarks.served_repository import read_repository, single_text_tenants
from hplm_loadtest.scenarios.grpc_load import closed_loop, open_loop
from hplm_loadtest.scenarios.outcomes import LATE_S, Run
from hplm_loadtest.scenarios.result_rows import combine_rounds, load_goals, unanswered_goal
from hplm_loadtest.scenarios.server_metrics import UP_TO_DATE_S, metric_value
from hplm_loadtest.scenarios.steady_rate import rate_columns, saturate, steady_rate
from hplm_loadtest.workloads.lengths import NormalLengths, texts_of_lengths, token_counts
from hplm_loadtest.workloads.load_plan import LoadPlan, RequestMix
from hplm_loadtest.workloads.texts import pool_texts

BATCH = 64
IN_FLIGHT = 2 * BATCH
TEXTS = 256
# Settings of the encode stage by mode. `naive-100` is the paper's fixed row of 100 tokens.
MODES: dict[str, dict[str, Any]] = {
    "packed": {"batching": "packed"},
    "slotted": {"batching": "slotted", "policy": "slotted_das"},
    "concat": {"batching": "concat"},
    "turbo": {"batching": "turbo"},
    "naive": {"batching": "naive"},
    "naive-100": {"batching": "naive", "pad_to": 100},
}
VARIANCES = (20.0, 100.0)
DEADLINE_S = 5.0  # seconds, of requests by arrival rate: longer than a batch of any mode takes
DEADLINES = DeadlineClasses({"all": (DEADLINE_S, 1.0)})
LEAST_SHARE = 0.9
FIXED_ROW_GOAL = 3.3


def batching(
    models: Path,
    modes: Sequence[str],
    rounds: int,
    seconds: float,
    rates: Sequence[float],
    picture: Path | None,
    policy: str = "fcfs",
) -> Report:
    """Measure throughput at saturation, and throughput and utility by arrival rate; texts have 3-100 tokens, mean 20.

    rates: multiples of the first mode's throughput at saturation. Every mode gets the same requests per second.
    """
    check_picture(picture)
    served = read_repository(models)
    encoder = served.base.load_text_encoder()
    tenants = UniformTenants(single_text_tenants(models))
    rng = np.random.default_rng(0)
    mixes = {}
    for variance in VARIANCES:
        lengths = NormalLengths(variance=variance).draw(TEXTS, rng).tolist()
        mixes[variance] = RequestMix(tenants, texts_of_lengths(lengths, pool_texts(models), encoder, rng))
    # Closed loops with the tokens that the server computed for a token of the texts.
    saturated: dict[tuple[str, float], list[tuple[Run, float]]] = defaultdict(list)
    by_rate: dict[tuple[str, float, float], list[dict[str, float]]] = defaultdict(list)
    capacity = 0.0

    def measure(turn: int, mode: str, server: TritonServer) -> None:
        nonlocal capacity
        url, before = server.ports.grpc_url, _tokens(server)
        for variance, mix in mixes.items():
            draw = partial(mix.draw, rng=rng)
            warm_up = closed_loop(url, draw(TEXTS), IN_FLIGHT)
            run = saturate(url, draw, IN_FLIGHT, warm_up=warm_up, seconds=seconds)
            after = _tokens(server)
            (computed, real), before = after - before, after
            saturated[mode, variance].append((run, float(computed / real)))
        capacity = capacity or steady_rate(saturated[modes[0], VARIANCES[0]][0][0])[0]
        for number, share in enumerate(rates):
            for variance, mix in mixes.items():
                # All modes get the same arrivals.
                plan_rng = np.random.default_rng([turn, number])
                arrivals = PoissonArrivals(share * capacity)
                plan = replace(mix, deadlines=DEADLINES).plan(arrivals, seconds, plan_rng)
                by_rate[mode, variance, share].append(_row(open_loop(url, plan), plan, encoder))

    with progress_bars() as progress:
        variants = {mode: StageSettings(upper=_upper_settings(mode, policy)) for mode in modes}
        on_each_server(models, variants, rounds, progress, measure)
        speeds = slot_speeds(served, rounds, progress)
    rows: list[dict[str, Any]] = [
        {
            "mode": mode,
            "policy": MODES[mode].get("policy", policy),
            "length_variance": variance,
            **rate_columns([run for run, _ in measured]),
            "unanswered": sum(len(run) - run.kinds["answered"] for run, _ in measured),
            "computed_over_real_tokens": median(tokens for _, tokens in measured),
        }
        for (mode, variance), measured in saturated.items()
    ]
    rows += [
        {"mode": mode, "length_variance": variance, "offered_over_capacity": share, **combine_rounds(measured_rows)}
        for (mode, variance, share), measured_rows in by_rate.items()
    ]
    if picture is not None and rates:
        draw(picture, rows, modes)
    settings = {
        "batch": BATCH,
        "rounds": rounds,
        "seconds": seconds,
        "tenants": len(tenants.names),
        "policy": policy,
        "deadline_s": DEADLINE_S,
        "capacity_per_s": capacity,
        "base": served.base.config.name,
        "protocol": "grpc",
    }
    saturated_runs = [run for measured in saturated.values() for run, _ in measured]
    goals = [*(_goals(rows) if policy == "fcfs" else []), unanswered_goal("batching-saturated", saturated_runs)]
    if rates:
        goals += load_goals("batching", [row for row in rows if "kept_up" in row])
    return Report("batching", settings, [*rows, *speeds], goals)


def _upper_settings(mode: str, policy: str) -> dict[str, Any]:
    return {
        "policy": policy,
        "batch_rows": BATCH,
        "row_tokens": 100,
        "batch_requests": BATCH,
        "num_slots": BATCH + 1,
        "default_deadline_s": 600.0,
        "starve_after_s": 600.0,
        **MODES[mode],
    }


def draw(picture: Path, rows: Sequence[dict[str, Any]], modes: Sequence[str]) -> None:
    """Draw throughput and utility by arrival rate, one chart per figure and variance."""
    charts = {}
    for variance in VARIANCES:
        chosen = [r for r in rows if "offered_over_capacity" in r and r["length_variance"] == variance]
        for key, y_label in (("in_time_per_s", "answers in time (1/s)"), ("utility_per_s", "utility (1/s)")):
            series = {}
            for mode in modes:
                points = sorted((r["offered_per_s"], r[key]) for r in chosen if r["mode"] == mode)
                series[mode] = [x for x, _ in points], [y for _, y in points]
            charts[f"variance {variance:g}", y_label] = series
    line_charts(
        picture,
        charts,
        title=f"Batching modes by arrival rate, lengths 3-100, mean 20, deadlines of {DEADLINE_S:g} s",
        x_label="requests offered (1/s)",
    )


def _row(run: Run, plan: LoadPlan, encoder: TextEncoder) -> dict[str, float]:
    """Return the row of one run. Answers count over the time until the last answer, because the queue outlasts the plan."""
    utility = run.duration_s * run.utility_per_s(token_counts(plan.requests.texts, encoder), run.deadlines_s)
    return {
        "offered_per_s": len(run) / run.duration_s,
        "in_time_per_s": run.in_time / run.span_s,
        "utility_per_s": utility / run.span_s,
        "lost": float(run.kinds["lost"] + run.kinds["failed"]),
        "kept_up": run.sent_within(LATE_S),
    }


def _tokens(server: TritonServer) -> npt.NDArray[np.float64]:
    """Return the tokens that the server has computed so far: with padding, and without."""
    time.sleep(UP_TO_DATE_S)
    events = ("computed_tokens", "tokens")
    return np.array([metric_value(server, f'hplm_upper_events_total{{event="{event}"}}') for event in events])


def _goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    goals = []
    saturated = {(row["mode"], row["length_variance"]): row for row in rows if "requests_per_s" in row}
    for (mode, variance), row in saturated.items():
        if (packed := saturated.get(("packed", variance))) is None:
            continue
        ratio = packed["requests_per_s"] / row["requests_per_s"]
        if mode in ("naive", "naive-100"):
            share = ratio / (row["computed_over_real_tokens"] / packed["computed_over_real_tokens"])
            text = f"share of the saved tokens that packed turns into speed against {mode}, variance {variance:g}"
            goals.append(Goal(f"packed-{mode}-{variance:g}", text, LEAST_SHARE, share, "", "higher"))
        if mode == "naive-100":
            text = f"packed over naive with rows of 100, variance {variance:g}"
            goals.append(Goal(f"fixed-row-{variance:g}", text, FIXED_ROW_GOAL, ratio, "x", "higher"))
        if mode == "turbo":
            text = f"packed over turbo, variance {variance:g}"
            goals.append(Goal(f"turbo-{variance:g}", text, 1.0, ratio, "x", "higher"))
    return goals
