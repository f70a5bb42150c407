"""How long work tells how far it is: bars, or a callback for whoever is no terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# Called often with the step and how much of it is done, 0 to 1. It may raise JobCancelledError, which ends the work.
Report = Callable[[str, float], None]


def silent(step: str, progress: float) -> None:
    """A Report that tells nobody."""


def bar_report(bars: Progress, name: str) -> Report:
    """A Report that shows a bar a step, in percent."""
    shown: dict[str, TaskID] = {}

    def report(step: str, progress: float) -> None:
        if step not in shown:
            shown[step] = bars.add_task(f"{name}: {step}", total=100)
        bars.update(shown[step], completed=100 * progress)

    return report


def progress_bars() -> Progress:
    """Bars on standard error, with what is done, how long it took and an estimate of what is left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
