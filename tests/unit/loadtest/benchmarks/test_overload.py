"""The rows of `hplm bench overload` count goodput and refusals of a run."""

from __future__ import annotations

import numpy as np
import pytest
from hplm_loadtest.benchmarks.serving.overload import _row
from hplm_loadtest.scenarios.outcomes import ANSWERED, Run

from hplm.errors import DeadlineError, InternalError, UnreachableError


def test_goodput_counts_answers_in_time_from_one_deadline_after_the_start_to_the_end_of_the_plan() -> None:
    planned = np.array([0.0, 1.0, 3.0, 5.0, 6.0, 7.0, 8.0, 9.0, 9.5])
    took = np.array([0.5, 2.0, 1.0, 2.5, 0.25, 0.75, 1.0, 0.5, 1.5])
    codes = [
        *[ANSWERED] * 4,
        DeadlineError.code,
        DeadlineError.code,
        InternalError.code,
        UnreachableError.code,
        ANSWERED,
    ]
    run = Run(
        planned_s=planned,
        sent_s=planned + 0.001,
        done_s=planned + took,
        codes=codes,
        deadlines_s=np.full(9, 2.0),
        duration_s=10.0,
        generator_s=0.0,
    )
    row = _row([(0.5, run)], 2.0)
    # The first request ended before any request could be late, the fourth was late, the last ended after the load.
    assert row["goodput_per_s"] == pytest.approx(2 / 8)
    assert row["share"] == pytest.approx(0.5)
    assert row["late"] == 1
    assert (row["refused"], row["failed"], row["lost"]) == (2, 1, 1)
    assert row["refused_p50_ms"] == pytest.approx(500.0)
    assert row["kept_up"] == 1.0


def test_rounds_become_medians_and_without_refusals_there_is_no_refusal_time() -> None:
    def answered(seconds_between: float) -> Run:
        planned = np.arange(0.0, 10.0, seconds_between)
        count = len(planned)
        return Run(10.0, planned, planned, planned + 0.01, [ANSWERED] * count, np.full(count, 2.0))

    row = _row([(10.0, answered(0.1)), (10.0, answered(0.2))], 2.0)
    assert row["goodput_per_s"] == pytest.approx(7.5, rel=0.02)
    assert (row["share"], row["share_spread"]) == (pytest.approx(0.75, rel=0.02), "0.50-1.00")
    assert (row["late"], row["refused_p50_ms"], row["kept_up"]) == (0, None, 1.0)
