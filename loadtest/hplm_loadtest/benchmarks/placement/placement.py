"""The benchmark `hplm bench placement`: AlpaServe's figures, the fidelity of the prediction, and the time of the search."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from hplm.errors import ConfigError
from hplm.reporting.benchmark_result import Goal, Report
from hplm_loadtest.benchmarks.placement.figure import Effort, FigureResult

# The module and the function of each figure, in the order in which they run.
FIGURES: dict[str, tuple[str, str]] = {
    "2": ("two_models", "two_models"),
    "4": ("eight_models", "memory_budget"),
    "5": ("eight_models", "arrival_rate"),
    "6": ("eight_models", "burstiness"),
    "7": ("eight_models", "deadline_scale"),
    "8": ("parallel_overhead", "overhead_parts"),
    "9": ("parallel_overhead", "scaling"),
    "10": ("two_models", "queueing_theory"),
    "16": ("parallel_overhead", "automatic_cut"),
    "12": ("end_to_end", "end_to_end"),
    "14": ("robustness", "robustness"),
    "15": ("batching_gain", "batching_gain"),
    "17": ("ablation", "ablation"),
    "search-time": ("search_time", "search_time"),
    "emulated": ("emulated_fidelity", "emulated_fidelity"),
    "fidelity": ("device_fidelity", "device_fidelity"),
}
_FOLDER = "hplm_loadtest.benchmarks.placement"


def placement(
    figures: Sequence[str], *, quick: bool, trace: Path | None, pictures: Path | None, models: Path
) -> Report:
    """Reproduce figures, and return their rows and goals. Raises ConfigError for a figure that there is not."""
    chosen = [name for name in FIGURES if name in figures]
    if unknown := sorted(set(figures) - set(FIGURES)):
        raise ConfigError(f"--figure: one of {', '.join(FIGURES)} was expected, got {unknown[0]!r}")
    console = Console(stderr=True)
    effort = Effort(quick, trace, models, tell=lambda line: console.print(line, highlight=False))
    results, seconds = [], {}
    for name in chosen:
        module, function = FIGURES[name]
        make: Callable[[Effort], FigureResult] = getattr(importlib.import_module(f"{_FOLDER}.{module}"), function)
        started_s = time.monotonic()
        result = make(effort)
        seconds[name] = round(time.monotonic() - started_s, 1)
        console.print(f"Fig. {name}: {result.title} ({seconds[name]} s)", highlight=False)
        for said in result.statements:
            mark = "holds" if said.holds else "DOES NOT HOLD"
            console.print(f"  {mark}: {said.paper}: {said.ours}", highlight=False)
        if pictures is not None:
            result.draw(pictures)
        results.append(result)
    settings = {
        "quick": quick,
        "trace": None if trace is None else str(trace),
        "models": str(models),
        "seconds": seconds,
    }
    rows = [row for result in results for row in result.all_rows()]
    return Report("placement", settings, rows, _goals(results))


def _goals(results: Sequence[FigureResult]) -> list[Goal]:
    goals = []
    for result in results:
        if result.statements:
            lost = sum(not said.holds for said in result.statements)
            text = f"Fig. {result.figure}: statements that do not hold, of {len(result.statements)}"
            goals.append(Goal(f"placement-figure-{result.figure}", text, 0, lost, "statements", "lower"))
        goals += [_goal(name, value) for name, value in result.numbers.items() if name in _LIMITS]
    return goals


# Named values of figures that have a goal: words, goal, unit.
_LIMITS: dict[str, tuple[str, float, str]] = {
    "search_s": ("search for 60 models on 64 devices", 600.0, "s"),
    "tenants_s": ("placement of 10,000 tenants", 60.0, "s"),
    "emulated_error": ("largest error of the prediction by live queues, emulated devices", 0.02, ""),
    "device_error": ("largest error of the prediction, devices that compute", 0.05, ""),
    "queueing_error": ("largest difference of the simulator from the M/D/1 formulas", 0.01, ""),
}


def _goal(name: str, value: float) -> Goal:
    text, limit, unit = _LIMITS[name]
    return Goal(f"placement-{name.replace('_', '-')}", text, limit, value, unit, "lower")
