"""Draws charts of benchmark results to .svg or .png files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from hplm.errors import ConfigError
from hplm.reporting.benchmark_result import plain

# The colours of Okabe and Ito, which colour-blind readers can distinguish. Markers and dashes differ too, for grey prints.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":")

# With more bars than this, the values above the bars are turned by 90 degrees, or they would overlap.
MAX_LEVEL_VALUES = 16

# Letters of a legend's line that fit under a figure, with 8 for the sample of each line.
LEGEND_LETTERS = 88
# A line of more points has no markers, which would cover each other.
MOST_MARKERS = 40

# The empty part of an axis beyond its first and last point, so that the frame cuts no marker.
MARGIN = 0.04

Numbers = Sequence[float]


def line_chart(
    path: Path,
    series: Mapping[str, tuple[Numbers, Numbers]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log: bool = False,
    share: bool = False,
    limit: tuple[str, float] | None = None,
) -> None:
    """Draw series by name, each (x, y), as lines with a marker at each point.

    limit: a named horizontal line. Labels carry units. share: y is from 0 to 1, and the axis shows the range of the data.
    """
    figure, axes = _start(path, title, x_label, y_label)
    _lines(axes, series)
    if limit is not None:
        axes.axhline(limit[1], color="#666666", linewidth=1, linestyle=":", label=limit[0])
    if log:
        axes.set_xscale("log")
        points = sorted({value for x, _ in series.values() for value in x})
        axes.set_xticks(points, [plain(value) for value in points])
        axes.minorticks_off()
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(lambda value, _: plain(value))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        _fit_axes(axes, series, from_zero=not share)
    _finish(path, figure, named=len(series) > 1 or limit is not None)


def line_charts(
    path: Path,
    charts: Mapping[tuple[str, str], Mapping[str, tuple[Numbers, Numbers]]],
    *,
    title: str,
    x_label: str,
    from_zero: bool = True,
) -> None:
    """Draw charts by title and y label, each with series as in `line_chart`; two charts per row.

    If all charts have the same series there is one legend, otherwise each chart has its own.

    `from_zero`: the y axes begin at 0; else, and if they are percentages, they show the range of the data.
    """
    check_picture(path)
    rows = (len(charts) + 1) // 2
    figure = Figure(figsize=(9.5, 3.4 * rows + 0.6), layout="constrained")
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    grid = list(figure.subplots(rows, 2, squeeze=False).flat)
    for axes in grid[len(charts) :]:
        axes.set_axis_off()
    for axes, ((name, y_label), series) in zip(grid, charts.items(), strict=False):
        _style_axes(axes, name, x_label, y_label)
        _lines(axes, series)
        # A percentage of 95 to 100 would be a flat line at the top of an axis from 0.
        _fit_axes(axes, series, from_zero=from_zero and not y_label.endswith("(%)"))
    if len({tuple(series) for series in charts.values()}) > 1:
        for axes, series in zip(grid, charts.values(), strict=False):
            if len(series) > 1:
                axes.legend(frameon=False, fontsize=8)
    else:
        handles = grid[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    save(path, figure)


def cdf_chart(path: Path, samples: Mapping[str, Any], *, title: str) -> None:
    """Draw response times in ms by name, as the share of requests that took at most x."""
    figure, axes = _start(path, title, "response time (ms)", "share of requests")
    for index, (name, values) in enumerate(samples.items()):
        axes.step(*shares_up_to(values), where="post", label=name, **_line_style(index))
    axes.set_ylim(-MARGIN, 1 + MARGIN)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.set_xlim(left=0)
    _finish(path, figure, named=len(samples) > 1)


def shares_up_to(values: Any) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return `x` `[k + 1]` and the share of the `k` values that are at most `x`. Values are above 0; the share at 0 is 0."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    return np.append(0.0, ordered), np.arange(len(ordered) + 1) / max(len(ordered), 1)


def bar_chart(
    path: Path, groups: Sequence[str], series: Mapping[str, Numbers], *, title: str, y_label: str, x_label: str
) -> None:
    """Draw series by name, one value per group, as bars side by side with the value above each bar."""
    figure, axes = _start(path, title, x_label, y_label)
    width = 0.8 / max(len(series), 1)
    turn = 90 if len(groups) * len(series) > MAX_LEVEL_VALUES else 0
    for index, (name, values) in enumerate(series.items()):
        places = np.arange(len(groups)) + (index - (len(series) - 1) / 2) * width
        drawn = axes.bar(places, values, width * 0.94, label=name, color=COLOURS[index % len(COLOURS)])
        axes.bar_label(drawn, fmt=partial(plain, digits=3), fontsize=8, padding=2, rotation=turn)
    axes.set_xticks(np.arange(len(groups)), groups)
    axes.margins(y=0.2 if turn else 0.12)
    _finish(path, figure, named=len(series) > 1)


def check_picture(path: Path | None) -> None:
    """Check a picture's name before hours of measuring. Raises ConfigError if the ending is neither .svg nor .png."""
    if path is not None and path.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"{path}: a picture's name ends in .svg or .png")


