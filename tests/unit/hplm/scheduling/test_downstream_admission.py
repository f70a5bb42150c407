"""What a stage refuses for the one behind it: what would be far too late there, nothing else, and never for good."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.scheduling.cost import CostModel
from hplm.scheduling.downstream_admission import (
    Backlog,
    DownstreamAdmission,
    PipelineAdmission,
    combine,
    reserved_s,
    steps,
)
from hplm.scheduling.policies import Das
from hplm.scheduling.policy import Budget, Waiting
from hplm.scheduling.queue import RequestQueue

# A full batch takes a second; ten of them wait, due one after the other from second 10 on.
BATCH = 100
TEN = Backlog(
    0.0, 0.0, BATCH, 1.0, -math.inf, tuple(range(10, 20)), tuple(range(BATCH, 11 * BATCH, BATCH)), {"t": 10 * BATCH}
)

UNKNOWN = Backlog(0.0, 0.0, 0, 0.0, -math.inf, (), (), {})


def ahead_of(backlog: Backlog | None) -> DownstreamAdmission:
    return DownstreamAdmission(lambda _: backlog, {})


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 256)), max_size=300), st.floats(-1, 101))
def test_what_is_due_is_told_in_few_numbers_and_nearly_right(queue: list[tuple[float, int]], by_s: float) -> None:
    waiting = [Waiting(i, "t", tokens, 0.0, due_s) for i, (due_s, tokens) in enumerate(queue)]
    deadlines_s, tokens = steps(waiting)
    assert len(deadlines_s) == len(tokens) <= 64
    assert list(deadlines_s) == sorted(deadlines_s)
    told = replace(TEN, deadlines_s=deadlines_s, tokens=tokens).due(by_s)
    exact = sum(one.tokens for one in waiting if one.deadline_s <= by_s)
    # Less by what lies between two of the numbers, at most.
    between = max(0, -(-len(waiting) // 64) - 1)
    assert exact - 256 * between <= told <= exact


def test_a_queue_tells_what_waits_what_runs_and_how_long_a_full_batch_takes() -> None:
    cost = CostModel.fit([(n, n * 10, 0.1 + n * 1e-3) for n in (1, 10, 100, 1000)])
    queue = RequestQueue(Das(), Budget(1, 100, 64, 64), cost, capacity=100, weights={}, starve_after_s=math.inf)
    assert queue.backlog([], 0.0) == Backlog(0.0, 0.0, 0, 0.0, 0.0, (), (), {}, cost.bounds_s)
    for number in range(25):
        queue.offer(Waiting(number, "t", 10, 0.1 * number, 100.0 + number), 3.0)
    queue.take(3.0)
    found = queue.backlog(queue.snapshot(), 3.05)
    assert found.batch_tokens == 100
    assert found.batch_s == pytest.approx(0.2, rel=0.1)
    assert found.free_s == pytest.approx(3.0 + found.batch_s, rel=0.01)
    assert found.newest_arrived_s == pytest.approx(2.4)
    assert found.due(1000.0) == found.tokens[-1] == found.of_tenant["t"] == 150


def test_where_nothing_is_known_nothing_is_refused() -> None:
    assert not ahead_of(None).would_be_late("t", 10**9, 1.0, 0.0)
    assert combine([]) is combine([UNKNOWN]) is combine([UNKNOWN, UNKNOWN]) is None
    assert combine([UNKNOWN, TEN]) is combine([TEN]) is TEN


def test_stages_that_share_what_comes_are_as_fast_as_all_of_them_together() -> None:
    twice_as_fast = Backlog(0.5, 3.0, BATCH, 0.5, 2.0, (12.5, 30.0), (50, 150), {"t": 50, "u": 100})
    both = combine([TEN, twice_as_fast])
    assert both is not None
    assert both.batch_tokens / both.batch_s == pytest.approx(3 * BATCH)
    assert both.free_s == pytest.approx(2.0)
    assert (both.at_s, both.newest_arrived_s, both.of_tenant) == (0.0, 2.0, {"t": 10 * BATCH + 50, "u": 100})
    for by_s in (9.0, 10.0, 12.4, 12.5, 19.0, 29.0, 30.0):
        assert both.due(by_s) == TEN.due(by_s) + twice_as_fast.due(by_s)
    # What one alone could not compute in time is no more than a third of the work of both.
    crowded, idle = (
        replace(TEN, free_s=9.0, deadlines_s=(10.0,) * 10),
        replace(twice_as_fast, free_s=9.0, tokens=(0, 0)),
    )
    assert ahead_of(crowded).would_be_late("t", 1, 13.0, 9.0)
    assert not ahead_of(combine([crowded, idle])).would_be_late("t", 1, 13.0, 9.0)


def test_what_is_due_later_is_not_before_a_request() -> None:
    due_s = 1.2
    assert ahead_of(replace(TEN, deadlines_s=(1.0,), tokens=(10 * BATCH,))).would_be_late("t", 1, due_s, 0.0)
    assert not ahead_of(TEN).would_be_late("t", 1, due_s, 0.0)


def test_a_quarter_more_than_can_be_computed_in_time_is_let_in_and_no_more() -> None:
    ahead = ahead_of(replace(TEN, deadlines_s=(1.0,), tokens=(10 * BATCH,)))
    assert ahead.would_be_late("t", 1, 7.9, 0.0)
    assert not ahead.would_be_late("t", 1, 8.1, 0.0)
    # And the batch that runs.
    assert ahead_of(replace(TEN, deadlines_s=(1.0,), tokens=(10 * BATCH,), free_s=1.0)).would_be_late("t", 1, 8.1, 0.0)


def test_of_texts_that_are_answered_together_a_quarter_less_is_let_in() -> None:
    ahead = ahead_of(replace(TEN, deadlines_s=(1.0,), tokens=(10 * BATCH,)))
    assert ahead.would_be_late("t", 1, 13.2, 0.0, waits_for_others=True)
    assert not ahead.would_be_late("t", 1, 13.5, 0.0, waits_for_others=True)


def test_with_two_batches_before_it_the_next_stage_says_itself_what_is_late() -> None:
    assert not ahead_of(replace(TEN, deadlines_s=(1.0,), tokens=(2 * BATCH,))).would_be_late("t", 1, 0.0, 0.0)


def test_what_was_passed_on_counts_until_the_next_stage_has_seen_it_or_it_must_be_lost() -> None:
    told = [replace(TEN, at_s=1.0, free_s=1.0, deadlines_s=(), tokens=(), of_tenant={})]
    ahead = DownstreamAdmission(lambda _: told[0], {})
    for number in range(10):
        ahead.passed("t", BATCH, arrived_s=0.1 * number, now_s=1.0)
    assert ahead.would_be_late("t", 1, 8.0, 1.0)
    # Seven of them: three are left.
    told[0] = replace(told[0], newest_arrived_s=0.65)
    assert not ahead.would_be_late("t", 1, 4.0, 1.0)
    assert ahead.would_be_late("t", 1, 3.0, 1.0)
    # The three never come.
    assert not ahead.would_be_late("t", 1, 7.0, 6.0)
    assert not ahead.would_be_late("t", 1, 6.1, 6.0)


def test_of_several_processes_each_takes_the_others_to_have_passed_on_as_much() -> None:
    empty = replace(TEN, at_s=1.0, free_s=1.0, deadlines_s=(), tokens=(), of_tenant={})
    alone, one_of_four = (DownstreamAdmission(lambda _: empty, {}, processes) for processes in (1, 4))
    for ahead in (alone, one_of_four):
        for number in range(3):
            ahead.passed("t", BATCH, arrived_s=0.1 * number, now_s=1.0)
    # Three batches take until 4.0, twelve until 13.0; a quarter more is let in.
    assert not alone.would_be_late("t", 1, 4.0, 1.0)
    assert one_of_four.would_be_late("t", 1, 10.0, 1.0)
    assert not one_of_four.would_be_late("t", 1, 11.0, 1.0)


@given(st.floats(0, 1e8))
def test_what_the_next_stage_has_seen_by_a_clock_of_whole_nanoseconds_is_not_on_its_way(arrived_s: float) -> None:
    seen_s = int(arrived_s * 1e9) / 1e9
    now_s = arrived_s + 0.1
    ahead = ahead_of(
        replace(TEN, at_s=now_s, free_s=now_s, newest_arrived_s=seen_s, deadlines_s=(1e9,), tokens=(1,), of_tenant={})
    )
    ahead.passed("t", 10 * BATCH, arrived_s, now_s)
    assert not ahead.would_be_late("t", 1, now_s + 1.0, now_s)


def test_who_asks_for_look_ups_alone_does_not_count_as_waiting_behind_them() -> None:
    told = [replace(TEN, at_s=1.0, free_s=1.0, deadlines_s=(), tokens=(), of_tenant={})]
    ahead = DownstreamAdmission(lambda _: told[0], {})
    ahead.passed("t", 10 * BATCH, arrived_s=0.9, now_s=1.0)
    assert ahead.would_be_late("t", 1, 3.0, 1.2)
    told[0] = replace(told[0], at_s=1.4, free_s=1.4)
    assert ahead.would_be_late("t", 1, 3.0, 1.6)
    told[0] = replace(told[0], at_s=1.6, free_s=1.6)
    assert not ahead.would_be_late("t", 1, 3.0, 1.6)


def test_who_floods_refuses_itself_alone_and_a_weight_is_worth_turns() -> None:
    flood = replace(TEN, deadlines_s=(1.0,), tokens=(10 * BATCH,), of_tenant={"flood": 9 * BATCH, "b": BATCH})
    ahead = DownstreamAdmission(lambda _: flood, {"heavy": 3.0})

    def latest(tenant: str, tokens: int) -> float:
        """Seconds from now by which it must be due to be let in: four fifths of the batches before it."""
        return next(s for s in np.arange(1.0, 20.0, 0.1) if not ahead.would_be_late(tenant, tokens, s, 0.0))

    assert latest("flood", 20) == pytest.approx(0.8 * 10, abs=0.1)
    # Before it goes as much of each other as it has itself.
    assert latest("newcomer", BATCH) == pytest.approx(0.8 * 3, abs=0.1)
    assert latest("b", BATCH) == pytest.approx(0.8 * 4, abs=0.1)
    assert latest("heavy", 3 * BATCH) == pytest.approx(0.8 * 5, abs=0.1)
    # What was passed on since is of those whose it is, too.
    ahead.passed("flood", 2 * BATCH, arrived_s=0.0, now_s=0.0)
    assert latest("newcomer", BATCH) == pytest.approx(0.8 * 3, abs=0.1)
    assert latest("flood", 20) == pytest.approx(0.8 * 12, abs=0.1)


IDLE = Backlog(0.0, 0.0, BATCH, 1.0, 0.0, (), (), {}, (0.1, 0.01, 0.001))


def test_later_stages_need_the_time_of_the_request_alone_and_if_they_are_busy_of_a_full_batch() -> None:
    alone_s = 0.1 + 10 * 0.01 + 100 * 0.001
    busy = replace(IDLE, free_s=0.5)
    assert reserved_s([], 10, 60.0) == reserved_s([None], 10, 60.0) == 0.0
    assert reserved_s([IDLE, None, IDLE], 10, 60.0) == pytest.approx(2 * alone_s)
    assert reserved_s([busy, IDLE], 10, 60.0) == pytest.approx(1.0 + alone_s)
    assert reserved_s([replace(IDLE, tokens=(5,), deadlines_s=(9.0,))], 10, 60.0) == pytest.approx(1.0)


def test_a_full_batch_of_a_later_stage_takes_no_more_than_half_of_a_requests_time() -> None:
    assert reserved_s([replace(IDLE, free_s=0.5)], 10, 1.2) == pytest.approx(0.6)
    assert reserved_s([replace(IDLE, free_s=0.5)], 10, 0.2) == pytest.approx(0.3)


def pipeline_of(*backlogs: Backlog | None) -> PipelineAdmission:
    return PipelineAdmission([lambda _, backlog=backlog: backlog for backlog in backlogs], {})


def test_a_request_is_refused_that_any_one_of_several_stages_would_have_too_late() -> None:
    crowded = replace(TEN, deadlines_s=(1.0,), tokens=(10 * BATCH,))
    assert not pipeline_of(None, IDLE).would_be_late("t", 1, 7.9, 0.0)
    for backlogs in ((crowded, IDLE), (IDLE, crowded), (None, crowded)):
        assert pipeline_of(*backlogs).would_be_late("t", 1, 7.0, 0.0)
        assert not pipeline_of(*backlogs).would_be_late("t", 1, 8.5, 0.0)


def test_an_earlier_stage_leaves_the_later_stages_their_time() -> None:
    crowded = replace(TEN, deadlines_s=(1.0,), tokens=(10 * BATCH,))
    busy = replace(IDLE, free_s=0.5, batch_s=2.0)
    assert not pipeline_of(crowded, None).would_be_late("t", 1, 8.5, 0.0)
    assert pipeline_of(crowded, busy).would_be_late("t", 1, 8.5, 0.0)


def test_a_request_that_waits_in_an_earlier_stage_is_on_its_way_to_each_later_stage() -> None:
    pipeline = pipeline_of(None, replace(IDLE, at_s=10.0, free_s=10.0))
    for number in range(10):
        pipeline.passed("t", BATCH, 9.0 + number / 10, 10.0)
    assert pipeline.would_be_late("t", 1, 12.0, 10.0)
    assert not pipeline.would_be_late("t", 1, 30.0, 10.0)
