"""Turns load runs into rows and goals of a benchmark result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from hplm.reporting.benchmark_result import Goal
from hplm_loadtest.scenarios.outcomes import KEPT_UP_SHARE, Run

# How the rounds of a column become one value; every other column has the median. A loss in one round counts, and so does
# one round in which the generator fell behind.
COMBINE: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("requests", "refused", "failed", "lost"), sum),
    "errors": lambda counts: dict(sum(map(Counter, counts), Counter())),
    "kept_up": min,
    "lag_p99_ms": max,
}


def combine_rounds(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one row for several rounds with the same columns, see `COMBINE`."""
    return {key: COMBINE.get(key, median)([row[key] for row in rounds]) for key in rounds[0]}


def combine_runs(runs: Sequence[Run]) -> dict[str, Any]:
    """Return one row for the runs of several rounds, with the spread of their 99th percentiles."""
    rows = [run.row() for run in runs]
    p99_ms = [row["p99_ms"] for row in rows]
    return {**combine_rounds(rows), "p99_spread": f"{min(p99_ms):.1f}-{max(p99_ms):.1f} ms"}


def load_goals(name: str, rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Return the two goals that every load has: no request lost or failed, and a generator that kept up.

    If a goal is missed, the other figures of the load mean little.
    """
    bad = sum(row["lost"] + row.get("failed", 0) for row in rows)
    return [Goal(f"{name}-lost", "requests lost or failed", 0, bad, "requests", "lower"), kept_up_goal(name, rows)]


def kept_up_goal(name: str, rows: Sequence[Mapping[str, Any]]) -> Goal:
    """Return the goal that the generator sent on time in the load of every row."""
    share = min(row["kept_up"] for row in rows)
    return Goal(f"{name}-kept-up", "share sent within 20 ms of plan", KEPT_UP_SHARE, share, "", "higher")


def unanswered_goal(name: str, runs: Sequence[Run]) -> Goal:
    """Return the goal that the closed loops got an answer to every request."""
    bad = sum(len(run) - run.kinds["answered"] for run in runs)
    return Goal(f"{name}-lost", "requests lost or failed", 0, bad, "requests", "lower")
