"""The steady rate leaves out a closed loop's start and end, and a closed loop is long enough without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hplm_loadtest.scenarios.outcomes import ANSWERED, Run
from hplm_loadtest.scenarios.steady_rate import enough_requests, saturate, steady_rate

from hplm.errors import UnreachableError

IN_FLIGHT = 128


def make_run(sent_s: Sequence[float], done_s: Sequence[float]) -> Run:
    sent, nothing = np.array(sent_s), np.full(len(sent_s), np.nan)
    return Run(max(done_s), sent, sent, np.array(done_s), [ANSWERED] * len(sent_s), nothing)


def closed_loop(requests: int, rate_per_s: float, batch: int, empty_s: float = 0.0) -> Run:
    """Make the run of a server that answers in batches; the answers of a batch come within a few milliseconds."""
    done_s = [empty_s + (i // batch + 1) * batch / rate_per_s + 1e-4 * (i % batch) for i in range(requests)]
    return make_run([0.0] * IN_FLIGHT + done_s[: requests - IN_FLIGHT], done_s)


def test_the_rate_leaves_out_the_time_after_the_last_request_was_sent() -> None:
    assert steady_rate(make_run([0.0, 0.0, 1.0, 2.0], [1.0, 2.0, 8.0, 9.0])) == (1.0, False)


def test_a_warm_up_without_an_answer_tells_no_rate() -> None:
    warm_up = replace(make_run([0.0] * 3, [1.0] * 3), codes=["FORBIDDEN"] * 3)
    with pytest.raises(UnreachableError, match=r"answers to the warm-up were expected, got \{'FORBIDDEN': 3\}"):
        saturate("grpc://127.0.0.1:9", lambda count: pytest.fail("no load is drawn"), 4, warm_up=warm_up)


@pytest.mark.parametrize("empty_s", [0.0, 3.0], ids=["", "empty-stages-first"])
@pytest.mark.parametrize("batch", [1, 8, 48, 64])
def test_the_rate_does_not_depend_on_how_many_are_answered_at_once(batch: int, empty_s: float) -> None:
    rate, start_left_out = steady_rate(closed_loop(400, 32, batch, empty_s))
    assert rate == pytest.approx(32, rel=0.01)
    assert start_left_out
    # In a run that is too short the start counts, and `start_left_out` is False.
    assert batch == 1 or not steady_rate(closed_loop(140, 32, batch, empty_s))[1]


@pytest.mark.parametrize("requests", [256, 266, 286, 300])
@pytest.mark.parametrize("batch", [1, 8, 48, 64])
def test_the_rate_of_a_run_of_just_over_two_waves_is_the_rate_of_the_server(batch: int, requests: int) -> None:
    assert steady_rate(closed_loop(requests, 32, batch))[0] == pytest.approx(32, rel=0.01)


@pytest.mark.parametrize("rate_per_s", [0.5, 5, 30, 100, 500])
@pytest.mark.parametrize("batch", [1, 8, 48, 64])
def test_a_run_of_enough_requests_has_enough_left_without_its_start_and_end(batch: int, rate_per_s: float) -> None:
    duration_s = 10.0
    requests = enough_requests(rate_per_s, duration_s, IN_FLIGHT)
    assert requests - 2 * (IN_FLIGHT + batch) >= 0.9 * rate_per_s * duration_s
    run = closed_loop(requests, rate_per_s, batch, empty_s=1.0)
    rate, start_left_out = steady_rate(run)
    assert start_left_out
    assert rate == pytest.approx(rate_per_s, rel=0.01)


@pytest.mark.parametrize("after", [3, 60, 500])
def test_a_pause_of_a_system_that_answers_one_by_one_is_not_the_end_of_a_batch(after: int) -> None:
    requests = 1000
    done_s = [0.4 + i / 100 + (0.15 if i > after else 0.0) for i in range(requests)]
    sent_s = [0.0] * IN_FLIGHT + done_s[: requests - IN_FLIGHT]
    assert steady_rate(make_run(sent_s, done_s))[0] == pytest.approx(100, rel=0.03)
