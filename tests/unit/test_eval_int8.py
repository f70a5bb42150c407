"""`hplm eval int8`: trained tenants answered by the engine, plain and in int8."""

from __future__ import annotations

from pathlib import Path

import pytest
from hplm_builder.evaluation.int8 import goals_of, int8_rows

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
        assert 0 <= row["clipped"] < 0.01
    assert report["goals"][0]["id"] == "int8-loss"
    assert report_of(place, "int8", "--resume", str(tmp_path / "runs"))["rows"] == report["rows"]


def judged(plain: float, int8: float) -> dict[str, float]:
    return {"plain": plain, "int8": int8, "same": 1.0, "clipped": 0.0}


def test_an_average_is_taken_of_each_seed_that_no_task_lacks() -> None:
    rows = int8_rows({"one": [judged(0.8, 0.7), judged(0.6, 0.6)], "two": [None, judged(0.4, 0.3)]})
    first, second, average = rows
    assert first["points_lost"] == pytest.approx(5.0)
    assert first["lost_by_seed"] == [10.0, 0.0]
    assert second["lost_by_seed"] == [10.0]
    assert average["plain"] == pytest.approx(0.5)
    assert average["lost_by_seed"] == [5.0]
    assert [goal.value for goal in goals_of(rows, 2)] == [average["points_lost"]]


def test_where_a_task_has_nothing_no_goal_is_said_to_be_met() -> None:
    rows = int8_rows({"one": [judged(0.8, 0.8)], "two": [None]})
    assert [row["task"] for row in rows] == ["one"]
    assert goals_of(rows, 2) == []
