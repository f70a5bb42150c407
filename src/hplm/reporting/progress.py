"""How long work tells how far it is: bars, or a callback for whoever is no terminal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import accumulate
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_EVERY_S = 60.0
# A step of a conversion may take a minute; rich's own half minute would see too few to estimate from.
ESTIMATE_FROM_S = 600.0

# Called often with the step and how much of it is done, 0 to 1. It may raise JobCancelledError, which ends the work.
Report = Callable[[str, float], None]


def silent(step: str, progress: float) -> None:
    """A Report that tells nobody."""


def bar_report(bars: Progress, name: str, *, of_all: bool = False) -> Report:
    """A Report that shows a bar a step, in percent; `of_all`: a single one, where it is told how much of all steps is done."""
    shown: dict[str, TaskID] = {}

    def report(step: str, progress: float) -> None:
        about = "" if of_all else step
        if about not in shown:
            shown[about] = bars.add_task("", total=100)
        bars.update(shown[about], description=f"{name}: {step}", completed=100 * progress)

    return report


def shared_out(report: Report, weights: Mapping[str, float], begin: float = 0.0) -> Report:
    """A Report of steps' own progress, told as that of all: what lies behind `begin` is shared out to them by `weights`."""
    starts = dict(zip(weights, accumulate(weights.values(), initial=0.0), strict=False))
    whole = sum(weights.values())

    def told(step: str, progress: float) -> None:
        report(step, begin + (1 - begin) * (starts[step] + weights[step] * progress) / whole)

    return told


class Bars(Progress):
    """Bars where standard error is a terminal; elsewhere, as in a log, a line every `line_every_s` for each under way."""

    def __init__(self, console: Console, line_every_s: float = LINE_EVERY_S, *, transient: bool = False) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=ESTIMATE_FROM_S,
            transient=transient,
        )
        self._line_every_s = line_every_s
        self._stopped = threading.Event()

    def start(self) -> None:
        super().start()
        if not self.console.is_terminal:
            threading.Thread(target=self._write_lines, name="hplm-progress", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        if self.live.transient:
            self.live.stop()
        else:  # which in a log ends the line of the last bar too
            super().stop()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """As rich's, but a bar that goes back begins anew, for the next piece of work.

        One that was full once would say for ever that nothing is left, and a log would hear no more of it.
        """
        completed = changes.get("completed")
        if completed is not None and completed < self._tasks[task_id].completed:
            self.reset(task_id)
        super().update(task_id, **changes)

    def _write_lines(self) -> None:
        while not self._stopped.wait(self._line_every_s):
            for task in self.tasks:
                if task.visible and task.started and not task.finished:
                    self.console.print(_line(task), highlight=False, markup=False, soft_wrap=True)


def _line(task: Task) -> str:
    total = "?" if task.total is None else f"{task.total:,.0f}"
    line = f"{task.description} {task.completed:,.0f}/{total} after {_time(task.elapsed or 0.0)}"
    left_s = task.time_remaining
    return line if left_s is None else f"{line}, about {_time(left_s)} left"


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def progress_bars(*, transient: bool = False) -> Progress:
    """Bars on standard error, with what is done, how long it took and an estimate of what is left.

    `transient`: at the end nothing of them stays, nor an empty line in their place.
    """
    return Bars(Console(stderr=True), transient=transient)
