"""The rows and goals of `hplm bench cascade`, and its file of requests."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hplm_loadtest.benchmarks.serving.cascade import (
    CascadeLoad,
    TaskAnswers,
    cascade,
    draw_by_task,
    goals_of,
    rate_rows,
    single_rows,
    slowest_base,
)
from hplm_loadtest.scenarios.outcomes import Run
from hplm_loadtest.workloads.labelled_requests import LabelledRequest, read_labelled_requests

from hplm.errors import ConfigError, DataError

BASES = ["small", "large"]
REQUESTS = [LabelledRequest(task, f"{task}-0", f"text {i}", "yes") for task in ("a", "b") for i in range(20)]


def written(path: Path) -> Path:
    path.write_text("\n".join(json.dumps(asdict(request)) for request in REQUESTS) + "\n")
    return path


def steady(rate_per_s: float) -> Run:
    """A closed loop of four requests under way that are answered at an even rate."""
    done_s = np.arange(1, 201) / rate_per_s
    sent_s = np.concatenate([np.zeros(4), done_s[:-4]])
    return Run(done_s[-1], sent_s, sent_s, done_s, ["OK"] * 200, np.full(200, np.nan))


def answers(wait_ms: float, right: int) -> TaskAnswers:
    return TaskAnswers([wait_ms] * 100, [True] * right + [False] * (100 - right))


SINGLES = {
    **{(task, "small"): answers(4.0, 80) for task in "ab"},
    **{(task, "large"): answers(20.0, 90) for task in "ab"},
    **{(task, "Cocktail"): answers(22.0, 90) for task in "ab"},
    ("a", "cascade"): TaskAnswers([10.0] * 98 + [30.0] * 2, [True] * 91 + [False] * 9, ["small"] * 75 + ["large"] * 25),
    ("b", "cascade"): TaskAnswers([12.0] * 100, [True] * 88 + [False] * 12, ["small"] * 100, late=3),
}
LOOPS = {"small": [steady(300.0)], "large": [steady(60.0)], "cascade": [steady(120.0)]}


def test_requests_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_labelled_requests(written(tmp_path / "requests.jsonl")) == REQUESTS


@pytest.mark.parametrize("line", ["{", "[]", '{"task": "a"}', '{"task": "a", "tenant": "t", "text": "", "label": "x"}'])
def test_a_line_that_is_no_request_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    path = written(tmp_path / "requests.jsonl")
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match="line 41: a JSON object with the texts label, task, tenant, text"):
        read_labelled_requests(path)


def test_a_repository_without_a_cascade_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no cascade over two bases"):
        cascade(tmp_path, written(tmp_path / "requests.jsonl"), CascadeLoad(), None)


def test_each_task_gives_as_many_requests(tmp_path: Path) -> None:
    drawn = draw_by_task(REQUESTS, 5, np.random.default_rng(0))
    assert sorted(request.task for request in drawn) == ["a"] * 5 + ["b"] * 5
    assert len(set(drawn)) == 10


def test_a_row_has_accuracy_percentiles_levels_and_late_answers() -> None:
    row = single_rows(BASES, SINGLES)[3]
    assert (row["task"], row["variant"], row["accuracy"]) == ("a", "cascade", 91.0)
    assert row["mean_ms"] == pytest.approx(10.4)
    assert row["levels"] == {"small": 0.75, "large": 0.25}
    assert row["p99_ms"] == 30.0


def test_a_vote_is_work_for_all_bases() -> None:
    rates = {row["saturated"]: row["requests_per_s"] for row in rate_rows(BASES, LOOPS)}
    assert rates["Cocktail"] == pytest.approx(1 / (1 / rates["small"] + 1 / rates["large"]))


def test_goals_compare_with_the_slowest_base() -> None:
    assert slowest_base(BASES, SINGLES) == "large"
    rows = [*single_rows(BASES, SINGLES), *rate_rows(BASES, LOOPS)]
    values = {goal.id: goal.value for goal in goals_of(rows, "large", LOOPS, 0.4)}
    assert values["cascade-mean"] == pytest.approx(100 * (1 - (10.4 + 12.0) / 2 / 20))
    assert values["cascade-accuracy"] == pytest.approx(0.5)
    assert values["cascade-p99"] == pytest.approx(1.5)
    assert values["cascade-rate"] == pytest.approx(2.0, rel=0.05)
    assert values["cascade-logic"] == 0.4
