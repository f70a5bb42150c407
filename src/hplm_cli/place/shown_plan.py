"""How plans and simulated answers are printed for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hplm.placement.outcomes import Outcomes
from hplm.placement.plan import Plan
from hplm.reporting.terminal_text import say


def show_plan(plan: Plan) -> None:
    """Print what a plan places where, and what was predicted."""
    for line in plan_lines(plan):
        say(line)


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines of a plan."""
    used = sum(len(group.devices) for group in plan.groups)
    total = sum(node.devices for node in plan.nodes)
    bases = sorted({base.base for group in plan.groups for base in group.bases})
    count = "1 base" if len(bases) == 1 else f"{len(bases)} bases"
    yield f"{count} on {used} of {total} devices of {len(plan.nodes)} nodes; {plan.algorithm}"
    rows = [("node", "devices", "bases (layers of each stage)", "busy")]
    for group, busy in zip(plan.groups, plan.prediction.busy, strict=True):
        held = ", ".join(f"{base.base} ({'+'.join(map(str, base.cut))})" for base in group.bases)
        rows.append((group.node, " -> ".join(map(str, group.devices)), held, f"{busy:.0%}"))
    yield from aligned(rows)
    left_out = [base for base in plan.assumptions.rates if base not in bases]
    if left_out:
        yield f"on no device: {', '.join(left_out)}"
    assumed = plan.assumptions
    yield f"workload: {assumed.source}, {plan.prediction.requests:,} requests in {assumed.duration_s:g} s"
    yield f"predicted: {plan.prediction.attainment:.2%} of the requests are answered by their deadline; {checked(plan)}"
    for base in sorted(set(bases) - plan.prediction.of_base.keys()):
        yield f"  {base}: no request in the simulated workload, so no prediction: give a longer --seconds"
    for base, share in sorted(plan.prediction.of_base.items()):
        yield f"  {base}: {share:.2%} of {assumed.rates[base]:g} requests/s within {assumed.deadline_ms[base]:g} ms"
    if len(plan.nodes) > 1:
        yield (
            "every base is served if any one node fails"
            if plan.survives_any_node
            else "some base is lost if its node fails"
        )
    if plan.tenants.hot:
        yield f"{len(plan.tenants.hot)} tenants are hot: several nodes answer each of them"


def checked(plan: Plan) -> str:
    """Return the words for the last check of a plan."""
    if plan.check is None:
        return "unchecked: `hplm place check` measures it"
    check = plan.check
    return (
        f"checked {check.at} on {check.where}: predicted {check.predicted:.2%}, measured {check.measured:.2%}, "
        f"error {check.error:.3f}"
    )


def outcome_lines(outcomes: Outcomes, outside_ms: Mapping[str, float]) -> Iterator[str]:
    """Yield how the requests of each base ended."""
    requests = outcomes.requests
    rows: list[tuple[str, ...]] = [("base", "requests", "in time", "mean ms", "p99 ms")]
    for number, name in enumerate(requests.names):
        of_base = requests.models == number
        if of_base.any():
            answered = outcomes.latencies_s[of_base & ~np.isnan(outcomes.ended_s)]
            more_ms = outside_ms.get(name, 0.0)
            times = [f"{1000 * value + more_ms:.1f}" for value in _mean_and_p99(answered)] or ["-", "-"]
            rows.append((name, f"{int(of_base.sum()):,}", f"{float(outcomes.in_time[of_base].mean()):.2%}", *times))
        else:
            rows.append((name, "0", "-", "-", "-"))
    yield from aligned(rows)
    yield f"{outcomes.attainment:.2%} of {len(requests):,} requests are answered by their deadline"


def comparison_lines(predicted: Outcomes, measured: Outcomes, outside_ms: Mapping[str, float]) -> Iterator[str]:
    """Yield the predicted beside the measured answers to the same requests, for each base."""
    requests = predicted.requests
    rows: list[tuple[str, ...]] = [
        ("base", "requests", "predicted in time", "measured in time", "predicted ms", "measured ms")
    ]
    for number, name in enumerate(requests.names):
        of_base = requests.models == number
        if of_base.any():
            shares = [f"{float(each.in_time[of_base].mean()):.2%}" for each in (predicted, measured)]
            both = of_base & ~np.isnan(predicted.ended_s) & ~np.isnan(measured.ended_s)
            mean_ms = [
                1000 * float(each.latencies_s[both].mean()) if both.any() else np.nan for each in (predicted, measured)
            ]
            mean_ms[0] += outside_ms.get(name, 0.0)
            times = ["-" if np.isnan(ms) else f"{ms:.1f}" for ms in mean_ms]
            rows.append((name, f"{int(of_base.sum()):,}", *shares, *times))
    yield from aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows of a table with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _mean_and_p99(seconds: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[float]:
    return [float(seconds.mean()), float(np.quantile(seconds, 0.99))] if len(seconds) else []
