"""The benchmark `hplm bench batching`: TCB's Figs. 9 to 14, batching modes on real servers and row slots in-process.

The servers differ only in the mode, except that `slotted` also has the policy `slotted_das`, which chooses the row slots.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from hplm.core.text import TextEncoder
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import progress_bars
from hplm.triton.launcher.server import TritonServer
from hplm_loadtest.benchmarks.benchmark_server import StageSettings, on_each_server
from hplm_loadtest.benchmarks.engine.row_slots import slot_speeds
from hplm_loadtest.benchmarks.served_repository import read_repository, single_text_tenants
from hplm_loadtest.figures.charts import check_picture, line_charts
from hplm_loadtest.scenarios.grpc_load import closed_loop, open_loop
from hplm_loadtest.scenarios.outcomes import LATE_S, Run
from hplm_loadtest.scenarios.result_rows import combine_rounds, load_goals, unanswered_goal
from hplm_loadtest.scenarios.server_metrics import UP_TO_DATE_S, metric_value
from hplm_loadtest.scenarios.steady_rate import saturate, steady_rate
from hplm_loadtest.workloads.arrivals import PoissonArrivals
from hplm_loadtest.workloads.lengths import NormalLengths, texts_of_lengths, token_counts
from hplm_loadtest.workloads.load_plan import LoadPlan, Requests
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
    names = single_text_tenants(models)
    rng = np.random.default_rng(0)
    saturation: dict[tuple[str, float], dict[str, list[float]]] = {}
    by_rate: dict[tuple[str, float, float], list[dict[str, float]]] = {}
    saturated_runs: list[Run] = []
    lengths = {variance: NormalLengths(variance=variance).draw(TEXTS, rng) for variance in VARIANCES}
    texts = {
        variance: texts_of_lengths(lengths[variance].tolist(), pool_texts(models), encoder, rng)
        for variance in VARIANCES
    }
    capacity = 0.0

    def measure(turn: int, mode: str, server: TritonServer) -> None:
        nonlocal capacity
        url, before = server.ports.grpc_url, _tokens(server)
        for variance in VARIANCES:

            def draw(count: int, variance: float = variance) -> Requests:
                return _requests(texts[variance], names, count, rng)

            warm_up = closed_loop(url, draw(TEXTS), IN_FLIGHT)
            run = saturate(url, draw, IN_FLIGHT, warm_up=warm_up, seconds=seconds)
            after = _tokens(server)
            (computed, real), before = after - before, after
            row = saturation.setdefault((mode, variance), {"per_s": [], "lost": [], "computed": []})
            saturated_runs.append(run)
            row["per_s"].append(steady_rate(run)[0])
            row["lost"].append(float(len(run) - run.kinds["answered"]))
            row["computed"].append(float(computed / real))
        capacity = capacity or saturation[modes[0], VARIANCES[0]]["per_s"][0]
        for number, share in enumerate(rates):
            for variance in VARIANCES:
                # All modes get the same arrivals.
                plan_rng = np.random.default_rng([turn, number])
                plan = _plan(texts[variance], names, share * capacity, seconds, plan_rng)
                run = open_loop(url, plan)
                by_rate.setdefault((mode, variance, share), []).append(_row(run, plan, encoder))

    with progress_bars() as progress:
        variants = {mode: StageSettings(upper=_upper_settings(mode, policy)) for mode in modes}
        on_each_server(models, variants, rounds, progress, measure)
        speeds = slot_speeds(served, rounds, progress)
    rows = []
    for (mode, variance), values in saturation.items():
        rates_per_s = values["per_s"]
        rows.append(
            {
                "mode": mode,
                "policy": MODES[mode].get("policy", policy),
                "length_variance": variance,
                "requests_per_s": median(rates_per_s),
                "spread": f"{min(rates_per_s):.1f}-{max(rates_per_s):.1f}",
                "unanswered": int(sum(values["lost"])),
                "computed_over_real_tokens": median(values["computed"]),
            }
        )
    for (mode, variance, share), runs in by_rate.items():
        rows.append(
            {
                "mode": mode,
                "length_variance": variance,
                "offered_over_capacity": share,
                **combine_rounds(runs),
            }
        )
    if picture is not None and rates:
        draw(picture, rows, modes)
    settings = {
        "batch": BATCH,
        "rounds": rounds,
        "seconds": seconds,
        "tenants": len(names),
        "policy": policy,
        "deadline_s": DEADLINE_S,
        "capacity_per_s": capacity,
    }
    goals = [*(_goals(rows) if policy == "fcfs" else []), unanswered_goal("batching-saturated", saturated_runs)]
    if rates:
        goals += load_goals("batching", [row for row in rows if "kept_up" in row])
    return Report(
        "batching", {**settings, "base": served.base.config.name, "protocol": "grpc"}, [*rows, *speeds], goals
    )


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


def _requests(texts: Sequence[str], names: Sequence[str], count: int, rng: np.random.Generator) -> Requests:
    tenants = [names[i] for i in rng.integers(len(names), size=count)]
    return Requests(tenants, [texts[i % len(texts)] for i in range(count)], np.full(count, np.nan))


def _plan(
    texts: Sequence[str], names: Sequence[str], rate_per_s: float, seconds: float, rng: np.random.Generator
) -> LoadPlan:
    times_s = PoissonArrivals(rate_per_s).times(seconds, rng)
    requests = _requests(texts, names, len(times_s), rng)
    return LoadPlan(times_s, replace(requests, deadlines_s=np.full(len(times_s), DEADLINE_S)), seconds)


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
    for variance in VARIANCES:
        packed = saturated.get(("packed", variance))
        if packed is None:
            continue
        for mode in ("naive", "naive-100"):
            if other := saturated.get((mode, variance)):
                ratio = packed["requests_per_s"] / other["requests_per_s"]
                share = ratio / (other["computed_over_real_tokens"] / packed["computed_over_real_tokens"])
                text = f"share of the saved tokens that packed turns into speed against {mode}, variance {variance:g}"
                goals.append(Goal(f"packed-{mode}-{variance:g}", text, LEAST_SHARE, share, "", "higher"))
                if mode == "naive-100":
                    text = f"packed over naive with rows of 100, variance {variance:g}"
                    goals.append(Goal(f"fixed-row-{variance:g}", text, FIXED_ROW_GOAL, ratio, "x", "higher"))
        if turbo := saturated.get(("turbo", variance)):
            ratio = packed["requests_per_s"] / turbo["requests_per_s"]
            goals.append(
                Goal(f"turbo-{variance:g}", f"packed over turbo, variance {variance:g}", 1.0, ratio, "x", "higher")
            )
    return goals
