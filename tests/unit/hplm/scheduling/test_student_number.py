"""The number of students: within its bounds, fewer in a burst, more after a quiet time, steady under a steady load."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.scheduling.cost import CostModel
from hplm.scheduling.policies import Das, Fcfs
from hplm.scheduling.policy import Batch, Budget, StudentRange, Waiting
from hplm.scheduling.queue import RequestQueue
from hplm.scheduling.simulator import simulate
from hplm.scheduling.student_number import StudentNumber, StudentRules, plan_students, work_of

SECONDS_PER_TOKEN = 1e-3
RULES = StudentRules(fall_batches=1.0, quiet_s=2.0, rise_share=0.7)
RANGES = st.builds(lambda least, more: StudentRange(least, least + more), st.integers(1, 3), st.integers(0, 5))


def cost(batch_s: float = 0.0) -> CostModel:
    return CostModel.fit([(n, n * 20, batch_s + n * SECONDS_PER_TOKEN) for n in (1, 10, 100, 1000)])


def request(
    number: int,
    length: int = 10,
    deadline_s: float = 1e9,
    students: StudentRange = StudentRange(1, 6),  # noqa: B008
    arrived_s: float = 0.0,
) -> Waiting:
    return Waiting(number, f"t{number % 5}", length * students.least, arrived_s, deadline_s, students)


def queue_of(*, rules: StudentRules = RULES, budget: Budget | None = None) -> RequestQueue:
    return RequestQueue(
        Das(), budget or Budget(1, 200, 64, 63), cost(), capacity=10_000, weights={}, starve_after_s=2.0, students=rules
    )


def service_s(batch: Batch) -> float:
    tokens, _ = work_of(batch.requests, batch.students)
    return tokens * SECONDS_PER_TOKEN


@st.composite
def requests(draw: st.DrawFn) -> list[Waiting]:
    parts = draw(st.lists(st.tuples(st.integers(1, 60), st.floats(0, 3), RANGES), min_size=1, max_size=12))
    return [request(i, length, deadline_s, students) for i, (length, deadline_s, students) in enumerate(parts)]


@given(st.lists(st.tuples(st.integers(1, 8), st.floats(0, 5), st.floats(0, 3), st.floats(0, 0.5)), max_size=60))
def test_the_cap_stays_between_one_student_and_the_most_that_a_request_may_have(
    events: list[tuple[int, float, float, float]],
) -> None:
    number, now_s = StudentNumber(RULES), 0.0
    for most, batches, later_s, work_s in events:
        now_s += later_s
        number.admit(most)
        number.before_batch(batches, 100, most, now_s)
        assert 1 <= number.cap <= number.most == max(number.most, most)
        number.after_batch(100, work_s, now_s)
        number.look(now_s)
        assert 1 <= number.cap <= number.most


def test_all_students_answer_until_work_waits() -> None:
    number = StudentNumber(RULES)
    number.admit(6)
    for batch in range(50):
        number.before_batch(1.0, 100, 6, batch * 0.1)
    assert number.cap == 6


def test_in_a_burst_the_cap_falls_by_one_before_each_batch_down_to_one() -> None:
    number = StudentNumber(RULES)
    number.admit(4)
    caps = []
    for batch in range(5):
        number.before_batch(1.5, 100, 4, batch * 0.1)
        caps.append(number.cap)
    assert caps == [3, 2, 1, 1, 1]


def test_the_first_fall_takes_effect_if_the_waiting_requests_have_fewer_students_than_others_had() -> None:
    number = StudentNumber(RULES)
    number.admit(8)
    number.before_batch(1.5, 100, 3, 0.0)
    assert number.cap == 2


def test_work_that_waits_for_tenants_with_one_student_lowers_no_cap() -> None:
    number = StudentNumber(RULES)
    number.admit(6)
    number.before_batch(9.0, 100, 1, 0.0)
    assert number.cap == 6


def test_after_each_quiet_time_the_cap_rises_by_one() -> None:
    number = StudentNumber(RULES)
    number.admit(3)
    number.before_batch(2.0, 100, 3, 0.0)
    number.before_batch(2.0, 100, 3, 1.0)
    caps = {}
    for tenth in range(10, 80):
        number.look(tenth / 10)
        caps.setdefault(number.cap, tenth / 10)
    assert caps == {1: 1.0, 2: 3.0, 3: 5.0}


@pytest.mark.parametrize(("share", "cap"), [(0.65, 2), (0.75, 1)])
def test_the_cap_rises_only_if_one_student_more_would_leave_time(share: float, cap: int) -> None:
    number = StudentNumber(RULES)
    number.admit(2)
    number.before_batch(2.0, 100, 2, 0.0)
    for batch in range(1, 60):
        number.before_batch(1.0, 100, 2, batch * 0.1)
        number.after_batch(1, 0.1 * share, batch * 0.1)
    assert number.cap == cap


@settings(max_examples=60)
@given(requests(), requests(), st.integers(1, 8), st.floats(0, 0.05))
def test_a_plan_keeps_every_deadline_that_the_least_students_keep(
    chosen: list[Waiting], left: list[Waiting], cap: int, batch_s: float
) -> None:
    model = cost(batch_s)
    plan = plan_students(chosen, left, cap, model, 0.0)
    for one, number in zip(chosen, plan, strict=True):
        assert one.students.least <= number <= max(one.students.least, min(cap, one.students.most))

    def late(numbers: Sequence[int]) -> set[tuple[str, int]]:
        end_s = model.bound(*work_of(chosen, numbers))
        found = {("chosen", one.id) for one in chosen if one.deadline_s < end_s}
        before: list[Waiting] = []
        for one in sorted(left, key=lambda each: each.deadline_s):
            before.append(one)
            rest_s = model.predict(*work_of(before, [each.students.least for each in before]))
            if end_s > one.deadline_s - rest_s:
                found.add(("left", one.id))
        return found

    least = late([one.students.least for one in chosen])
    assert late(plan) == least
    # With one student more a request would be late.
    number = max(number for number in range(1, cap + 1) if plan == tuple(one.within(number) for one in chosen))
    assert number == cap or late([one.within(number + 1) for one in chosen]) > least


def test_if_fewer_students_keep_a_deadline_fewer_answer_and_no_request_is_refused() -> None:
    queue = queue_of()
    # Ten tokens take 10 ms with one student. With six they would take 60 ms.
    assert queue.offer(request(0, deadline_s=0.035), 0.0) == []
    taken = queue.take(0.0)
    assert taken.batch is not None
    assert (taken.batch.students, taken.refused) == ((3,), ())


def test_a_request_that_waits_for_the_next_batch_makes_fewer_students_answer_this_one() -> None:
    queue = queue_of(budget=Budget(1, 200, 1, 63))
    for number, deadline_s in enumerate((1.0, 0.030)):
        assert queue.offer(request(number, deadline_s=deadline_s, students=StudentRange(1, 4)), 0.0) == []
    queue._policy = Fcfs()
    taken = queue.take(0.0)
    assert taken.batch is not None
    assert [one.id for one in taken.batch.requests] == [0]
    assert (taken.batch.students, taken.refused) == ((2,), ())


def test_a_request_that_its_least_students_would_make_late_is_refused() -> None:
    queue = queue_of()
    (refused,) = queue.offer(request(0, deadline_s=0.035, students=StudentRange(4, 6)), 0.0)
    assert refused.reason == "deadline"


def test_the_least_number_of_a_tenant_holds_in_every_burst() -> None:
    queue = queue_of()
    arrivals = [request(i, 20, 1e9, StudentRange(1 + i % 3, 6), i * 1e-3) for i in range(300)]
    used: dict[int, int] = {}

    def seconds(batch: Batch) -> float:
        used.update({one.id: number for one, number in zip(batch.requests, batch.students, strict=True)})
        return service_s(batch)

    simulate(arrivals, queue, seconds)
    assert queue.students.cap == 1
    assert all(used[one.id] >= one.students.least for one in arrivals)
    assert all(used[one.id] == one.students.least for one in arrivals[200:])


def test_what_batches_cost_is_learned_by_the_tokens_of_all_students() -> None:
    queue = RequestQueue(
        Fcfs(), Budget(1, 1000, 64, 63), CostModel(), capacity=100, weights={}, starve_after_s=9.0, students=RULES
    )
    arrivals = [request(i, 5 + i % 30, students=StudentRange(1, 1 + i % 6), arrived_s=float(i)) for i in range(80)]
    simulate(arrivals, queue, service_s)
    assert queue.cost.predict(100, 2000) == pytest.approx(100 * SECONDS_PER_TOKEN, rel=0.02)


def test_a_number_that_a_load_made_fall_is_tried_again_only_with_less_load_or_much_later() -> None:
    number = StudentNumber(RULES)
    number.admit(2)

    def run(first_s: float, last_s: float, tokens: int) -> int:
        """Run a batch in every tenth of a second without any pressure, and return the cap then."""
        for tenth in range(round(first_s * 10), round(last_s * 10)):
            number.before_batch(1.0, tokens, 2, tenth / 10)
            number.after_batch(tokens, 0.001, tenth / 10)
        return number.cap

    run(0, 3, 100)
    number.before_batch(1.5, 100, 2, 3.0)
    assert run(3, 20, 100) == 1
    assert run(20, 23, 50) == 2
    number.before_batch(1.5, 100, 2, 23.0)
    assert run(23, 25, 50) == run(25, 75, 100) == 1
    assert run(75, 84, 100) == 2


@settings(max_examples=25)
@given(st.integers(2, 8), st.lists(st.integers(2, 30), min_size=1, max_size=4), st.floats(0.1, 0.95))
def test_under_a_steady_load_the_cap_settles_and_stays(most: int, lengths: list[int], load: float) -> None:
    # `load` is the share of time that one student is busy with texts of these lengths in turns.
    queue = queue_of(rules=StudentRules(quiet_s=0.5))
    students, arrivals, at_s = StudentRange(1, most), [], 0.0
    while at_s < 14:
        arrivals.append(request(len(arrivals), lengths[len(arrivals) % len(lengths)], 1e9, students, at_s))
        at_s += arrivals[-1].length * SECONDS_PER_TOKEN / load
    changes: list[tuple[float, int]] = []

    def seconds(batch: Batch) -> float:
        changes.append((queue._running_from_s, queue.students.falls + queue.students.rises))
        return service_s(batch)

    simulate(arrivals, queue, seconds)
    settled = [count for begun_s, count in changes if 7 < begun_s < 14]
    # One number may be tried in vain, because equal batches do not tell what larger ones would cost. It is not tried again.
    assert settled[-1] - settled[0] <= 2
    # The cap is no lower than the load makes it.
    assert queue.students.cap >= min(most, math.floor(0.6 / load))


def test_through_a_burst_the_cap_falls_nothing_is_lost_and_the_cap_comes_back() -> None:
    queue = queue_of(rules=StudentRules(quiet_s=1.0))
    students = StudentRange(1, 6)
    # One student needs 10 ms for a text. Six keep up with 10 texts a second, and one with 100 a second.
    times_s = [i / 10 for i in range(50)] + [5 + i / 80 for i in range(400)] + [10 + i / 10 for i in range(150)]
    arrivals = [request(i, 10, at_s + 0.5, students, at_s) for i, at_s in enumerate(times_s)]
    caps: list[tuple[float, int]] = []

    def seconds(batch: Batch) -> float:
        caps.append((max(one.arrived_s for one in batch.requests), queue.students.cap))
        return service_s(batch)

    outcomes = simulate(arrivals, queue, seconds)
    assert all(outcome.in_time for outcome in outcomes)
    assert len(outcomes) == len(arrivals)
    assert {cap for at_s, cap in caps if at_s < 5} == {6}
    assert {cap for at_s, cap in caps if 7 < at_s < 10} == {1}
    assert caps[-1][1] == 6
