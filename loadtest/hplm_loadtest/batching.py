"""`hplm bench batching`: TCB's Figs. 9 to 14, batching modes on real servers.

They differ in nothing but the mode; `slotted` has the policy `slotted_das` too, which chooses the slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hplm.nn.layouts import lay_out
from hplm.progress import progress_bars
from hplm.report import Goal, Report
from hplm.text import TextEncoder
from hplm_loadtest.arrivals import PoissonArrivals
from hplm_loadtest.lengths import texts_of_lengths, token_counts
from hplm_loadtest.models import read, served_names
from hplm_loadtest.open_loop import closed_loop, open_loop
from hplm_loadtest.pictures import check_picture, line_chart
from hplm_loadtest.plan import Plan, Requests
from hplm_loadtest.texts import pool
from hplm_loadtest.variants import serving
from hplm_loadtest.workload import NormalLengths

BATCH = 64
TEXTS = 256
# Mode -> settings of the upper stage. naive-100 is the paper's fixed row of 100 tokens.
MODES: dict[str, dict[str, Any]] = {
    "packed": {"batching": "packed"},
    "slotted": {"batching": "slotted", "policy": "slotted_das"},
    "concat": {"batching": "concat"},
    "turbo": {"batching": "turbo"},
    "naive": {"batching": "naive"},
    "naive-100": {"batching": "naive", "pad_to": 100},
}
VARIANCES = (20.0, 100.0)
USEFUL_S = 1.0  # an answer later than that is of no use
LEAST_SHARE = 0.9
FIXED_ROW_GOAL = 3.3


def batching(
    models: Path, modes: Sequence[str], rounds: int, seconds: float, rates: Sequence[float], picture: Path | None
) -> Report:
    """Throughput at saturation and utility by arrival rate under FCFS, lengths of 3-100 tokens, mean 20."""
    check_picture(picture)
    served = read(models)
    encoder = TextEncoder(served.base.tokenizer_path, served.base.config.max_tokens)
    names = served_names(models)
    rng = np.random.default_rng(0)
    found: dict[tuple[str, float], dict[str, list[float]]] = {}
    curves: dict[str, tuple[list[float], list[float]]] = {mode: ([], []) for mode in modes}
    lengths = {variance: NormalLengths(variance=variance).draw(TEXTS, rng) for variance in VARIANCES}
    texts = {
        variance: texts_of_lengths(lengths[variance].tolist(), pool(models), encoder, rng) for variance in VARIANCES
    }
    capacity = 0.0
    with progress_bars() as progress:
        bar = progress.add_task("batching", total=rounds * len(modes))
        for turn in range(rounds):
            for mode in modes:
                upper = {
                    "policy": "fcfs",
                    "batch_rows": BATCH,
                    "row_tokens": 100,
                    "batch_requests": BATCH,
                    "num_slots": BATCH + 1,
                    "default_deadline_s": 600.0,
                    "starve_after_s": 600.0,
                    **MODES[mode],
                }
                with serving(models, plot={}, upper=upper) as server:
                    url = server.ports.grpc_url
                    for variance in VARIANCES:
                        sent = _requests(texts[variance], names, TEXTS, rng)
                        warm = closed_loop(url, sent, 2 * BATCH)
                        count = max(2 * BATCH, int(len(sent) / warm.span_s * seconds))
                        run = closed_loop(url, _requests(texts[variance], names, count, rng), 2 * BATCH)
                        row = found.setdefault((mode, variance), {"per_s": [], "lost": []})
                        row["per_s"].append(run.kinds["answered"] / run.span_s)
                        row["lost"].append(float(len(run) - run.kinds["answered"]))
                    capacity = capacity or found[modes[0], VARIANCES[0]]["per_s"][0]
                    for number, share in enumerate(rates):
                        # Every mode gets the same arrivals.
                        same = np.random.default_rng([turn, number])
                        plan = _plan(texts[VARIANCES[0]], names, share * capacity, seconds, same)
                        run = open_loop(url, plan, timeout_s=60.0)
                        utility = run.utility_per_s(token_counts(plan.requests.texts, encoder), USEFUL_S)
                        curves[mode][0].append(share * capacity)
                        curves[mode][1].append(utility)
                progress.update(bar, advance=1)
    rows = []
    for (mode, variance), values in found.items():
        rates_seen = values["per_s"]
        rows.append(
            {
                "mode": mode,
                "policy": MODES[mode].get("policy", "fcfs"),
                "length_variance": variance,
                "requests_per_s": median(rates_seen),
                "spread": f"{min(rates_seen):.1f}-{max(rates_seen):.1f}",
                "unanswered": int(sum(values["lost"])),
                "computed_over_real_tokens": _computed(mode, lengths[variance]),
            }
        )
    for mode, (offered, reached) in curves.items():
        rows += [{"mode": mode, "offered_per_s": o, "utility_per_s": u} for o, u in zip(offered, reached, strict=True)]
    if picture is not None and rates:
        series = {mode: _by_rate(curves[mode]) for mode in modes}
        line_chart(
            picture,
            series,
            title="Utility by arrival rate (answers within 1 s), lengths 3-100, mean 20, variance 20",
            x_label="requests offered (1/s)",
            y_label="utility (1/s)",
        )
    about = {"batch": BATCH, "rounds": rounds, "seconds": seconds, "tenants": len(names)}
    return Report("batching", {**about, "base": served.base.config.name, "protocol": "grpc"}, rows, _goals(rows))


def _requests(texts: Sequence[str], names: Sequence[str], count: int, rng: np.random.Generator) -> Requests:
    tenants = [names[i] for i in rng.integers(len(names), size=count)]
    return Requests(tenants, [texts[i % len(texts)] for i in range(count)], np.full(count, np.nan))


def _plan(
    texts: Sequence[str], names: Sequence[str], rate_per_s: float, seconds: float, rng: np.random.Generator
) -> Plan:
    times_s = PoissonArrivals(rate_per_s).times(seconds, rng)
    return Plan(times_s, _requests(texts, names, len(times_s), rng), seconds)


def _by_rate(curve: tuple[list[float], list[float]]) -> tuple[list[float], list[float]]:
    rates = sorted(set(curve[0]))
    return rates, [median(u for o, u in zip(curve[0], curve[1], strict=True) if o == rate) for rate in rates]


def _computed(mode: str, lengths: Any) -> float:
    """Tokens that a mode computes over those that are there, in batches of 64 drawn from the same lengths."""
    settings = MODES[mode]
    total = 0
    for start in range(0, len(lengths), BATCH):
        part = [int(n) for n in lengths[start : start + BATCH]]
        layouts = lay_out(settings["batching"], part, 100, None, settings.get("pad_to", 0))
        total += sum(layout.size for layout in layouts)
    return total / float(lengths.sum())


def _goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    goals = []
    by = {(row["mode"], row.get("length_variance")): row for row in rows if "requests_per_s" in row}
    for variance in VARIANCES:
        packed = by.get(("packed", variance))
        if packed is None:
            continue
        for mode in ("naive", "naive-100"):
            if other := by.get((mode, variance)):
                ratio = packed["requests_per_s"] / other["requests_per_s"]
                share = ratio / (other["computed_over_real_tokens"] / packed["computed_over_real_tokens"])
                text = f"share of the saved tokens that packed turns into speed against {mode}, variance {variance:g}"
                goals.append(Goal(f"packed-{mode}-{variance:g}", text, LEAST_SHARE, share, "", "higher"))
                if mode == "naive-100":
                    text = f"packed over naive with rows of 100, variance {variance:g}"
                    goals.append(Goal(f"fixed-row-{variance:g}", text, FIXED_ROW_GOAL, ratio, "x", "higher"))
        if turbo := by.get(("turbo", variance)):
            ratio = packed["requests_per_s"] / turbo["requests_per_s"]
            goals.append(
                Goal(f"turbo-{variance:g}", f"packed over turbo, variance {variance:g}", 1.0, ratio, "x", "higher")
            )
    return goals
