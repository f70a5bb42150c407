"""`hplm eval students`: rows by the number of students, finished runs that are kept, and rows that need another base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hplm_builder.fleet.students_repository import evenly_spaced, shallow_base

from hplm.core.settings import WHOLE
from hplm.errors import ConfigError, DataError
from tests import tiny
from tests.unit.builder.evaluation import evaluated
from tests.unit.builder.evaluation.evaluated import Place, report_of, trained


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = evaluated.make_place(tmp_path_factory.mktemp("students"))
    parent = tiny.make_base(place.store, replace(tiny.config(form=WHOLE), name="parent"))
    shallow_base(place.store, parent, "trunk", 2, is_trunk=True)
    return place


def students(bench: Place, *arguments: str) -> list[dict[str, object]]:
    options = ["--trunk", "trunk", "--data", str(bench.root / "colours"), *arguments]
    return report_of(bench, "students", *options)["rows"]


def test_students_are_reported_by_their_number_and_other_trainings_beside(bench: Place, tmp_path: Path) -> None:
    arguments = ("--resume", str(tmp_path), "--row", "students", "--row", "half-depth")
    rows = students(bench, *arguments)
    by_row = {(row["row"], str(row["students"]).split(":")[0]): row for row in rows}
    assert {("students", "best on dev"), ("students", "1"), ("half-depth", "best on dev")} <= set(by_row)
    teacher = by_row["students", "best on dev"]["teacher"]
    assert teacher == by_row["half-depth", "best on dev"]["teacher"]
    for row in rows:
        assert row["of_teacher"] == pytest.approx(100 * float(str(row["test"])) / float(str(teacher)))
    before = trained(tmp_path)
    assert students(bench, *arguments) == rows
    assert trained(tmp_path) == before
    with pytest.raises(DataError, match="give --resume another folder"):
        students(bench, *arguments, "--unlabelled", "--examples", "20")


def test_a_model_of_half_the_depth_has_every_second_layer() -> None:
    assert evenly_spaced(6, 3) == [1, 3, 5]
    assert evenly_spaced(12, 6) == [1, 3, 5, 7, 9, 11]
    assert evenly_spaced(5, 3) == [1, 3, 4]


def test_a_row_without_its_base_and_a_task_that_students_cannot_learn_are_refused(bench: Place) -> None:
    with pytest.raises(ConfigError, match="give --one-layer NAME"):
        students(bench, "--row", "one-layer")
    with pytest.raises(ConfigError, match="there is no row 'wider'"):
        students(bench, "--row", "wider")
    with pytest.raises(DataError, match="not for a tagging"):
        report_of(bench, "students", "--trunk", "trunk", "--data", str(bench.root / "places"))
