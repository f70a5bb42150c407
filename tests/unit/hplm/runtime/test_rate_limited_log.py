"""Faults that come with every request are logged, but the log stays bounded."""

from __future__ import annotations

import pytest

from hplm.runtime.rate_limited_log import MOST_MESSAGES, WINDOW_S, RateLimitedLog
from tests.doubles import ManualClock


def test_a_fault_that_each_request_has_is_in_the_log_once_in_half_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    complaints = RateLimitedLog(clock)
    for _ in range(1000):
        complaints.log("tenant acme: torn")
    complaints.log("tenant other: torn", ValueError("so"))
    assert [record.getMessage() for record in caplog.records] == ["tenant acme: torn", "tenant other: torn"]
    assert "ValueError: so" in caplog.text
    caplog.clear()
    clock.now_s = WINDOW_S
    complaints.log("tenant acme: torn")
    left_out = "999 more faults of requests, most like those above, were left out"
    assert [record.getMessage() for record in caplog.records] == [left_out, "tenant acme: torn"]


def test_however_many_tenants_a_torn_bank_has_the_log_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    complaints = RateLimitedLog(clock)
    for second in range(60):
        clock.now_s = float(second)
        for number in range(300):
            complaints.log(f"tenant {second % 10}-{number}: torn")
    assert len(caplog.records) == 2 * MOST_MESSAGES + 1
