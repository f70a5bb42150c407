"""Fig. 12: attainment of AlpaServe's search, selective replication and Clockwork++, over four variables (AlpaServe 6.2).

The Azure function traces of the paper are not to be had. In their place stands a trace of a conversation service, dealt to the
models one after another (as steady as MAF1), or by a power law and with a higher cv (as skewed and bursty as MAF2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hplm.placement.table1 import ModelSet
from hplm_loadtest.benchmarks.placement.figure import (
    TARGET,
    Chart,
    Effort,
    FigureResult,
    Statement,
    crossing,
    first_reaching,
)
from hplm_loadtest.benchmarks.placement.systems import (
    CLOCKWORK,
    REPLICATED,
    SEARCHED,
    Asked,
    Kind,
    Traffic,
    Variable,
    attainments,
)

SECONDS = 600.0
Axis = Variable | Literal["devices"]
# What the paper claims at 99 %: fewer devices, a higher rate, a higher cv, a tighter deadline.
PAPER_RATIOS: dict[Axis, float] = {"devices": 2.3, "rate": 10.0, "cv": 6.0, "deadline scale": 2.5}
# A system that answers at most so much less counts as equal: about one request in 300.
EQUAL = 0.003


@dataclass(frozen=True)
class Column:
    """A column of the figure: its workload and number of devices by default, and the values of each variable."""

    traffic: Traffic
    devices: int
    values: dict[Axis, Sequence[float]]

    def __str__(self) -> str:
        return f"{self.traffic.models}, {self.traffic.kind}"


def columns(effort: Effort) -> list[Column]:
    """Return the sets S1 to S3 under the steady and under the skewed workload."""
    scales = (1.0, 2.0, 3.0, 5.0, 10.0, 20.0)
    found = []
    cells: list[tuple[Kind, float, Sequence[float]]] = [
        ("steady", 2.0, (1, 2, 4, 8, 16, 24)),
        ("skewed", 4.0, (1, 2, 4, 6, 12, 24)),
    ]
    sets: list[tuple[ModelSet, int, float, Sequence[int]]] = [
        ("S1", 24, 40.0, (8, 12, 16, 24, 40, 64)),
        ("S2", 48, 40.0, (24, 32, 48, 64, 96, 128)),
        ("S3", 48, 40.0, (16, 24, 32, 48, 64, 96)),
    ]
    for kind, cv, cvs in cells:
        for models, devices, rate, counts in sets:
            traffic = Traffic(models, kind, rate, cv, 5.0, SECONDS * (0.3 if effort.quick else 1.0), effort.trace)
            values: dict[Axis, Sequence[float]] = {
                "devices": counts,
                "rate": [rate * each for each in (0.125, 0.25, 0.5, 1, 2, 3)],
                "cv": cvs,
                "deadline scale": scales,
            }
            found.append(Column(traffic, devices, values))
    return [column for column in found if column.traffic.models == "S2"] if effort.quick else found


def _asked(column: Column, variable: Axis, value: float, effort: Effort, number: int) -> Asked:
    if variable == "devices":
        return Asked(column.traffic, round(value), (effort.seed, number), effort.quick)
    return Asked(column.traffic.with_value(variable, value), column.devices, (effort.seed, number), effort.quick)


def end_to_end(effort: Effort) -> FigureResult:
    """Compute all columns and rows of the figure."""
    charts, statements = [], []
    best: dict[Axis, float] = {}
    cells = [
        (column, variable, effort.points(column.values[variable]))
        for column in columns(effort)
        for variable in PAPER_RATIOS
    ]
    asked = [
        _asked(column, variable, value, effort, number)
        for number, (column, variable, x) in enumerate(cells)
        for value in x
    ]
    found = iter(effort.each(attainments, asked, "Fig. 12"))
    ahead = True
    for column, variable, x in cells:
        points = [next(found) for _ in x]
        curves = {name: [point[name] for point in points] for name in (SEARCHED, REPLICATED, CLOCKWORK)}
        charts.append(Chart(str(column), variable, "share in time", x, curves))
        ahead = ahead and all(point[SEARCHED] >= max(point[REPLICATED], point[CLOCKWORK]) - EQUAL for point in points)
        ratio, words = _ratio(variable, x, curves)
        statements.append(
            Statement(
                f"{column}: at 99 %, up to {PAPER_RATIOS[variable]} x better in {variable}",
                words,
                ratio is None or ratio >= 1.0,
            )
        )
        if ratio is not None:
            best[variable] = max(best.get(variable, 0.0), ratio)
    statements.append(
        Statement(
            "the search attains at least as much as both baselines everywhere",
            f"at most {EQUAL:.1%} less at each of {len(asked)} points"
            if ahead
            else "not at each point, see the curves",
            ahead,
        )
    )
    for variable, papers in PAPER_RATIOS.items():
        if variable in best:
            statements.append(
                Statement(
                    f"largest ratio in {variable} at 99 %: {papers} x",
                    f"{best[variable]:.2f} x against the better baseline, where a baseline reaches 99 % in the range",
                    best[variable] > 1,
                )
            )
    return FigureResult(
        "12",
        "attainment of three systems",
        statements,
        charts,
        numbers={f"ratio {name}": each for name, each in best.items()},
    )


def _ratio(variable: Axis, x: Sequence[float], curves: dict[str, list[float]]) -> tuple[float | None, str]:
    """Return how much better the search is at 99 % than the better baseline, None if one of them has no such value."""
    is_rising = variable in ("devices", "deadline scale")
    find = first_reaching if is_rising else crossing
    at = {name: find(x, values, TARGET) for name, values in curves.items()}
    shown = ", ".join(f"{name} {'never' if value is None else f'{value:.3g}'}" for name, value in at.items())
    others = [value for name, value in at.items() if name != SEARCHED and value is not None]
    ours = at[SEARCHED]
    if ours is None:
        return None if not others else 0.0, shown
    if not others:
        return None, f"{shown}: only the search reaches 99 %"
    ratio = min(others) / ours if is_rising else ours / max(others)
    cut = not is_rising and ours == x[-1]
    return ratio, f"{shown}: {'at least ' if cut else ''}{ratio:.2f} x"
