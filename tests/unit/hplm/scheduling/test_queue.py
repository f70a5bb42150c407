"""The bounded queue: no request is lost or starves, no tenant takes more than its share, a policy's failure is contained."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.scheduling.cost import CostModel
from hplm.scheduling.fairness import fair_select
from hplm.scheduling.policies import Das, Edf, Fcfs, Sjf, SlottedDas
from hplm.scheduling.policy import Batch, Budget, Policy, PolicyError, Waiting, check
from hplm.scheduling.queue import RequestQueue
from hplm.scheduling.service_history import ServiceHistory
from hplm.scheduling.simulator import simulate
from tests.unit.hplm.scheduling.test_policies import BUDGETS, POLICIES, waiting_requests

SECONDS_PER_TOKEN = 1e-3


def cost(seconds_per_token: float = SECONDS_PER_TOKEN, batch_s: float = 0.0) -> CostModel:
    return CostModel.fit([(n, n * 20, batch_s + n * seconds_per_token) for n in (1, 10, 100, 1000)])


def queue_of(
    policy: Policy,
    budget: Budget | None = None,
    *,
    capacity: int = 100,
    weights: dict[str, float] | None = None,
    starve_after_s: float = math.inf,
    batch_s: float = 0.0,
) -> RequestQueue:
    return RequestQueue(
        policy,
        budget or Budget(1, 100, 64, 64),
        cost(batch_s=batch_s),
        capacity=capacity,
        weights=weights or {},
        starve_after_s=starve_after_s,
    )


def request(
    number: int, tenant: str = "t", tokens: int = 10, arrived_s: float = 0.0, deadline_s: float = 1e9
) -> Waiting:
    return Waiting(number, tenant, tokens, arrived_s, deadline_s)


def service_s(batch: Batch) -> float:
    return sum(r.tokens for r in batch.requests) * SECONDS_PER_TOKEN


def test_batches_of_one_request_count_every_request_before_a_new_one() -> None:
    queue = queue_of(Fcfs(), Budget(1, 1000, 1, 1))
    assert not queue.offer(request(0, tokens=10), 0.0)
    assert not queue.offer(request(1, tokens=200), 0.0)
    # It would end after 10 + 200 + 5 milliseconds.
    assert [one.reason for one in queue.offer(request(2, tokens=5, deadline_s=0.2149), 0.0)] == ["deadline"]
    assert not queue.offer(request(3, tokens=5, deadline_s=0.2151), 0.0)


@given(
    waiting_requests(),
    BUDGETS,
    st.sampled_from(POLICIES),
    st.integers(1, 40),
    st.sampled_from([0.5, math.inf]),
    # Batches that are short beside the deadlines, and batches that take all the time that requests have.
    st.sampled_from([1.0, 30.0]),
    st.randoms(use_true_random=False),
)
def test_every_request_ends_exactly_once_and_no_batch_is_empty(
    arrivals: list[Waiting],
    budget: Budget,
    policy: Policy,
    capacity: int,
    starve_after_s: float,
    slower: float,
    random: Random,
) -> None:
    queue = RequestQueue(
        policy,
        budget,
        cost(slower * SECONDS_PER_TOKEN),
        capacity=capacity,
        weights={},
        starve_after_s=starve_after_s,
    )

    def seconds(batch: Batch) -> float:
        assert batch.requests
        return random.uniform(0.5, 2.0) * slower * service_s(batch)

    outcomes = simulate(arrivals, queue, seconds)
    assert sorted(outcome.request.id for outcome in outcomes) == [request.id for request in arrivals]
    assert len(queue) == queue.waiting_tokens == 0


@given(waiting_requests(), BUDGETS, st.sampled_from(POLICIES), st.sampled_from([0.5, 2.0, math.inf]))
def test_a_fair_choice_keeps_to_the_budget(
    waiting: list[Waiting], budget: Budget, policy: Policy, starve_after_s: float
) -> None:
    check(fair_select(policy, waiting, 5.0, budget, {"t1": 3.0}, starve_after_s, ServiceHistory()), waiting, budget)


@given(
    waiting_requests(),
    st.builds(Budget, st.just(1), st.integers(5, 100), st.integers(1, 12), st.integers(1, 6)),
    st.sampled_from([Fcfs(), Sjf(), Edf(), Das()]),
    st.sampled_from([{}, {"t1": 3.0}, {"t0": 0.1}]),
)
def test_nobody_waits_for_what_another_has_beyond_its_share(
    waiting: list[Waiting], budget: Budget, policy: Policy, weights: dict[str, float]
) -> None:
    batch = fair_select(policy, waiting, 5.0, budget, weights, math.inf, ServiceHistory())
    by_tenant: dict[str, list[int]] = {}
    for chosen in batch.requests:
        by_tenant.setdefault(chosen.tenant, []).append(chosen.tokens)
    tenants = Counter(one.tenant for one in waiting)
    total = sum(weights.get(tenant, 1.0) for tenant in tenants)

    def surplus(tenant: str, tokens: list[int]) -> int:
        """Return how many tokens of the batch are beyond the tenant's share at least; a single request never is."""
        part = weights.get(tenant, 1.0) / total
        by_number = len(tokens) - max(1, math.ceil(budget.max_requests * part))
        by_tokens = sum(tokens) - max(budget.tokens * part, max(tokens))
        return max(0, math.floor(by_tokens), sum(sorted(tokens)[: max(0, by_number)]))

    most = max(surplus(tenant, tokens) for tenant, tokens in by_tenant.items())
    if most and len(by_tenant) < budget.max_tenants:
        free = budget.tokens - sum(one.tokens for one in batch.requests)
        kept_out = [one for one in waiting if tenants[one.tenant] == 1 and one.tenant not in by_tenant]
        assert all(one.tokens > free + most for one in kept_out)


