"""With first come, first served, a new request is refused if it would be late behind the requests that go before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hplm.scheduling.policies import Das, Fcfs
from hplm.scheduling.policy import Budget, Waiting
from hplm.scheduling.queue import RequestQueue
from hplm.scheduling.simulator import simulate
from tests.unit.hplm.scheduling.test_queue import queue_of, request, service_s


def admitted(queue: RequestQueue, requests: Sequence[Waiting], now_s: float = 0.0) -> list[int]:
    return [one.id for one in requests if not queue.offer(one, now_s)]


def many(
    count: int, tenant: str = "t", *, first: int = 0, tokens: int = 10, deadline_s: float = 1.0, arrived_s: float = 0.0
) -> list[Waiting]:
    return [request(first + i, tenant, tokens, arrived_s, deadline_s) for i in range(count)]


def test_first_come_first_served_who_comes_too_late_behind_others_is_refused_at_once() -> None:
    # Ten requests are a batch of 0.1 s, so a hundred can end within a second.
    assert len(admitted(queue_of(Fcfs(), capacity=1000), many(200))) == pytest.approx(100, abs=10)
    # A policy may prefer the new request.
    assert len(admitted(queue_of(Das(), capacity=1000), many(200))) == 200


def test_the_batch_that_runs_is_before_a_newcomer_too() -> None:
    queue = queue_of(Fcfs(), capacity=1000)
    admitted(queue, many(10, deadline_s=1e9))
    assert queue.take(0.0).batch is not None
    assert len(admitted(queue, many(200, first=100))) == pytest.approx(90, abs=10)


@pytest.mark.parametrize("tokens", [10, 90])
def test_a_newcomer_is_not_refused_for_what_others_have_beyond_their_share(tokens: int) -> None:
    queue = queue_of(Fcfs(), capacity=10_000)
    admitted(queue, many(2000, "flood", tokens=tokens, deadline_s=1e9))
    # While two tenants wait, each has half of a batch: four batches of 0.1 s have room for twenty requests of each.
    assert len(admitted(queue, many(50, "quiet", first=5000, deadline_s=0.45))) == pytest.approx(20, abs=6)


def test_who_has_more_weight_waits_behind_less() -> None:
    queue = queue_of(Fcfs(), capacity=10_000, weights={"heavy": 3.0})
    admitted(queue, many(2000, "flood", deadline_s=1e9))
    assert len(admitted(queue, many(50, "heavy", first=5000, deadline_s=0.45))) == pytest.approx(30, abs=6)


def test_of_a_tenant_with_hardly_any_weight_there_is_room_for_one_request_in_each_batch() -> None:
    queue = queue_of(Fcfs(), Budget(1, 200, 20, 20), capacity=10_000, weights={"light": 0.01})
    for number in range(10):
        admitted(queue, many(200, f"t{number}", first=1000 * number, deadline_s=1e9))
    assert len(admitted(queue, many(10, "light", first=20_000, deadline_s=0.7))) == pytest.approx(3, abs=1)


def test_who_has_several_waits_once_for_those_who_have_one_each() -> None:
    queue = queue_of(Fcfs(), Budget(1, 640, 64, 64), capacity=10_000)
    admitted(queue, many(4000, "flood", deadline_s=1e9))
    admitted(queue, [request(5000 + i, f"t{i}", deadline_s=1e9) for i in range(100)])
    # 160 requests go before the thirtieth of this tenant: a hundred, thirty of the flood, and its own thirty.
    assert len(admitted(queue, many(30, "several", first=6000, deadline_s=2.6))) == 30


def test_fewer_slots_than_tenants_make_more_batches() -> None:
    queue = queue_of(Fcfs(), Budget(1, 1000, 64, 5), capacity=1000)
    requests = [request(i, f"t{i}", deadline_s=1.0) for i in range(500)]
    # Requests of ten tokens each, five in a batch.
    for number, one in enumerate(requests[:5]):
        assert not queue.offer(one, 0.0), number
    taken = queue.take(0.0)
    assert taken.batch is not None
    assert len(taken.batch.requests) == 5
    queue.done(service_s(taken.batch))
    few = len(admitted(queue, requests[5:]))
    wide = queue_of(Fcfs(), Budget(1, 1000, 64, 64), capacity=1000)
    assert few < 0.5 * len(admitted(wide, requests[5:]))


def test_who_waited_for_files_is_not_put_behind_those_who_came_later() -> None:
    queue = queue_of(Fcfs(), capacity=1000)
    admitted(queue, [request(i, f"t{i}", arrived_s=0.01 * i, deadline_s=100.0) for i in range(300)])
    late = 3.0
    assert queue.offer(request(1000, "new", arrived_s=late, deadline_s=late + 1.0), late)
    assert not queue.offer(request(1001, "held", arrived_s=0.0, deadline_s=late + 1.0), late)


def test_nobody_is_refused_for_what_two_batches_hold() -> None:
    assert len(admitted(queue_of(Fcfs()), many(50, deadline_s=0.015))) == 21


def test_what_was_cut_for_one_in_a_hurry_is_forgotten_when_nobody_waits() -> None:
    queue = queue_of(Fcfs(), capacity=1000)
    queue.offer(request(0, deadline_s=0.02), 0.0)
    taken = queue.take(0.0)
    assert taken.batch is not None
    queue.done(service_s(taken.batch))
    assert len(admitted(queue, many(200, first=100))) == pytest.approx(100, abs=10)


@pytest.mark.parametrize(("full_batch_s", "noise"), [(0.1, 0.0), (0.1, 0.3), (1.0, 0.3)])
def test_under_overload_first_come_first_served_most_are_told_at_once(full_batch_s: float, noise: float) -> None:
    rng = np.random.default_rng(0)
    arrivals = [request(i, f"t{i % 40}", arrived_s=i / 300, deadline_s=i / 300 + 2.0) for i in range(3000)]
    queue = queue_of(Fcfs(), Budget(1, int(1000 * full_batch_s), 64, 64), capacity=4096)
    outcomes = simulate(arrivals, queue, lambda batch: service_s(batch) * float(np.exp(noise * rng.standard_normal())))
    waited = [one.ended_s - one.request.arrived_s for one in outcomes if one.kind != "answered"]
    assert len(waited) > 1500
    assert np.percentile(waited, 80) == 0
    assert sum(one.in_time for one in outcomes) > 0.85 * 1000
