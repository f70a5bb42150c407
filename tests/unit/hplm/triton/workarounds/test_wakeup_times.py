"""No-op requests are due after a call that no other call follows, until one has expired."""

from __future__ import annotations

import pytest

from hplm.triton.workarounds.wakeup_times import AFTER_BUSY_S, AFTER_S, AGAIN_AFTER_S, WakeupTimes


def after_a_call(*, is_busy: bool = False) -> WakeupTimes:
    wakes = WakeupTimes()
    wakes.call_began()
    wakes.call_ended(10.0, is_busy=is_busy)
    return wakes


def test_it_is_asked_soon_after_a_call_and_later_where_many_come() -> None:
    assert WakeupTimes().due_s is None
    assert after_a_call().due_s == 10.0 + AFTER_S
    assert after_a_call(is_busy=True).due_s == 10.0 + AFTER_BUSY_S


def test_a_call_that_comes_first_leaves_nothing_to_ask() -> None:
    wakes = after_a_call()
    wakes.call_began()
    assert wakes.due_s is None


def test_it_is_asked_again_more_and_more_seldom_and_then_no_more() -> None:
    wakes = after_a_call()
    for pause_s in AGAIN_AFTER_S:
        wakes.sent(20.0)
        assert wakes.due_s == pytest.approx(20.0 + pause_s)
    wakes.sent(20.0)
    assert wakes.due_s is None


def test_once_it_has_looked_it_is_not_asked_before_another_call_has_ended() -> None:
    wakes = after_a_call()
    wakes.expired(wakes.sent(10.0))
    assert wakes.due_s is None
    wakes.call_began()
    wakes.call_ended(11.0, is_busy=False)
    assert wakes.due_s is not None


def test_that_it_looked_before_a_call_says_nothing_of_who_came_during_that() -> None:
    wakes = after_a_call()
    before = wakes.sent(10.0)
    wakes.call_began()
    wakes.call_ended(11.0, is_busy=False)
    wakes.expired(before)
    assert wakes.due_s is not None
