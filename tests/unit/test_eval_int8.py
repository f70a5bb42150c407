"""`hplm eval int8`: trained tenants answered by the engine, plain and in int8."""

from __future__ import annotations

from pathlib import Path

import pytest
from hplm_builder.evaluation.int8 import int8_rows

from tests import evaluated
from tests.evaluated import report_of
from tests.unit.test_int8 import needs_vnni


@needs_vnni
def test_both_ways_are_scored_on_every_task(tmp_path: Path) -> None:
    place = evaluated.make_place(tmp_path)
    report = report_of(place, "int8", "--resume", str(tmp_path / "runs"))
    assert [row["task"] for row in report["rows"]] == ["colours", "places", "average"]
    for row in report["rows"]:
        assert 0 <= row["plain"] <= 1
        assert row["points_lost"] == pytest.approx(100 * (row["plain"] - row["int8"]))
        assert row["same_answers"] > 0.8
    assert report["goals"][0]["id"] == "int8-loss"
    assert report_of(place, "int8", "--resume", str(tmp_path / "runs"))["rows"] == report["rows"]


def test_an_average_is_taken_of_each_seed() -> None:
    judged = {
        "one": [{"plain": 0.8, "int8": 0.7, "same": 0.9}, {"plain": 0.6, "int8": 0.6, "same": 1.0}],
        "two": [{"plain": 0.4, "int8": 0.4, "same": 1.0}],
    }
    first, second, average = int8_rows(judged)
    assert first["points_lost"] == pytest.approx(5.0)
    assert first["lost_by_seed"] == [10.0, 0.0]
    assert second["lost_by_seed"] == [0.0]
    assert average["plain"] == pytest.approx(0.6)
    assert average["lost_by_seed"] == [5.0]
