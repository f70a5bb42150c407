"""Triton is asked to look at what it may have kept after a call that no other follows, until it has."""

from __future__ import annotations

import pytest

from hplm.triton.workarounds.wakeup_times import AFTER_OF_MANY_S, AFTER_S, AGAIN_AFTER_S, WakeupTimes


def after_a_call(*, of_many: bool = False) -> WakeupTimes:
    wakes = WakeupTimes()
    wakes.began()
    wakes.ended(10.0, of_many=of_many)
    return wakes


def test_it_is_asked_soon_after_a_call_and_later_where_many_come() -> None:
    assert WakeupTimes().due_s is None
    assert after_a_call().due_s == 10.0 + AFTER_S
    assert after_a_call(of_many=True).due_s == 10.0 + AFTER_OF_MANY_S


def test_a_call_that_comes_first_leaves_nothing_to_ask() -> None:
    wakes = after_a_call()
    wakes.began()
    assert wakes.due_s is None


def test_it_is_asked_again_more_and_more_seldom_and_then_no_more() -> None:
    wakes = after_a_call()
    for pause_s in AGAIN_AFTER_S:
        wakes.asked(20.0)
        assert wakes.due_s == pytest.approx(20.0 + pause_s)
    wakes.asked(20.0)
    assert wakes.due_s is None


def test_once_it_has_looked_it_is_not_asked_before_another_call_has_ended() -> None:
    wakes = after_a_call()
    wakes.looked(wakes.asked(10.0))
    assert wakes.due_s is None
    wakes.began()
    wakes.ended(11.0, of_many=False)
    assert wakes.due_s is not None


def test_that_it_looked_before_a_call_says_nothing_of_who_came_during_that() -> None:
    wakes = after_a_call()
    before = wakes.asked(10.0)
    wakes.began()
    wakes.ended(11.0, of_many=False)
    wakes.looked(before)
    assert wakes.due_s is not None
