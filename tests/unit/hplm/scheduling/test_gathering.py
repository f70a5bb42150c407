"""Gathering texts for a call: tenants take turns, deadlines of a call lie close together, nothing waits for ever."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.scheduling import reference
from hplm.scheduling.gathering import GatheredText, GatherLimits, GatherQueue

LIMITS = GatherLimits(texts=4, size_bytes=100)
GATHER_S = 0.002


def text(
    number: int, tenant: str = "a", *, arrived_s: float = 0.0, due_s: float = math.inf, size_bytes: int = 1
) -> GatheredText:
    return GatheredText(number, tenant, (1, False), size_bytes, arrived_s, due_s)


def queue_of(*texts: GatheredText, capacity: int = 100, limits: GatherLimits = LIMITS) -> GatherQueue:
    queue = GatherQueue(capacity, GATHER_S, limits)
    for one in texts:
        assert queue.offer(one, one.arrived_s) is None
    return queue


def ids(texts: tuple[GatheredText, ...]) -> list[int]:
    return [one.id for one in texts]


waiting_texts = st.lists(
    st.builds(
        GatheredText,
        id=st.just(0),
        tenant=st.sampled_from("abc"),
        form=st.sampled_from([(1, False), (2, False), (1, True)]),
        size_bytes=st.sampled_from([1, 30, 99, 500]),
        arrived_s=st.integers(0, 3).map(float),
        due_s=st.sampled_from([3.0, 5.0, 5.2, 6.0, 100.0, math.inf]),
        is_alone=st.sampled_from([False, False, False, True]),
    ),
    max_size=30,
)


@given(waiting_texts)
def test_calls_are_those_of_the_reference_until_the_queue_is_empty(texts: list[GatheredText]) -> None:
    left = [
        GatheredText(number, one.tenant, one.form, one.size_bytes, one.arrived_s, one.due_s, one.is_alone)
        for number, one in enumerate(texts)
    ]
    queue = queue_of(*sorted(left, key=lambda one: one.arrived_s))
    while left:
        wanted = reference.gather(left, 4.0, LIMITS)
        assert queue.take(4.0) == wanted
        assert wanted.texts or wanted.late
        left = [one for one in left if one not in wanted.texts + wanted.late]
        assert len(queue) == len(left)
    assert queue.take(4.0).texts == ()


@given(waiting_texts)
def test_the_texts_of_a_call_fit_together(texts: list[GatheredText]) -> None:
    call = reference.gather(texts, 4.0, LIMITS).texts
    assert len(call) <= LIMITS.texts
    assert len({one.form for one in call}) <= 1
    assert len(call) <= 1 or sum(one.size_bytes for one in call) <= LIMITS.size_bytes
    assert len(call) <= 1 or not any(one.is_alone for one in call)
    left_s = [one.due_s - 4.0 for one in call]
    assert all(a <= LIMITS.deadline_ratio * b for a in left_s for b in left_s)


def test_a_flood_of_one_tenant_waits_behind_one_text_of_each_other_tenant() -> None:
    flood = [text(number) for number in range(10)]
    queue = queue_of(*flood, text(10, "b", arrived_s=1.0), text(11, "c", arrived_s=2.0))
    assert ids(queue.take(3.0).texts) == [0, 10, 11, 1]
    assert ids(queue.take(3.0).texts) == [2, 3, 4, 5]


def test_in_a_full_queue_the_tenant_with_most_texts_loses_its_newest() -> None:
    queue = queue_of(text(0), text(1), text(2, "b"), capacity=3)
    assert queue.offer(refused := text(3), 0.0) is refused
    displaced = queue.offer(text(4, "c"), 0.0)
    assert displaced == text(1)
    assert sorted(one.id for one in queue.oldest()) == [0, 2, 4]


def test_a_text_waits_for_others_only_if_calls_are_under_way_and_others_are_expected() -> None:
    queue = queue_of()
    assert queue.may_call_from_s(is_idle=True) == math.inf
    queue.offer(text(0, arrived_s=10.0), 10.0)
    assert queue.may_call_from_s(is_idle=False) <= 10.0
    queue.take(10.0)
    # 2,000 texts a second, one after the other.
    for number in range(1, 200):
        now_s = 10.0 + number / 2000
        queue.offer(text(number, arrived_s=now_s), now_s)
        last_from_s = queue.may_call_from_s(is_idle=False)
        queue.take(now_s)
    assert last_from_s == pytest.approx(now_s + GATHER_S)
    queue.offer(text(200, arrived_s=now_s), now_s)
    assert queue.may_call_from_s(is_idle=True) <= now_s


def test_a_full_call_and_texts_that_a_call_has_left_behind_wait_for_no_others() -> None:
    queue = queue_of(*(text(number) for number in range(5)))
    assert queue.may_call_from_s(is_idle=False) <= 0.0
    queue.take(0.0)
    assert queue.may_call_from_s(is_idle=False) <= 0.0


def test_texts_of_a_failed_call_return_to_their_places() -> None:
    queue = queue_of(*(text(number, arrived_s=float(number)) for number in range(6)))
    call = queue.take(6.0).texts
    queue.put_back(call[1:])
    assert ids(queue.take(6.0).texts) == [1, 2, 3, 4]


def test_texts_past_their_deadline_are_handed_out_as_late() -> None:
    queue = queue_of(text(0, due_s=1.0), text(1, due_s=9.0), text(2, "b", due_s=1.5))
    assert sorted(one.id for one in queue.late(2.0)) == [0, 2]
    assert ids(queue.take(2.0).texts) == [1]
