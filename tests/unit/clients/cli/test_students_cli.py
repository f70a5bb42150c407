"""Lines that the commands print about students, and options of students that are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hplm_client.cli.students import StudentOptions
from hplm_client.cli.tenant import app
from typer.testing import CliRunner

from hplm.errors import BadInputError
from hplm.reporting.student_lines import student_lines

ABOUT: dict[str, Any] = {
    "students": {
        "form": "shared",
        "count": 2,
        "teacher": {"name": "minilm", "dev_score": 0.9},
        "prefixes": [
            {"students": 1, "dev_accuracy": 0.85},
            {"students": 2, "dev_accuracy": 0.875},
            {"students": 3, "dev_accuracy": 0.87},
        ],
    }
}


def test_students_are_told_with_their_teacher_and_the_score_of_each_prefix() -> None:
    assert [*student_lines(ABOUT)] == [
        "students: 2 of the form shared, the best prefix on dev of 3; taught by minilm (dev 0.900)",
        "  k = 1: dev_accuracy 0.850",
        "  k = 2: dev_accuracy 0.875 (the best, served)",
        "  k = 3: dev_accuracy 0.870 (not served)",
    ]
    assert [*student_lines({"scores": {}})] == []


def test_options_of_students_need_students() -> None:
    options = StudentOptions(form="own", most_students=3)
    assert options.of_new_tenant(has_students=True, has_levels=False) == {"form": "own", "most": 3}
    assert options.of_new_tenant(has_students=False, has_levels=True) == {"form": "own", "most": 3}
    assert StudentOptions().of_new_tenant(has_students=True, has_levels=False) == {}
    assert StudentOptions().of_new_tenant(has_students=False, has_levels=True) is None
    with pytest.raises(BadInputError, match="add --students"):
        options.of_new_tenant(has_students=False, has_levels=False)


@pytest.mark.parametrize("arguments", [[], ["--train", "train.csv", "--least", "2"]])
def test_students_are_trained_or_their_least_number_is_set(arguments: list[str]) -> None:
    outcome = CliRunner().invoke(app, ["students", "acme", *arguments])
    assert isinstance(outcome.exception, BadInputError)
    assert "give --train to make students, or --least" in str(outcome.exception)
