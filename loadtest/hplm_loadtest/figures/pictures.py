"""Pictures of results. The file's ending says what it becomes: .svg or .png."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from hplm.errors import ConfigError

# Okabe and Ito's colours, told apart by colour-blind readers too; markers and dashes tell them apart in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":")

# Bars with their values written level.
MOST_LEVEL = 16

Numbers = Sequence[float]


def line_chart(
    path: Path,
    series: Mapping[str, tuple[Numbers, Numbers]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log: bool = False,
    limit: tuple[str, float] | None = None,
) -> None:
    """Name -> (x, y) as lines with a marker at each point; `limit` is a named horizontal line. Labels carry units."""
    figure, axes = _start(path, title, x_label, y_label)
    _lines(axes, series)
    if limit is not None:
        axes.axhline(limit[1], color="#666666", linewidth=1, linestyle=":", label=limit[0])
    if log:
        axes.set_xscale("log")
        points = sorted({value for x, _ in series.values() for value in x})
        axes.set_xticks(points, [f"{value:,g}" for value in points])
        axes.minorticks_off()
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=0)
    _finish(path, figure, named=len(series) > 1 or limit is not None)


def line_charts(
    path: Path,
    charts: Mapping[tuple[str, str], Mapping[str, tuple[Numbers, Numbers]]],
    *,
    title: str,
    x_label: str,
) -> None:
    """(Title, label of y) -> lines of the same names, as `line_chart` takes them; two charts in a row, one legend for all."""
    check_picture(path)
    rows = (len(charts) + 1) // 2
    figure = Figure(figsize=(9.5, 3.4 * rows + 0.6), layout="constrained")
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    grid = figure.subplots(rows, 2, squeeze=False).flat
    for axes, ((name, y_label), series) in zip(grid, charts.items(), strict=False):
        _dress(axes, name, x_label, y_label)
        _lines(axes, series)
        axes.set_ylim(bottom=0)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize=9
    )
    save(path, figure)


def cdf(path: Path, samples: Mapping[str, Any], *, title: str) -> None:
    """Name -> response times in ms, as the share of requests that took at most x."""
    figure, axes = _start(path, title, "response time (ms)", "share of requests")
    for index, (name, values) in enumerate(samples.items()):
        axes.step(*shares_up_to(values), where="post", label=name, **_look(index))
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    _finish(path, figure, named=len(samples) > 1)


def shares_up_to(values: Any) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Of `k` values that are not below 0: `x` and shares `[k + 1]` of those up to `x`, none up to 0."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    return np.append(0.0, ordered), np.arange(len(ordered) + 1) / max(len(ordered), 1)


def bars(
    path: Path, groups: Sequence[str], series: Mapping[str, Numbers], *, title: str, x_label: str, y_label: str
) -> None:
    """Name -> one value a group, bars of a group side by side, each with its value above it."""
    figure, axes = _start(path, title, x_label, y_label)
    width = 0.8 / max(len(series), 1)
    # Side by side the values over so many would touch each other.
    turn = 90 if len(groups) * len(series) > MOST_LEVEL else 0
    for index, (name, values) in enumerate(series.items()):
        places = np.arange(len(groups)) + (index - (len(series) - 1) / 2) * width
        drawn = axes.bar(places, values, width * 0.94, label=name, color=COLOURS[index % len(COLOURS)])
        axes.bar_label(drawn, fmt="%.3g", fontsize=8, padding=2, rotation=turn)
    axes.set_xticks(np.arange(len(groups)), groups)
    axes.margins(y=0.2 if turn else 0.12)
    _finish(path, figure, named=len(series) > 1)


def check_picture(path: Path | None) -> None:
    """Before hours of measuring. Raises ConfigError where the ending is neither .svg nor .png."""
    if path is not None and path.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"{path}: a picture's name ends in .svg or .png")


def _start(path: Path, title: str, x_label: str, y_label: str) -> tuple[Figure, Any]:
    check_picture(path)
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.add_subplot()
    _dress(axes, title, x_label, y_label)
    return figure, axes


def _dress(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _lines(axes: Any, series: Mapping[str, tuple[Numbers, Numbers]]) -> None:
    for index, (name, (x, y)) in enumerate(series.items()):
        axes.plot(x, y, label=name, **_look(index), marker=MARKERS[index % len(MARKERS)], markersize=5)


def _look(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)], "linewidth": 1.8}


def _finish(path: Path, figure: Figure, *, named: bool) -> None:
    if named:
        # Below: within, it would lie on lines.
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    save(path, figure)


def save(path: Path, figure: Figure) -> None:
    """As the file that `path` names; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a date the same figures give the same file.
    figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
