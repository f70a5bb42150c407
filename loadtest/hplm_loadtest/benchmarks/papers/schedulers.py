"""The benchmark `hplm bench schedulers`: TCB's Figs. 15 and 16, real servers that differ only in their policy."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hplm.core.text import TextEncoder
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.charts import bar_chart, check_picture
from hplm.reporting.progress import progress_bars
from hplm.scheduling.fairness import fair_select
from hplm.scheduling.policy import Budget, Waiting
from hplm.scheduling.policy_loader import BUILT_IN, load_policy
from hplm.scheduling.service_history import ServiceHistory
from hplm.triton.launcher.server import TritonServer
from hplm.workloads.arrivals import PoissonArrivals
from hplm.workloads.tenants import UniformTenants
from hplm_loadtest.benchmarks.benchmark_server import StageSettings, on_each_server
from hplm_loadtest.benchmarks.papers.tcb_model import TcbModel
from hplm_loadtest.benchmarks.served_repository import read_repository, single_text_tenants
from hplm_loadtest.scenarios.grpc_load import closed_loop, open_loop
from hplm_loadtest.scenarios.outcomes import LATE_S, Run
from hplm_loadtest.scenarios.result_rows import combine_rounds, load_goals
from hplm_loadtest.scenarios.steady_rate import saturate, steady_rate
from hplm_loadtest.workloads.lengths import NormalLengths, texts_of_lengths, token_counts
from hplm_loadtest.workloads.load_plan import LoadPlan, RequestMix
from hplm_loadtest.workloads.texts import pool_texts

POLICIES = list(BUILT_IN)
TEXTS = 256
DEADLINES_S = (0.5, 3.0)  # deadlines are uniform between these
OVERLOAD = 2.0  # offered load, times the capacity
STARVE_AFTER_S = 2.0
UTILITY_GOAL = 1.4
SHARE_GOAL = 0.02


@dataclass(frozen=True)
class Setting:
    """One point of Fig. 15: rows per batch, tokens per row, variance of the text lengths."""

    rows: int = 16
    row_tokens: int = 100
    variance: float = 100.0

    @property
    def in_flight(self) -> int:
        """Return twice the number of 20-token texts in a full batch."""
        return 2 * self.rows * self.row_tokens // 20


SETTINGS = (
    Setting(rows=4),
    Setting(),
    Setting(variance=20.0),
    Setting(variance=400.0),
    Setting(row_tokens=50),
    Setting(row_tokens=200),
)


def schedulers(
    models: Path,
    policies: Sequence[str],
    rounds: int,
    seconds: float,
    picture: Path | None,
    settings: Sequence[Setting] = SETTINGS,
) -> Report:
    """Measure, for each policy, utility and deadlines met at twice the capacity, and the policy's own time.

    TCB's model, with the measured capacity, adds the utility of each policy in the model and the bound for every policy.
    """
    check_picture(picture)
    served = read_repository(models)
    encoder = served.base.load_text_encoder()
    tenants = UniformTenants(single_text_tenants(models))
    rng = np.random.default_rng(0)
    mixes = {setting: RequestMix(tenants, _texts(setting, models, encoder)) for setting in settings}
    measured: dict[tuple[Setting, str], list[dict[str, float]]] = defaultdict(list)
    capacity: dict[Setting, float] = {}

    def measure(turn: int, variant: tuple[Setting, str], server: TritonServer) -> None:
        setting, _ = variant
        url, mix = server.ports.grpc_url, mixes[setting]
        draw = partial(mix.draw, rng=rng)
        warm_up = closed_loop(url, draw(TEXTS), setting.in_flight)
        if setting not in capacity:
            run = saturate(url, draw, setting.in_flight, warm_up=warm_up)
            capacity[setting] = steady_rate(run)[0]
        # All policies get the same arrivals and deadlines.
        plan_rng = np.random.default_rng(100 + turn)
        plan = mix.plan(PoissonArrivals(OVERLOAD * capacity[setting]), seconds, plan_rng)
        deadlines_s = plan_rng.uniform(*DEADLINES_S, len(plan.requests))
        plan = replace(plan, requests=replace(plan.requests, deadlines_s=deadlines_s))
        measured[variant].append(_row(open_loop(url, plan), plan, encoder))

    with progress_bars() as progress:
        variants = {
            (setting, policy): StageSettings(upper=_upper_settings(setting, policy))
            for setting in settings
            for policy in policies
        }
        on_each_server(models, variants, rounds, progress, measure)
        batch_s = 1000.0 / (20.0 * max(capacity.values()))  # a batch of 1,000 tokens of mean length 20
        costs = policy_costs(policies, batch_s, progress)
        modelled = [_modelled(setting, policies, rate, seconds) for setting, rate in capacity.items()]
    rows = []
    for (setting, policy), values in measured.items():
        utility = [row["utility_per_s"] for row in values]
        spread = f"{min(utility):.2f}-{max(utility):.2f}"
        rows.append({"policy": policy, **_keys(setting), **combine_rounds(values), "spread": spread})
    if picture is not None:
        bar_chart(
            picture,
            [f"{s.rows}x{s.row_tokens}\nvar {s.variance:g}" for s in settings],
            {policy: [row["utility_per_s"] for row in rows if row["policy"] == policy] for policy in policies},
            title="Utility at twice the capacity",
            x_label="rows x tokens of a batch, variance of lengths",
            y_label="utility (1/s)",
        )
    result_settings = {
        "base": served.base.config.name,
        "tenants": len(tenants.names),
        "overload": OVERLOAD,
        "deadlines_s": DEADLINES_S,
        "seconds": seconds,
        "rounds": rounds,
        "capacity_per_s": {f"{s.rows}x{s.row_tokens} var {s.variance:g}": round(c, 1) for s, c in capacity.items()},
    }
    return Report("schedulers", result_settings, [*rows, *modelled, *costs], goals_of(rows, modelled, costs))


def _texts(setting: Setting, models: Path, encoder: TextEncoder) -> list[str]:
    lengths = NormalLengths(variance=setting.variance).draw(TEXTS, np.random.default_rng(1))
    return texts_of_lengths(lengths.tolist(), pool_texts(models), encoder, np.random.default_rng(2))


def _modelled(setting: Setting, policies: Sequence[str], capacity_per_s: float, seconds: float) -> dict[str, Any]:
    """Return the utility per second in TCB's model, with the measured time of a full batch.

    The model gets as many requests as a measured run. In a short run, more of them end after the last arrival.
    """
    mean = NormalLengths(variance=setting.variance).drawn_mean
    batch_s = setting.rows * setting.row_tokens / (mean * capacity_per_s)
    requests = max(1, int(OVERLOAD * capacity_per_s * seconds))
    model = TcbModel(setting.rows, setting.row_tokens, setting.variance, batch_s, OVERLOAD, DEADLINES_S, requests)
    return {
        "model": "all batches equally long",
        **_keys(setting),
        **{policy: model.utility_per_s(load_policy(policy, {})) for policy in policies},
        "no_policy_exceeds": model.most_per_s(),
    }


def _keys(setting: Setting) -> dict[str, Any]:
    return {"rows": setting.rows, "row_tokens": setting.row_tokens, "length_variance": setting.variance}


def policy_costs(policies: Sequence[str], batch_s: float, progress: Any) -> list[dict[str, Any]]:
    """Measure in-process how long choosing a batch takes, and its share of the time of a batch of 1,000 tokens.

    400 to 10,000 requests of 10,000 tenants wait. The choice includes fair shares: a third of the requests has waited too long,
    and every second request's tenant was in the last batch. Batches have one row, as packed batches, or ten.
    """
    rows = []
    bar = progress.add_task("cost of choosing", total=2 * 3 * len(policies))
    for count, batch_rows in product((400, 2_000, 10_000), (1, 10)):
        budget = Budget(batch_rows, 1000 // batch_rows, 64, 64)
        rng = np.random.default_rng(3)
        lengths = NormalLengths().draw(count, rng)
        now_s = 1.5 * STARVE_AFTER_S
        waiting = [
            Waiting(i, f"t{rng.integers(10_000)}", int(n), now_s * i / count, now_s + float(rng.uniform(*DEADLINES_S)))
            for i, n in enumerate(lengths)
        ]
        served = ServiceHistory()
        served.add((request.tenant for request in waiting[::2]), now_s)
        for policy in policies:
            chosen = load_policy(policy, {})
            seconds = []
            for _ in range(9):
                start = time.perf_counter()
                fair_select(chosen, waiting, now_s, budget, {}, STARVE_AFTER_S, served)
                seconds.append(time.perf_counter() - start)
            rows.append(
                {
                    "policy": policy,
                    "waiting": count,
                    "batch_rows": batch_rows,
                    "choose_ms": 1000 * median(seconds),
                    "share_of_batch": median(seconds) / batch_s,
                }
            )
            progress.update(bar, advance=1)
    return rows


def _upper_settings(setting: Setting, policy: str) -> dict[str, Any]:
    return {
        "policy": policy,
        "batching": "slotted" if policy == "slotted_das" else "packed",
        "batch_rows": setting.rows,
        "row_tokens": setting.row_tokens,
        "batch_requests": 1024,
        "num_slots": 257,
        "starve_after_s": 600.0,
    }


def _row(run: Run, plan: LoadPlan, encoder: TextEncoder) -> dict[str, float]:
    lengths = token_counts(plan.requests.texts, encoder)
    return {
        "offered_per_s": len(run) / run.duration_s,
        "utility_per_s": run.utility_per_s(lengths, run.deadlines_s),
        "in_time": run.in_time / len(run),
        "kept_up": run.sent_within(LATE_S),
        "lost": float(run.kinds["lost"] + run.kinds["failed"]),
    }


def goals_of(
    rows: Sequence[dict[str, Any]], modelled: Sequence[dict[str, Any]], costs: Sequence[dict[str, Any]]
) -> list[Goal]:
    """Return the goals of the rows."""
    goals = load_goals("schedulers", rows)
    for model in modelled:
        keys = {key: model[key] for key in ("rows", "row_tokens", "length_variance")}
        utility = {row["policy"]: row["utility_per_s"] for row in rows if keys.items() <= row.items()}
        if "das" in utility and utility.get("sjf"):
            count, tokens, variance = keys.values()
            text = f"utility of das over sjf, {count} rows of {tokens} tokens, variance {variance:g}"
            if model["sjf"]:  # 0 if a batch takes longer than any deadline
                text += f" (in TCB's model no policy can exceed {model['no_policy_exceeds'] / model['sjf']:.2f})"
            ratio = utility["das"] / utility["sjf"]
            goals.append(Goal(f"das-{count}x{tokens}-{variance:g}", text, UTILITY_GOAL, ratio, "x", "higher"))
    das = {(row["waiting"], row["batch_rows"]): row for row in costs if row["policy"] == "das"}
    if das:
        # The larger share of one row and of ten rows.
        share = max(row["share_of_batch"] for (waiting, _), row in das.items() if waiting == 400)
        text = "das's own time as a share of a batch of 1,000 tokens, 400 waiting"
        goals.append(Goal("das-cost", text, SHARE_GOAL, share, "", "lower"))
        ratios = [das[10_000, n]["choose_ms"] / das[400, n]["choose_ms"] for waiting, n in das if waiting == 400]
        growth = max(ratios) / (10_000 * np.log(10_000) / (400 * np.log(400)))
        text = "growth of das's time from 400 to 10,000 waiting over that of n log n"
        goals.append(Goal("das-growth", text, 1.0, float(growth), "", "lower"))
    return goals
