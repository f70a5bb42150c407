"""What `hplm bench overload` counts of a run."""

from __future__ import annotations

import numpy as np
import pytest
from hplm_loadtest.overload import _medians, _row
from hplm_loadtest.run import ANSWERED, Run

from hplm.errors import DeadlineError, InternalError, UnreachableError


def test_a_row_counts_what_is_in_time_from_one_deadline_after_the_start_to_the_last_request() -> None:
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
    row = _row(run, 2.0)
    # The first ended before anybody was in danger, the fourth was late, the last ended after the load.
    assert row["goodput_per_s"] == pytest.approx(2 / 8)
    assert row["late"] == 1
    assert (row["refused"], row["failed"], row["lost"]) == (2, 1, 1)
    assert row["refused_p50_ms"] == pytest.approx(500.0)
    assert row["kept_up"] == 1.0


def test_of_several_rounds_medians_sums_and_the_worst() -> None:
    first = {"capacity_per_s": 10.0, "goodput_per_s": 9.0, "late": 1, "refused_p50_ms": None, "kept_up": 1.0}
    second = {"capacity_per_s": 20.0, "goodput_per_s": 10.0, "late": 2, "refused_p50_ms": 4.0, "kept_up": 0.9}
    row = _medians([first, second])
    assert row["share"] == pytest.approx(0.7)
    assert (row["late"], row["refused_p50_ms"], row["kept_up"]) == (3, 4.0, 0.9)
    assert _medians([first])["refused_p50_ms"] is None
