"""Pictures are written in the form their name asks for."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from hplm.errors import ConfigError
from hplm.reporting import charts
from hplm.reporting.charts import (
    COLOURS,
    bar_chart,
    cdf_chart,
    check_picture,
    line_chart,
    line_charts,
    shares_up_to,
)


def draw(kind: str, path: Path) -> None:
    if kind == "line":
        points = {"p50": ([100.0, 1000.0], [3.0, 4.0]), "p99": ([100.0, 1000.0], [5.0, 9.0])}
        line_chart(path, points, title="t", x_label="tenants", y_label="time (ms)", log=True, limit=("goal", 10.0))
    elif kind == "cdf":
        cdf_chart(path, {"one": [3.0, 1.0, float("inf"), 2.0], "none": []}, title="t")
    else:
        bar_chart(
            path, ["a", "b"], {"x": [1.0, 2.0], "y": [3.0, 4.0]}, title="t", x_label="group", y_label="rate (1/s)"
        )


@pytest.mark.parametrize("kind", ["line", "cdf", "bars"])
@pytest.mark.parametrize(("name", "start"), [("new/a.svg", b"<?xml"), ("a.png", b"\x89PNG")])
def test_a_picture_has_the_file_format_of_its_name(tmp_path: Path, kind: str, name: str, start: bytes) -> None:
    draw(kind, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize("kind", ["line", "cdf", "bars"])
def test_no_line_goes_through_the_legend(tmp_path: Path, kind: str) -> None:
    draw(kind, tmp_path / "a.svg")
    groups = {found.get("id"): found for found in ElementTree.parse(tmp_path / "a.svg").iter()}
    assert "legend_1" in groups
    assert not [found for found in groups["axes_1"].iter() if found.get("id") == "legend_1"]


def test_the_share_of_requests_starts_at_0() -> None:
    times, shares = shares_up_to([3.0, 1.0, 2.0, 4.0])
    assert times.tolist() == [0, 1, 2, 3, 4]
    assert shares.tolist() == [0, 0.25, 0.5, 0.75, 1]


def test_a_picture_with_another_ending_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ends in"):
        draw("line", tmp_path / "a.jpg")
    with pytest.raises(ConfigError, match="ends in"):
        check_picture(tmp_path / "a")
    check_picture(None)


def test_no_two_series_look_alike() -> None:
    assert len(set(COLOURS)) == len(COLOURS) == 7


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn, in place of files."""
    figures: list[Figure] = []
    monkeypatch.setattr(charts, "save", lambda path, figure: figures.append(figure))
    return figures


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_points_at_the_ends_of_a_share_lie_inside_the_frame_and_a_narrow_range_fills_it(drawn: list[Figure]) -> None:
    line_chart(
        Path("a.svg"),
        {"plan": ([0.25, 1.0, 4.0], [1.0, 0.99, 0.95])},
        title="t",
        x_label="factor",
        y_label="share",
        share=True,
    )
    (axes,) = drawn[0].axes
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    assert left < 0.25
    assert right > 4.0
    assert 0.9 < low < 0.95
    assert 1.0 < high < 1.05
    # No tick says that more than all requests are in time.
    assert max(axes.get_yticks()) <= 1.0
    assert len(axes.get_yticks()) >= 3


def test_an_axis_from_zero_cuts_no_point_at_zero(drawn: list[Figure]) -> None:
    line_chart(Path("a.svg"), {"p50": ([1.0, 2.5], [0.0, 50.0])}, title="t", x_label="time (s)", y_label="rate (1/s)")
    (axes,) = drawn[0].axes
    low, high = axes.get_ylim()
    assert low < 0 < 50 < high
    assert min(axes.get_yticks()) == 0


@pytest.mark.parametrize("counts", [[1.0, 2.0], [1.0, 2.0, 3.0, 5.0, 6.0], [4.0, 8.0, 16.0, 64.0]])
def test_whole_numbers_have_whole_ticks(drawn: list[Figure], counts: list[float]) -> None:
    shares = [0.5 + 0.01 * count / max(counts) for count in counts]
    line_chart(Path("a.svg"), {"best": (counts, shares)}, title="t", x_label="devices", y_label="share", share=True)
    line_charts(Path("a.svg"), {("a", "students"): {"k": (shares, counts)}}, title="t", x_label="time (s)")
    assert all(float(tick).is_integer() for tick in drawn[0].axes[0].get_xticks())
    assert all(float(tick).is_integer() for tick in drawn[1].axes[0].get_yticks())


def test_every_axis_has_a_name(drawn: list[Figure]) -> None:
    for kind in ("line", "cdf", "bars"):
        draw(kind, Path("a.svg"))
    for figure in drawn:
        assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)
        assert all(name.isascii() and "(" not in name for name in legend_of(figure))
    with pytest.raises(AssertionError, match="an axis without a name"):
        line_chart(Path("a.svg"), {"a": ([1.0], [1.0])}, title="t", x_label="", y_label="y")


def test_a_legend_of_long_names_lies_inside_the_figure(drawn: list[Figure]) -> None:
    names = ("processes, mapped files included", "private memory of processes", "adapter slots on the device")
    points = {name: ([1.0, 2.0], [1.0, 2.0]) for name in names}
    line_chart(Path("a.svg"), points, title="t", x_label="tenants", y_label="MB")
    drawn[0].draw_without_rendering()
    (legend,) = drawn[0].legends
    box, frame = legend.get_window_extent(), drawn[0].bbox
    assert frame.x0 <= box.x0
    assert box.x1 <= frame.x1
