"""Tasks by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hplm.errors import ConfigError
from hplm.tasks.task_loader import TASKS, task_named, task_names


@pytest.fixture
def plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package whose tasks cannot be used."""
    (tmp_path / "faulty_tasks.py").write_text(
        "from hplm.tasks.regression import Regression\n\n\nclass Other(Regression): ...\n"
    )
    about = tmp_path / "faulty_tasks-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-tasks\nVersion: 1.0\n")
    points = "missing = faulty_tasks:Missing\nother = faulty_tasks:Other\nnumber = builtins:int\n"
    (about / "entry_points.txt").write_text(f"[hplm.tasks]\n{points}")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    task_named.cache_clear()


def test_each_task_is_found_by_its_name() -> None:
    assert task_names() == ["classification", "regression", "tagging"]
    for name in task_names():
        assert task_named(name) is TASKS[name]
        assert TASKS[name].name == name


def test_an_unknown_task_is_refused_with_the_tasks_there_are() -> None:
    with pytest.raises(ConfigError, match="there is no task 'poetry'; there are classification, regression, tagging"):
        task_named("poetry")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", r"task 'missing' \(faulty_tasks:Missing\) cannot be loaded: AttributeError"),
        ("other", r"task 'other' \(faulty_tasks:Other\) must be a class of hplm.tasks.task.Task with that name"),
        ("number", r"task 'number' \(builtins:int\) must be a class of hplm.tasks.task.Task with that name"),
    ],
)
def test_a_third_partys_task_that_cannot_be_used_is_refused_with_the_reason(
    plug_ins: None, name: str, words: str
) -> None:
    assert name in task_names()
    with pytest.raises(ConfigError, match=words):
        task_named(name)


def test_a_task_is_described_with_what_its_labels_are_made_of() -> None:
    assert TASKS["tagging"].describe(("O", "B-PER", "I-PER")) == "tagging of 1 kind of entities"
    assert TASKS["classification"].describe(("no", "yes")) == "classification of 2 labels"
    assert TASKS["regression"].describe(("score",)) == "regression"
