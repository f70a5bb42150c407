"""The error of a quota, from what clients saw."""

from __future__ import annotations

import pytest
from hplm_loadtest.benchmarks.access.quota_error import Admitted, burst, used, wrongly_refused

from hplm.quotas.token_bucket import Rate

# Ten requests a second, of which one may come at once.
RATE = Rate(10.0, 1.0)


def test_an_error_is_what_was_certainly_too_much_or_too_little() -> None:
    admitted = [(Admitted(2.0, 2.5, 3.0), True), (Admitted(1.0, 1.5, 1.0), True)]
    found = used([*admitted, (Admitted(2.25, 2.3, 9.0), False)])
    assert found == (4.0, 1.5, 1.25)
    assert found.error(2.0) == 1.0
    assert found.error(3.0) == 0.0
    assert found.error(4.0) == -1.0
    assert used([]) == (0.0, 0.0, 0.0)


def test_a_burst_is_what_a_bucket_must_have_held_at_least() -> None:
    at_once = [Admitted(1.0, 1.0, 1.0)] * 3
    later = [Admitted(2.0 + number / 10, 2.0 + number / 10, 1.0) for number in range(5)]
    assert burst([*later, *at_once], 10.0) == pytest.approx(3.0)
    assert burst(later, 10.0) == pytest.approx(1.0)


def test_requests_that_may_have_been_admitted_at_any_time_make_no_burst() -> None:
    assert burst([Admitted(0.0, 1.0, 1.0)] * 10, 10.0) == 0.0


def test_a_refusal_is_wrong_if_the_quota_had_room_at_the_latest_admissions() -> None:
    first = (Admitted(0.0, 0.05, 1.0), True)
    assert wrongly_refused([first, (Admitted(0.16, 0.2, 1.0), False)], RATE) == 1
    # The first request may have been admitted at 0.05 s, so the quota may have had no room yet.
    assert wrongly_refused([first, (Admitted(0.14, 0.2, 1.0), False)], RATE) == 0
    assert wrongly_refused([(Admitted(0.0, 0.1, 1.0), False)], RATE) == 1
