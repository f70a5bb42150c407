"""The rows of `hplm bench waves`: first and last answers of waves, and requests that Triton kept."""

from __future__ import annotations

import numpy as np
import pytest
from hplm_loadtest.benchmarks.serving.waves import KEPT_S, wave_row
from hplm_loadtest.scenarios.outcomes import ANSWERED, Run


def run(latencies_s: list[list[float]], codes: dict[int, str] | None = None) -> Run:
    """Make a run of waves, one per second."""
    size = len(latencies_s[0])
    planned_s = np.repeat(np.arange(len(latencies_s), dtype=np.float64), size)
    found = [(codes or {}).get(i, ANSWERED) for i in range(len(planned_s))]
    done_s = planned_s + np.ravel(latencies_s)
    return Run(float(len(latencies_s)), planned_s, planned_s, done_s, found, np.full(len(planned_s), np.nan))


def test_the_first_and_the_last_answer_of_a_wave_need_not_be_to_the_first_and_the_last_request() -> None:
    row = wave_row(run([[0.03, 0.01, 0.02], [0.05, 0.06, 0.02], [0.01, 0.04, 0.02]]), 3)
    assert row["first_p50_ms"] == pytest.approx(10)
    assert row["last_p50_ms"] == pytest.approx(40)
    assert row["last_worst_ms"] == pytest.approx(60)
    assert row["kept"] == 0


def test_every_request_answered_after_a_gap_in_its_wave_was_kept() -> None:
    late_s = 0.02 + KEPT_S + 0.01
    row = wave_row(run([[0.01, late_s, 0.02], [late_s + 0.1, late_s, 0.01]]), 3)
    assert row["kept"] == 3
    assert row["last_p50_ms"] > 400


def test_all_requests_of_a_wave_with_a_late_first_answer_were_kept() -> None:
    late_s = KEPT_S + 0.02
    assert wave_row(run([[late_s], [0.01]]), 1)["kept"] == 1
    assert wave_row(run([[late_s, late_s + 0.01], [0.01, 0.02]]), 2)["kept"] == 2


def test_no_request_was_kept_if_answers_come_slowly_but_steadily() -> None:
    assert wave_row(run([[0.3, 0.6, 0.9], [0.3, 0.6, 0.9]]), 3)["kept"] == 0


def test_a_request_without_an_answer_is_last_and_was_not_kept() -> None:
    row = wave_row(run([[0.01, 0.02], [0.01, 0.02]], {1: "QUEUE_FULL"}), 2)
    assert row["last_worst_ms"] == np.inf
    assert row["kept"] == 0
