"""The form of a reproduced figure: curves, and statements of the paper beside ours."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hplm.reporting.charts import line_charts
from hplm_loadtest.benchmarks.served_repository import DEMO

# The share of requests in time that the paper asks for.
TARGET = 0.99
# The number of points of a curve, and of a quick look's.
POINTS, QUICK_POINTS = 6, 3

Tell = Callable[[str], None]
Point = TypeVar("Point")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Effort:
    """How much a figure computes. `scale` multiplies the length of simulated workloads.

    `trace` is a CSV trace of arrivals. `models` is the repository of a base that is really served.
    """

    quick: bool = False
    trace: Path | None = None
    models: Path = DEMO
    seed: int = 59
    tell: Tell = lambda line: None

    @property
    def scale(self) -> float:
        return 0.1 if self.quick else 1.0

    def points(self, values: Sequence[float]) -> list[float]:
        """Return the values of a curve's axis: all, or for a quick look the first, the middle and the last."""
        if not self.quick or len(values) <= QUICK_POINTS:
            return list(values)
        return [values[0], values[len(values) // 2], values[-1]]

    def each(self, compute: Callable[[Point], Found], points: Sequence[Point], words: str) -> list[Found]:
        """Compute points in processes, as many as this process may use cores, and tell how many are done."""
        # No fork: threads of the parent, such as those of a progress bar, would not exist in the child.
        processes = multiprocessing.get_context("forkserver")
        found = []
        with ProcessPoolExecutor(min(len(points), len(os.sched_getaffinity(0))), processes) as pool:
            for number, one in enumerate(pool.map(compute, points), 1):
                self.tell(f"{words}: {number} of {len(points)}")
                found.append(one)
        return found

    def rng(self, number: int = 0) -> np.random.Generator:
        """Return a random source. Equal numbers give equal sources, so that variants are asked the same requests."""
        return np.random.default_rng([self.seed, number])


@dataclass(frozen=True)
class Statement:
    """A claim of the paper, our numbers for it, and whether our numbers have the paper's shape."""

    paper: str
    ours: str
    holds: bool


@dataclass(frozen=True)
class Chart:
    """The curves of one subfigure: y values over `x`, by the name of the variant."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[float]
    curves: Mapping[str, Sequence[float]]

    def rows(self, figure: str) -> list[dict[str, Any]]:
        """Return a row for each point, with a column for each curve."""
        return [
            {
                "figure": figure,
                "chart": self.title,
                self.x_label: x,
                **{name: values[number] for name, values in self.curves.items()},
            }
            for number, x in enumerate(self.x)
        ]


@dataclass(frozen=True)
class FigureResult:
    """A reproduced figure. `rows` are tables that are no curves. `numbers` are named values for goals and documentation."""

    figure: str
    title: str
    statements: Sequence[Statement]
    charts: Sequence[Chart] = ()
    rows: Sequence[Mapping[str, Any]] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)

    def all_rows(self) -> list[dict[str, Any]]:
        """Return the statements, the points of all curves, and the other rows."""
        said = [
            {
                "figure": self.figure,
                "paper": each.paper,
                "ours": each.ours,
                "shape holds": "yes" if each.holds else "NO",
            }
            for each in self.statements
        ]
        points = [row for chart in self.charts for row in chart.rows(self.figure)]
        return [*said, *points, *({"figure": self.figure, **row} for row in self.rows)]

    def draw(self, folder: Path) -> None:
        """Draw the curves to `figure-NUMBER.svg`, if there are any."""
        if not self.charts:
            return
        folder.mkdir(parents=True, exist_ok=True)
        charts = {
            (f"{chart.title} over {chart.x_label}", chart.y_label): {
                name: (list(chart.x), list(values)) for name, values in chart.curves.items()
            }
            for chart in self.charts
        }
        line_charts(folder / f"figure-{self.figure}.svg", charts, title=f"Fig. {self.figure}: {self.title}", x_label="")


def crossing(x: Sequence[float], y: Sequence[float], level: float) -> float | None:
    """Return the x at which a curve last has `level` or more, by linear interpolation to the next point.

    Return None if the curve is below the level from its first point on.
    """
    if y[0] < level:
        return None
    for number in range(1, len(x)):
        if y[number] < level:
            share = (y[number - 1] - level) / (y[number - 1] - y[number])
            return float(x[number - 1] + share * (x[number] - x[number - 1]))
    return float(x[-1])


def first_reaching(x: Sequence[float], y: Sequence[float], level: float) -> float | None:
    """Return the x from which a curve has `level` or more, by linear interpolation; None if it never has."""
    for number, value in enumerate(y):
        if value >= level:
            if number == 0:
                return float(x[0])
            share = (level - y[number - 1]) / (value - y[number - 1])
            return float(x[number - 1] + share * (x[number] - x[number - 1]))
    return None


def ratio_text(ours: float | None, other: float | None, paper: str) -> str:
    """Return in words how two values at the target compare."""
    if ours is None:
        return f"ours never reaches it (paper: {paper})"
    if other is None:
        return f"ours at {ours:.3g}, the baseline never (paper: {paper})"
    return f"{ours:.3g} against {other:.3g}, a ratio of {ours / other:.2f} (paper: {paper})"
