"""Batches keep a distance, and calls last, where enough come to be worth the wait, and only there."""

from __future__ import annotations

import pytest

from hplm.scheduling.batch_pacing import BatchPacing, ReplyHold

EVERY_S = 0.007


def served(pace: BatchPacing, rate: float, seconds: float, batch_s: float = 0.003, start_s: float = 100.0) -> list[int]:
    """Sizes of the batches where requests come evenly and one batch follows the other as soon as it may."""
    sizes = []
    now_s, taken = start_s, 0
    while now_s < start_s + seconds:
        come = int((now_s - start_s) * rate) - taken
        if come == 0:
            now_s = start_s + (taken + 1.001) / rate
            continue
        now_s += max(0.0, pace.left_s(now_s))
        come = int((now_s - start_s) * rate) - taken
        pace.began(come, now_s)
        sizes.append(come)
        taken += come
        now_s += batch_s
    return sizes


def test_what_comes_soon_after_a_batch_of_several_goes_together_under_load() -> None:
    sizes = served(BatchPacing(EVERY_S), 1000, 2.0)
    assert min(sizes[-100:]) >= 6
    assert len(served(BatchPacing(0.0), 1000, 2.0)) > 2 * len(sizes)


def test_where_few_come_nobody_waits_for_others() -> None:
    pace = BatchPacing(EVERY_S)
    for call in range(50):
        # A hundred a second, two at once.
        now_s = 100.0 + call / 50
        assert pace.left_s(now_s) <= 0
        pace.began(2, now_s)


@pytest.mark.parametrize(("burst", "waits"), [(20, False), (40, True)])
def test_after_a_burst_the_next_wait_where_it_was_large(burst: int, waits: bool) -> None:
    pace = BatchPacing(EVERY_S)
    pace.began(burst, 100.0)
    assert (pace.left_s(100.001) > 0) is waits
    # It is forgotten.
    pace.began(2, 100.3)
    assert pace.left_s(100.3) <= 0


def test_requests_that_come_one_by_one_wait_for_no_others() -> None:
    pace = BatchPacing(EVERY_S)
    for call in range(2000):
        now_s = 100.0 + call / 2000
        assert pace.left_s(now_s) <= 0
        pace.began(1, now_s)


def test_the_first_batch_begins_at_once() -> None:
    assert BatchPacing(1000.0).left_s(0.0) <= 0


@pytest.mark.parametrize("every_s", [0.007, 0.1, 10.0])
def test_a_few_at_once_are_not_many(every_s: float) -> None:
    pace = BatchPacing(every_s)
    pace.began(19, 100.0)
    assert pace.left_s(100.0) <= 0


@pytest.mark.parametrize(("rate", "holds"), [(100, False), (350, False), (450, True), (2000, True)])
def test_calls_last_while_two_or_more_come_in_such_a_time(rate: int, holds: bool) -> None:
    hold = ReplyHold(0.005, 64)
    found = [hold.seconds(1, 100.0 + call / rate) for call in range(rate)]
    assert set(found[rate // 2 :]) == ({0.005} if holds else {0.0})
    assert hold.seconds(1, 103.0) == 0.0


def test_full_calls_do_not_last_and_those_behind_them_do() -> None:
    hold = ReplyHold(0.005, 64)
    assert [hold.seconds(count, 100.0 + index / 100) for index, count in enumerate((64, 63))] == [0.0, 0.005]


def test_a_call_that_may_not_last_never_does() -> None:
    hold = ReplyHold(0.0, 64)
    assert {hold.seconds(63, 100.0 + call / 1000) for call in range(1000)} == {0.0}
