"""Pictures are written in the form their name asks for."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from hplm.errors import ConfigError
from hplm.reporting.charts import COLOURS, bar_chart, cdf_chart, check_picture, line_chart, shares_up_to


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