@pytest.mark.parametrize("policy", [Fcfs(), Sjf(), Edf(), Das()], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("starve_after_s", [2.0, math.inf])
def test_of_thousands_of_tenants_a_batch_is_chosen_by_one_call_or_two(policy: Policy, starve_after_s: float) -> None:
    calls = []

    class Counting:
        def select(self, waiting: Sequence[Waiting], now_s: float, budget: Budget) -> Batch:
            calls.append(len(waiting))
            return policy.select(waiting, now_s, budget)

    waiting = [request(i, f"t{i}", tokens=3 + i % 90, arrived_s=i / 1000, deadline_s=30.0) for i in range(4000)]
    batch = fair_select(Counting(), waiting, 4.0, Budget(1, 1024, 64, 63), {}, starve_after_s, ServiceHistory())
    assert len(batch.requests) > 10
    assert len(calls) <= 2


@pytest.mark.parametrize("policy", [Fcfs(), Sjf(), Edf(), Das()], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("starve_after_s", [0.5, math.inf])
@pytest.mark.parametrize(("slots", "tenants"), [(7, 100), (31, 100), (33, 33), (2, 3), (63, 100), (63, 2000)])
def test_a_batch_is_full_where_enough_waits_however_few_slots_and_many_tenants_there_are(
    policy: Policy, starve_after_s: float, slots: int, tenants: int
) -> None:
    rng = np.random.default_rng(0)
    waiting = [
        request(i, f"t{rng.integers(tenants)}", arrived_s=i / 1000, deadline_s=30.0 + i % 13) for i in range(2000)
    ]
    assert (
        len(
            fair_select(policy, waiting, 2.0, Budget(1, 1024, 64, slots), {}, starve_after_s, ServiceHistory()).requests
        )
        == 64
    )


def test_a_flooding_tenant_cannot_keep_others_out_of_a_batch() -> None:
    flood = [request(i, "flood", tokens=5) for i in range(90)]
    others = [request(100 + i, f"other{i}", tokens=20) for i in range(4)]
    for policy in (Fcfs(), Sjf(), Edf(), Das()):
        batch = fair_select(policy, [*flood, *others], 0.0, Budget(1, 100, 64, 64), {}, math.inf, ServiceHistory())
        assert {r.tenant for r in batch.requests} == {"flood", *(f"other{i}" for i in range(4))}
        assert sum(r.tokens for r in batch.requests if r.tenant == "flood") <= 20


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("starve_after_s", [0.5, 5.0, math.inf])
@pytest.mark.parametrize("policy", [Fcfs(), Sjf(), Edf(), Das()], ids=lambda p: type(p).__name__)
def test_a_flood_of_short_texts_fills_no_batch_by_its_number(
    policy: Policy, starve_after_s: float, tokens: int
) -> None:
    flood = [request(i, "flood", tokens=tokens + i % 4, deadline_s=50.0) for i in range(1000)]
    waiting = [*flood, request(5000, "other", tokens=30, arrived_s=1.0, deadline_s=60.0)]
    for now_s in (1.0, 3.0):
        batch = fair_select(policy, waiting, now_s, Budget(1, 1024, 64, 63), {}, starve_after_s, ServiceHistory())
        assert len(batch.requests) == 64
        assert "other" in {r.tenant for r in batch.requests}


@pytest.mark.parametrize("starve_after_s", [2.0, math.inf])
@pytest.mark.parametrize("policy", [Sjf(), Edf(), Das()], ids=lambda p: type(p).__name__)
def test_a_quiet_tenant_is_answered_in_time_beside_a_flood_of_short_texts(
    policy: Policy, starve_after_s: float
) -> None:
    # Twice as many requests as can be computed, at most 64 in a batch.
    flood = [request(i, "flood", tokens=2 + i % 10, arrived_s=i / 300, deadline_s=i / 300 + 30.0) for i in range(4000)]
    quiet = [request(10_000 + i, "quiet", arrived_s=0.2 * i, deadline_s=0.2 * i + 2.0) for i in range(60)]
    queue = queue_of(policy, Budget(1, 1024, 64, 63), capacity=4096, starve_after_s=starve_after_s)
    outcomes = simulate(sorted([*flood, *quiet], key=lambda r: r.arrived_s), queue, service_s)
    assert all(o.in_time for o in outcomes if o.request.tenant == "quiet")


def test_what_others_leave_free_is_given_back() -> None:
    waiting = [*(request(i, "flood") for i in range(50)), request(99, "other")]
    batch = fair_select(Fcfs(), waiting, 0.0, Budget(1, 100, 64, 64), {}, math.inf, ServiceHistory())
    assert sum(r.tokens for r in batch.requests) == 100


def test_weights_share_out_batches_while_all_wait() -> None:
    waiting = [request(i, "heavy" if i % 2 else "light", tokens=5) for i in range(200)]
    batch = fair_select(Fcfs(), waiting, 0.0, Budget(1, 100, 64, 64), {"heavy": 3.0}, math.inf, ServiceHistory())
    tokens = Counter[str]()
    for chosen in batch.requests:
        tokens[chosen.tenant] += chosen.tokens
    assert tokens == {"heavy": 75, "light": 25}


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 10, 20])
@pytest.mark.parametrize("starve_after_s", [2.0, math.inf])
def test_rows_are_shared_out_by_weight_too(policy: Policy, rows: int, starve_after_s: float) -> None:
    names = [*["flood"] * 300, *["heavy", "light"] * 100]
    waiting = [request(i, name, tokens=5, deadline_s=30.0) for i, name in enumerate(names)]
    budget = Budget(rows, 100 // rows, 64, 64)
    batch = fair_select(policy, waiting, 4.0, budget, {"heavy": 3.0}, starve_after_s, ServiceHistory())
    tokens = Counter[str]()
    for chosen in batch.requests:
        tokens[chosen.tenant] += chosen.tokens
    assert tokens == {"flood": 20, "heavy": 60, "light": 20}


def test_a_full_queue_makes_room_for_a_tenant_below_its_share_at_the_cost_of_the_fullest() -> None:
    queue = queue_of(Fcfs(), capacity=10)
    for i in range(10):
        assert not queue.offer(request(i, "flood"), 0.0)
    (refused,) = queue.offer(request(10, "flood"), 0.0)
    assert (refused.request.id, refused.reason) == (10, "full")
    (refused,) = queue.offer(request(11, "other"), 0.0)
    assert (refused.request.id, refused.reason) == (9, "full")
    assert len(queue) == 10


def test_no_request_starves_under_shortest_job_first() -> None:
    # One tenant only, because another tenant's request would be chosen before it starves.
    arrivals = [request(0, tokens=90, arrived_s=1.0)]
    arrivals += [request(1 + i, tokens=10, arrived_s=i * 0.005) for i in range(2000)]

    def answered_at(starve_after_s: float) -> float:
        queue = queue_of(Sjf(), capacity=10_000, starve_after_s=starve_after_s)
        outcomes = simulate(sorted(arrivals, key=lambda r: (r.arrived_s, -r.id)), queue, service_s)
        return next(o.ended_s for o in outcomes if o.request.id == 0)

    assert answered_at(starve_after_s=0.5) < 3.0
    assert answered_at(starve_after_s=math.inf) > 5.0


@pytest.mark.parametrize("policy", [Fcfs(), Sjf(), Edf(), Das(), SlottedDas()], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize(("full_batch_s", "deadlines_s", "least"), [(0.1, (0.2, 2.0), 0.95), (1.0, (1.0, 1.0), 0.85)])
def test_goodput_under_ten_times_overload_stays_near_capacity(
    policy: Policy, full_batch_s: float, deadlines_s: tuple[float, float], least: float
) -> None:
    """Compare batches that take a part of the requests' time with batches that take all of it.

    The capacity is the rate of full batches; smaller batches waste a share of their time.
    """
    rng = np.random.default_rng(0)
    seconds = 20.0
    rate = 10 / (20 * SECONDS_PER_TOKEN)
    times = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
    lengths = np.clip(rng.normal(20, 10, len(times)), 3, 100).astype(int)
    arrivals = [
        Waiting(i, f"t{i % 40}", int(n), float(t), float(t) + float(rng.uniform(*deadlines_s)))
        for i, (t, n) in enumerate(zip(times, lengths, strict=True))
    ]
    tokens, batch_s = int(full_batch_s / SECONDS_PER_TOKEN), 0.05 * full_batch_s
    queue = queue_of(policy, Budget(1, tokens, 64, 64), capacity=500, starve_after_s=5.0, batch_s=batch_s)
    outcomes = simulate(arrivals, queue, lambda batch: batch_s + service_s(batch))
    in_time = sum(outcome.request.tokens for outcome in outcomes if outcome.in_time)
    end_s = max(outcome.ended_s for outcome in outcomes)
    assert in_time * SECONDS_PER_TOKEN >= least * end_s / 1.05
    late = [o for o in outcomes if o.kind == "answered" and o.ended_s > o.request.deadline_s + 1e-3]
    assert not late, "a late request was computed"


def taken_tokens(queue: RequestQueue) -> int:
    taken = queue.take(0.0)
    assert taken.batch is not None
    return sum(r.tokens for r in taken.batch.requests)


def test_a_batch_takes_at_most_half_of_the_time_that_requests_are_given() -> None:
    queue = queue_of(Fcfs())
    for i in range(50):
        queue.offer(request(i, deadline_s=0.12), 0.0)
    assert taken_tokens(queue) == 60


def test_of_a_second_stage_the_time_that_the_first_took_is_not_given() -> None:
    queue = queue_of(Fcfs())
    for i in range(50):
        queue.offer(request(i, arrived_s=0.0, deadline_s=1.0), 0.88)
    taken = queue.take(0.88)
    assert taken.batch is not None
    assert sum(r.tokens for r in taken.batch.requests) == 60


@pytest.mark.parametrize(("hasty", "tokens"), [(4, 100), (8, 60)])
def test_a_few_requests_in_a_hurry_do_not_make_everybodys_batches_small(hasty: int, tokens: int) -> None:
    queue = queue_of(Sjf())
    for i in range(50):
        # Longer than the other requests, so that they are not chosen themselves.
        is_hasty = i < hasty
        queue.offer(request(i, tokens=11 if is_hasty else 10, deadline_s=0.12 if is_hasty else 9.0), 0.0)
    assert taken_tokens(queue) == tokens


def test_however_little_time_they_are_given_four_tenants_have_one_request_each() -> None:
    queue = queue_of(Edf())
    for i in range(16):
        tenant = f"t{i % 4}"
        queue.offer(request(i, tenant, deadline_s=0.06 if tenant == "t0" else 0.5), 0.0)
    taken = queue.take(0.0)
    assert taken.batch is not None
    assert Counter(r.tenant for r in taken.batch.requests) == {"t0": 1, "t1": 1, "t2": 1, "t3": 1}


def test_what_has_become_hopeless_is_refused_though_it_was_not_chosen() -> None:
    queue = queue_of(Sjf())
    for i in range(20):
        queue.offer(request(i), 0.0)
    queue.offer(request(20, tokens=50, deadline_s=0.06), 0.0)
    for _ in range(30):
        queue.cost.observe(100, 2000, 0.15)
    taken = queue.take(0.0)
    assert taken.batch is not None
    assert 20 not in {r.id for r in taken.batch.requests}
    assert [(r.request.id, r.reason) for r in taken.refused] == [(20, "deadline")]


def test_a_few_in_a_hurry_do_not_make_a_short_queue_an_overload() -> None:
    queue = queue_of(Das(), Budget(1, 1024, 64, 64))
    for i in range(20):
        queue.offer(request(i, deadline_s=0.1 if i < 4 else 10.0), 0.0)
    # It arrived while a batch ran, so little of its time is left.
    queue.offer(request(20, deadline_s=0.29), 0.04)
    taken = queue.take(0.25)
    assert taken.batch is not None
    assert 20 not in {r.request.id for r in taken.refused}


def test_rows_become_fewer_where_there_are_several() -> None:
    def filled(deadline_s: float) -> list[int]:
        queue = queue_of(Fcfs(), Budget(8, 50, 64, 64))
        for i in range(100):
            queue.offer(request(i, deadline_s=deadline_s), 0.0)
        taken = queue.take(0.0)
        assert taken.batch is not None
        return [sum(r.tokens for r in row) for row in taken.batch.rows]

    assert filled(1.0) == [50] * 8
    assert filled(0.5) == [50] * 5
    # A row has room for one request at least, and the least number of requests is four.
    assert filled(0.3) == [50] * 4


def test_das_serves_more_utility_than_edf_when_not_all_can_be_served() -> None:
    rng = np.random.default_rng(1)
    times = np.cumsum(rng.exponential(1 / 200, 4000))
    lengths = np.clip(rng.normal(20, 10, len(times)), 3, 100).astype(int)
    arrivals = [
        Waiting(i, "t", int(n), float(t), float(t) + float(rng.uniform(0.1, 0.6)))
        for i, (t, n) in enumerate(zip(times, lengths, strict=True))
    ]

    def utility(policy: Policy) -> float:
        outcomes = simulate(arrivals, queue_of(policy, capacity=1000), service_s)
        return sum(o.request.utility for o in outcomes if o.in_time)

    assert utility(Das()) > 1.2 * utility(Edf())


class Raises:
    def select(self, waiting: Sequence[Waiting], now_s: float, budget: Budget) -> Batch:
        raise ValueError("no")


class Nonsense:
    def __init__(self, answer: object) -> None:
        self._answer = answer

    def select(self, waiting: Sequence[Waiting], now_s: float, budget: Budget) -> Batch:
        return self._answer  # type: ignore[return-value]


@pytest.mark.parametrize(
    "policy", [Raises(), Nonsense(None), Nonsense(Batch(())), Nonsense(Batch(((request(999),),))), Nonsense("x")]
)
def test_a_policy_that_raises_or_returns_nonsense_is_reported_and_served_around(policy: Policy) -> None:
    queue = queue_of(policy)
    for i in range(20):
        queue.offer(request(i), 0.0)
    taken = queue.take(0.0)
    assert taken.policy_failure is not None
    assert taken.batch is not None
    assert [r.id for r in taken.batch.requests] == list(range(10))
    assert queue.preview(queue.snapshot(), 0.0) == ()


@pytest.mark.parametrize(("deadline_s", "is_refused"), [(0.0, True), (1e-6, True), (3e7, False), (math.inf, False)])
def test_deadlines_from_none_at_all_to_a_year_and_for_ever(deadline_s: float, is_refused: bool) -> None:
    queue = queue_of(Edf())
    refused = queue.offer(request(0, deadline_s=deadline_s), 0.0)
    assert [r.reason for r in refused] == (["deadline"] if is_refused else [])
    assert (queue.take(0.0).batch is None) == is_refused


def test_a_request_that_cannot_be_met_behind_the_running_batch_is_refused_at_once() -> None:
    queue = queue_of(Fcfs())
    queue.offer(request(0, tokens=100), 0.0)
    assert queue.take(0.0).batch is not None
    (refused,) = queue.offer(request(1, tokens=10, deadline_s=0.1), 0.0)
    assert refused.reason == "deadline"
    assert queue.offer(request(2, tokens=10, deadline_s=0.2), 0.0) == []


def test_an_urgent_request_is_saved_by_a_smaller_batch_when_little_waits() -> None:
    queue = queue_of(Edf())
    queue.offer(request(0, tokens=90, deadline_s=10.0), 0.0)
    queue.offer(request(1, tokens=10, deadline_s=0.05), 0.0)
    taken = queue.take(0.0)
    assert taken.batch is not None
    assert [r.id for r in taken.batch.requests] == [1]
    assert not taken.refused
    assert len(queue) == 1


def test_one_request_that_has_become_hopeless_costs_no_other_its_place() -> None:
    queue = queue_of(Edf())
    queue.offer(request(0, deadline_s=0.0101), 0.0)
    for i in range(1, 9):
        queue.offer(request(i, deadline_s=0.4), 0.0)
    # Batches take longer than at the request's arrival.
    for _ in range(30):
        queue.cost.observe(100, 2000, 0.15)
    taken = queue.take(0.0)
    assert taken.batch is not None
    assert {r.id for r in taken.batch.requests} == set(range(1, 9))
    assert [r.request.id for r in taken.refused] == [0]


def test_what_waited_too_long_is_not_computed_either_where_it_would_be_late() -> None:
    queue = queue_of(Fcfs(), Budget(1, 1000, 64, 64), starve_after_s=2.0)
    for i in range(20):
        queue.offer(request(i, deadline_s=2.25), 0.0)
    taken = queue.take(2.15)
    assert taken.batch is not None
    assert 0 < len(taken.batch.requests) <= 10
    assert all(r.deadline_s >= 2.15 + service_s(taken.batch) for r in taken.batch.requests)


def test_a_cancelled_request_is_gone_and_draining_empties_the_queue() -> None:
    queue = queue_of(Fcfs())
    for i in range(3):
        queue.offer(request(i), 0.0)
    assert queue.cancel(1)
    assert not queue.cancel(1)
    assert [r.id for r in queue.drain()] == [0, 2]
    assert len(queue) == 0


def test_a_model_that_refuses_everything_on_an_idle_server_comes_round() -> None:
    queue = RequestQueue(
        Fcfs(), Budget(1, 100, 64, 64), cost(seconds_per_token=1.0), capacity=10, weights={}, starve_after_s=math.inf
    )
    refusals = 0
    while queue.offer(request(refusals, deadline_s=2.0), 0.0):
        refusals += 1
        assert refusals < 500
    assert refusals > 0


def test_the_oldest_are_found_from_any_place_on() -> None:
    queue = queue_of(Fcfs())
    for i in range(6):
        queue.offer(request(i), 0.0)
    assert [r.id for r in queue.oldest(2)] == [0, 1]
    assert [r.id for r in queue.oldest(3, after=1)] == [2, 3, 4]
    assert queue.oldest(3, after=5) == []


def test_a_newcomer_does_not_replace_somebody_who_has_no_more_than_it_would_have() -> None:
    queue = queue_of(Fcfs(), capacity=2)
    queue.offer(request(0, "a"), 0.0)
    queue.offer(request(1, "b"), 0.0)
    (refused,) = queue.offer(request(2, "c"), 0.0)
    assert refused.request.id == 2


def test_a_flooding_tenant_has_no_more_than_its_share_by_waiting_long() -> None:
    flood = [request(i, "flood", tokens=5, arrived_s=0.0) for i in range(90)]
    others = [request(100 + i, f"other{i}", tokens=10, arrived_s=9.0) for i in range(9)]
    batch = fair_select(Fcfs(), [*flood, *others], 10.0, Budget(1, 100, 64, 64), {}, 2.0, ServiceHistory())
    assert {r.tenant for r in batch.requests} == {"flood", *(f"other{i}" for i in range(9))}
    assert sum(r.tokens for r in batch.requests if r.tenant == "flood") <= 10


def test_slots_longer_than_any_row_are_no_choice() -> None:
    waiting = [request(0)]
    with pytest.raises(PolicyError, match="slots of 1000000000 tokens"):
        check(Batch((tuple(waiting),), slot_tokens=10**9), waiting, Budget(1, 100, 64, 64))
