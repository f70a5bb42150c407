"""`hplm bench students` on a real server: every number of students, the other base, and a burst that loses nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hplm_builder.fleet.students_repository import serve_side_by_side, shallow_base
from hplm_loadtest.benchmarks.serving.students import StudentsLoad, students
from hplm_loadtest.workloads.texts import POOL_FILE
from rich.progress import Progress

from hplm.core.settings import WHOLE
from hplm.store.layout import Store
from tests import tiny

pytestmark = pytest.mark.triton


def test_students_are_measured_beside_their_teacher_and_a_burst_loses_no_request(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    teacher = tiny.make_base(store, replace(tiny.config(form=WHOLE), name="teacher"))
    trunk = shallow_base(store, teacher, "trunk", 2, is_trunk=True)
    models = tmp_path / "models"
    serve_side_by_side(store, models, {"teacher": teacher, "students": trunk}, 6, 2, 0, Progress(disable=True))
    (tmp_path / POOL_FILE).write_text("\n".join(tiny.sentences(60)) + "\n")
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP\n" + "\n".join(str(i + (i % 5) ** 2 / 9) for i in range(200)) + "\n")

    report = students(models, trace, None, StudentsLoad(1, 10, 8, 0.5), 1, tmp_path / "burst.svg")

    rows = {key: {row[key]: row for row in report.rows if key in row} for key in ("single", "saturated", "trace")}
    for found in rows.values():
        assert set(found) == {"students k=1", "students k=2", "teacher"}
    # One request at a time, all students answer, so each answer is that of the idle server.
    assert {name: (row["students"], row["accuracy"]) for name, row in rows["single"].items()} == {
        "students k=1": (1.0, 100.0),
        "students k=2": (2.0, 100.0),
        "teacher": (1.0, 100.0),
    }
    assert not any(row["lost"] for row in report.rows if "second" in row)
    assert {row["students"] for row in report.rows if "engine" in row} == {1, 2}
    assert (tmp_path / "burst.svg").stat().st_size
