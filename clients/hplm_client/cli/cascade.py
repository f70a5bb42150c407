"""How the commands show a tenant's cascade: its levels and promise, the table of candidates, and a drawing of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hplm.core.numbers import rounded_down
from hplm.reporting.terminal_text import visible
from hplm_client.manage.answers import Cascade

# Columns and lines of the drawing, without its axes.
WIDTH, HEIGHT = 60, 14
# Marks of combinations of levels, in the order of the table; `*` is the candidate that was chosen.
MARKS = "abcdefghijklmnopqrstuvwxyz"
CHOSEN = "*"


def cascade_lines(cascade: Cascade) -> Iterator[str]:
    """Yield the lines on a cascade: levels, promise, whether the promise is in force."""
    plan = cascade.plan
    if plan is None:
        yield f"cascade: out of force; no version keeps its plan over {', '.join(cascade.levels)}"
        return
    state = (
        "in force"
        if cascade.in_force
        else f"out of force: its versions over {', '.join(cascade.lost)} are no longer served"
    )
    yield f"cascade: {' -> '.join(_level(level) for level in plan['levels'])} ({state})"
    if unused := [base for base in cascade.levels if base not in {level["base"] for level in plan["levels"]}]:
        yield f"trained and not used: {', '.join(unused)}"
    promise = plan["promise"]
    yield (
        f"promise: accuracy {rounded_down(promise['accuracy']):.3f} "
        f"({promise['right']:,} of {promise['examples']:,} examples right), "
        f"mean latency {promise['latency_ms']:.1f} ms expected; asked for: {_asked(promise)}"
    )
    if len(plan["levels"]) > 1:
        above = "no text" if plan["deterministic"] else "a few texts"
        late = "answered by the level before" if plan["on_late"] == "answer" else "refused"
        yield f"re-routed: texts up to the cut-off, and {above} above it; texts for which the next level is late: {late}"


def candidate_lines(candidates: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table of the candidates and a drawing of accuracy by latency."""
    marks = _marks(candidates)
    rows = [["", "levels", "accuracy", "mean ms", "p75 ms", "re-routed", "cut-off", "slope", "alpha"]]
    for one in sorted(candidates, key=lambda row: (row["latency_ms"], -row["accuracy"])):
        is_cascade = len(one["levels"]) > 1
        settings = [f"{one[key]:g}" if is_cascade else "-" for key in ("cut_off", "slope", "alpha")]
        rerouted = f"{100 * one['rerouted']:.0f}%" if is_cascade else "-"
        numbers = [f"{one['accuracy']:.3f}", f"{one['latency_ms']:.1f}", f"{one['p75_ms']:.1f}", rerouted]
        mark = CHOSEN if one["chosen"] else marks[_combination(one)]
        rows.append([mark, _combination(one), *numbers, *settings])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield visible(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), is_line=True
        )
    yield ""
    yield from _drawing(candidates, marks)


def _drawing(candidates: Sequence[Mapping[str, Any]], marks: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a drawing with latency from left to right and accuracy upwards."""
    if not candidates:
        return
    latencies, accuracies = ([one[key] for one in candidates] for key in ("latency_ms", "accuracy"))
    left, right, low, high = min(latencies), max(latencies), min(accuracies), max(accuracies)
    cells = [[" "] * WIDTH for _ in range(HEIGHT)]
    # The chosen candidate is drawn last, over others at its place.
    for one in sorted(candidates, key=lambda row: bool(row["chosen"])):
        column = _place(one["latency_ms"], left, right, WIDTH)
        row = HEIGHT - 1 - _place(one["accuracy"], low, high, HEIGHT)
        cells[row][column] = CHOSEN if one["chosen"] else marks[_combination(one)]
    yield "accuracy on dev"
    for number, line in enumerate(cells):
        label = f"{high:.3f}" if number == 0 else f"{low:.3f}" if number == HEIGHT - 1 else ""
        yield f"{label:>6} |{''.join(line)}".rstrip()
    yield f"{'':6} +{'-' * WIDTH}"
    yield f"{'':8}{f'{left:.1f}'.ljust(WIDTH - 12)}{f'{right:.1f} ms mean':>12}"
    yield f"{CHOSEN} chosen; " + "; ".join(f"{mark} {visible(levels, is_line=True)}" for levels, mark in marks.items())


def _place(value: float, low: float, high: float, cells: int) -> int:
    """Return the cell of a value between `low` and `high`; the first if all values are equal."""
    return round((value - low) / (high - low) * (cells - 1)) if high > low else 0


def _marks(candidates: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    combinations = dict.fromkeys(map(_combination, candidates))
    return {levels: MARKS[number % len(MARKS)] for number, levels in enumerate(combinations)}


def _combination(candidate: Mapping[str, Any]) -> str:
    return " -> ".join(candidate["levels"])


def _level(level: Mapping[str, Any]) -> str:
    return f"{level['base']} {level['number']}"


def _asked(promise: Mapping[str, Any]) -> str:
    asked = []
    if promise["target_accuracy"] is not None:
        asked.append(f"accuracy {promise['target_accuracy']:g}")
    if promise["target_latency_ms"] is not None:
        asked.append(f"{promise['target_latency_ms']:g} ms")
    return " within ".join(asked) or "the fastest within 1 point of the best on dev"
