"""A lease that is over is watched before it is believed: the clock may have jumped, and its worker live."""

from __future__ import annotations

import pytest

from hplm.jobs.lease_expiry import LeaseExpiry
from tests.doubles import ManualClock

WATCH_S = 10.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def lapses(clock: ManualClock) -> LeaseExpiry:
    return LeaseExpiry(WATCH_S, clock)


def test_a_lease_that_stays_over_has_lapsed_after_a_while(lapses: LeaseExpiry, clock: ManualClock) -> None:
    assert lapses({"j": 1.0}) == set()
    clock.now_s = WATCH_S - 0.1
    assert lapses({"j": 1.0, "k": 5.0}) == set()
    assert lapses.is_watching
    clock.now_s = WATCH_S
    assert lapses({"j": 1.0, "k": 5.0}) == {"j"}
    clock.now_s = 3 * WATCH_S
    assert lapses({"j": 1.0, "k": 5.0}) == {"j", "k"}
    assert not lapses.is_watching


def test_one_that_is_renewed_has_not_though_it_is_over_by_this_clock(lapses: LeaseExpiry, clock: ManualClock) -> None:
    for second in range(100):
        clock.now_s = float(second)
        assert lapses({"j": second // 5 * 5.0}) == set()


def test_one_that_was_good_again_is_watched_anew(lapses: LeaseExpiry, clock: ManualClock) -> None:
    assert lapses({"j": 1.0}) == set()
    assert lapses({}) == set()
    assert not lapses.is_watching
    clock.now_s = 2 * WATCH_S
    assert lapses({"j": 1.0}) == set()


def test_without_a_watch_it_has_lapsed_at_once(clock: ManualClock) -> None:
    assert LeaseExpiry(0.0, clock)({"j": 1.0}) == {"j"}
