"""Triton is asked for what it may have kept after a call that no other follows, until two calls had nothing of a client's."""

from __future__ import annotations

import pytest

from hplm.scheduling.wakes import AFTER_OF_MANY_S, AFTER_S, AGAIN_AFTER_S, Wakes


def after(requests: int, *, of_many: bool = False) -> Wakes:
    wakes = Wakes()
    wakes.began()
    wakes.ended(requests, 10.0, of_many=of_many)
    return wakes


def test_it_is_asked_soon_after_a_call_and_later_where_many_come() -> None:
    assert Wakes().due_s is None
    assert after(1).due_s == 10.0 + AFTER_S
    assert after(1, of_many=True).due_s == 10.0 + AFTER_OF_MANY_S


def test_a_call_that_comes_first_leaves_nothing_to_ask() -> None:
    wakes = after(1)
    wakes.began()
    assert wakes.due_s is None


def test_it_is_asked_again_more_and_more_seldom_until_a_call_comes_and_then_no_more() -> None:
    wakes = after(1)
    for pause_s in AGAIN_AFTER_S:
        wakes.asked(20.0)
        assert wakes.due_s == pytest.approx(20.0 + pause_s)
    wakes.asked(20.0)
    assert wakes.due_s is None


def test_a_call_that_had_nothing_of_a_clients_is_confirmed_once() -> None:
    wakes = after(1)
    for is_last in (False, True):
        wakes.asked(10.0)
        wakes.began()
        wakes.ended(0, 11.0, of_many=False)
        assert (wakes.due_s is None) == is_last
    # And a client's request begins all that anew.
    wakes.began()
    wakes.ended(1, 12.0, of_many=False)
    assert wakes.due_s is not None
