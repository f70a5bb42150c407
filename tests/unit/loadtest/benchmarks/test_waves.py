"""Of waves of requests: the first and the last answer of each, and who was kept while no other of it was answered."""

from __future__ import annotations

import numpy as np
import pytest
from hplm_loadtest.benchmarks.serving.waves import KEPT_S, row_of
from hplm_loadtest.scenarios.run import ANSWERED, Run


def run(latencies_s: list[list[float]], codes: dict[int, str] | None = None) -> Run:
    """Of waves one a second, as they were sent."""
    size = len(latencies_s[0])
    planned_s = np.repeat(np.arange(len(latencies_s), dtype=np.float64), size)
    found = [(codes or {}).get(i, ANSWERED) for i in range(len(planned_s))]
    done_s = planned_s + np.ravel(latencies_s)
    return Run(float(len(latencies_s)), planned_s, planned_s, done_s, found, np.full(len(planned_s), np.nan))


def test_the_first_and_the_last_answer_of_a_wave_need_not_be_to_the_first_and_the_last_request() -> None:
    row = row_of(run([[0.03, 0.01, 0.02], [0.05, 0.06, 0.02], [0.01, 0.04, 0.02]]), 3)
    assert row["first_p50_ms"] == pytest.approx(10)
    assert row["last_p50_ms"] == pytest.approx(40)
    assert row["last_worst_ms"] == pytest.approx(60)
    assert row["kept"] == 0


def test_who_is_answered_after_a_gap_was_kept_however_many_waves_have_one() -> None:
    late_s = 0.02 + KEPT_S + 0.01
    row = row_of(run([[0.01, late_s, 0.02], [late_s + 0.1, late_s, 0.01]]), 3)
    assert row["kept"] == 3
    assert row["last_p50_ms"] > 400


def test_a_wave_whose_first_answer_comes_late_was_kept_whole() -> None:
    late_s = KEPT_S + 0.02
    assert row_of(run([[late_s], [0.01]]), 1)["kept"] == 1
    assert row_of(run([[late_s, late_s + 0.01], [0.01, 0.02]]), 2)["kept"] == 2


def test_a_slow_machine_keeps_nobody() -> None:
    assert row_of(run([[0.3, 0.6, 0.9], [0.3, 0.6, 0.9]]), 3)["kept"] == 0


def test_who_has_no_answer_comes_last_and_was_not_kept() -> None:
    row = row_of(run([[0.01, 0.02], [0.01, 0.02]], {1: "QUEUE_FULL"}), 2)
    assert row["last_worst_ms"] == np.inf
    assert row["kept"] == 0