def _start(path: Path, title: str, x_label: str, y_label: str) -> tuple[Figure, Any]:
    check_picture(path)
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.add_subplot()
    _style_axes(axes, title, x_label, y_label)
    return figure, axes


def _style_axes(axes: Any, title: str, x_label: str, y_label: str) -> None:
    assert all((x_label, y_label)), f"the chart {title!r} has an axis without a name"
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _lines(axes: Any, series: Mapping[str, tuple[Numbers, Numbers]]) -> None:
    for index, (name, (x, y)) in enumerate(series.items()):
        marker = MARKERS[index % len(MARKERS)] if len(x) <= MOST_MARKERS else ""
        axes.plot(x, y, label=name, **_line_style(index), marker=marker, markersize=5)


def _fit_axes(axes: Any, series: Mapping[str, tuple[Numbers, Numbers]], *, from_zero: bool) -> None:
    """Leave a margin around all points, and give whole numbers whole ticks.

    A share is never above 1 and never below 0, so no tick says so. With `from_zero` the y axis begins just below 0.
    """
    values = _all_y(series)
    is_share = bool(values) and min(values) >= 0 and max(values) <= 1
    axes.margins(MARGIN)
    if _are_whole([x for xs, _ in series.values() for x in xs]):
        axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1))
    if _are_whole(values) and not is_share:
        axes.yaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1))
    if from_zero and values:
        top = max(values) or 1.0
        axes.set_ylim(-MARGIN * top, (1 + MARGIN) * top)
    low, high = axes.get_ylim()
    least = 0.0 if from_zero or is_share else low
    # The ticks are fixed together with the limits, because a locator would choose other ticks for other limits.
    axes.set_yticks(
        [tick for tick in axes.get_yticks() if max(low, least) <= tick <= (min(high, 1) if is_share else high)]
    )
    axes.set_ylim(low, high)


def _are_whole(values: Numbers) -> bool:
    return len(values) > 0 and all(float(value).is_integer() for value in values)


def _all_y(series: Mapping[str, tuple[Numbers, Numbers]]) -> list[float]:
    return [float(y) for _, ys in series.values() for y in ys if np.isfinite(y)]


def _line_style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)], "linewidth": 1.8}


def _finish(path: Path, figure: Figure, *, named: bool) -> None:
    if named:
        # Outside, because a legend inside would cover lines.
        names = _names_of(figure)
        columns = max(1, min(3, LEGEND_LETTERS // (max(map(len, names)) + 8)))
        figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    save(path, figure)


def _names_of(figure: Figure) -> list[str]:
    """Return the names of all series of a figure."""
    return [name for axes in figure.axes for name in axes.get_legend_handles_labels()[1]]


def save(path: Path, figure: Figure) -> None:
    """Write a figure to a file, and make the file's folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a date, the same figure gives the same file.
    figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
