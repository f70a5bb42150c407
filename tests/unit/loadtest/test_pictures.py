"""Pictures are written in the form their name asks for."""

from __future__ import annotations

from pathlib import Path

import pytest
from hplm_loadtest.pictures import COLOURS, bars, cdf, check_picture, line_chart

from hplm.errors import ConfigError


def draw(kind: str, path: Path) -> None:
    if kind == "line":
        points = {"p50": ([100.0, 1000.0], [3.0, 4.0]), "p99": ([100.0, 1000.0], [5.0, 9.0])}
        line_chart(path, points, title="t", x_label="tenants", y_label="time (ms)", log=True, limit=("goal", 10.0))
    elif kind == "cdf":
        cdf(path, {"one": [3.0, 1.0, float("inf"), 2.0], "none": []}, title="t")
    else:
        bars(path, ["a", "b"], {"x": [1.0, 2.0], "y": [3.0, 4.0]}, title="t", x_label="group", y_label="rate (1/s)")


@pytest.mark.parametrize("kind", ["line", "cdf", "bars"])
@pytest.mark.parametrize(("name", "start"), [("new/a.svg", b"<?xml"), ("a.png", b"\x89PNG")])
def test_a_picture_has_the_form_of_its_name(tmp_path: Path, kind: str, name: str, start: bytes) -> None:
    draw(kind, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_another_ending_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ends in"):
        draw("line", tmp_path / "a.jpg")
    with pytest.raises(ConfigError, match="ends in"):
        check_picture(tmp_path / "a")
    check_picture(None)


def test_no_two_series_look_alike() -> None:
    assert len(set(COLOURS)) == len(COLOURS) == 7
