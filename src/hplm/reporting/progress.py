"""The progress of long work: bars on a terminal, or a progress callback."""

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

# Seconds between two lines in a log, which shows no bars.
LINE_EVERY_S = 60.0
# Seconds of progress from which the remaining time is estimated. A step of a conversion may take a minute, so rich's default
# of half a minute would see too few steps.
ESTIMATE_FROM_S = 600.0

# A progress callback: called often with the step's name and the done share of it, 0 to 1. It may raise JobCancelledError, which
# ends the work.
Report = Callable[[str, float], None]


def silent(step: str, progress: float) -> None:
    """Ignore the progress."""


def bar_report(bars: Progress, name: str, *, of_all: bool = False) -> Report:
    """Return a progress callback that shows a bar in percent for each step.

    With `of_all` there is one bar, and the callback gets the done share of all steps.
    """
    shown: dict[str, TaskID] = {}

    def report(step: str, progress: float) -> None:
        bar = "" if of_all else step
        if bar not in shown:
            shown[bar] = bars.add_task("", total=100)
        bars.update(shown[bar], description=f"{name}: {step}", completed=100 * progress)

    return report


def shared_out(report: Report, weights: Mapping[str, float], begin: float = 0.0) -> Report:
    """Return a progress callback that turns the progress of single steps into the progress of all steps for `report`.

    The steps share the range from `begin` to 1 by their `weights`.
    """
    starts = dict(zip(weights, accumulate(weights.values(), initial=0.0), strict=False))
    whole = sum(weights.values())

    def report_step(step: str, progress: float) -> None:
        report(step, begin + (1 - begin) * (starts[step] + weights[step] * progress) / whole)

    return report_step


class Bars(Progress):
    """Bars on a terminal. Elsewhere, for example in a log, a line for each unfinished task every `line_every_s` seconds."""

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
        else:  # this also ends the last bar's line in a log
            super().stop()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Update a bar as rich does, but restart a bar that goes back, for the next piece of work.

        Otherwise a bar that was full once would say for ever that nothing is left, and a log would get no more lines.
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
    """Return bars on standard error with the done part, the time taken and an estimate of the time left.

    With `transient` the bars leave nothing behind at the end, not even an empty line.
    """
    return Bars(Console(stderr=True), transient=transient)
