"""A tenant with few requests is served beside any number of tenants that flood the server."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hplm.scheduling.cost import CostModel
from hplm.scheduling.fairness import fair_select
from hplm.scheduling.policies import Das, Fcfs, Sjf
from hplm.scheduling.policy import Batch, Budget, Policy, Waiting, check
from hplm.scheduling.queue import RequestQueue
from hplm.scheduling.service_history import MOST_TENANTS, ServiceHistory
from hplm.scheduling.simulator import simulate

SECONDS, BATCH_S, TOKEN_S = 6.0, 1e-3, 30e-6
FLOOD, QUIET_EVERY_S, QUIET_DEADLINE_S = 3.0, 0.25, 1.0


def service_s(batch: Batch) -> float:
    return BATCH_S + TOKEN_S * sum(request.tokens for request in batch.requests)


def answered_share(policy: Policy, budget: Budget, flooders: int, flood_tokens: int, quiet_tokens: int) -> float:
    """Simulate a tenant with a request every quarter of a second beside others that send three times the capacity."""
    rng = np.random.default_rng(0)
    each = int(FLOOD * SECONDS / (flood_tokens * TOKEN_S) / flooders)
    asked = [(float(t), f"f{i}", flood_tokens, 30.0) for i in range(flooders) for t in rng.uniform(0, SECONDS, each)]
    asked += [(float(t), "quiet", quiet_tokens, QUIET_DEADLINE_S) for t in np.arange(3, SECONDS, QUIET_EVERY_S)]
    arrivals = [Waiting(i, name, n, t, t + d) for i, (t, name, n, d) in enumerate(sorted(asked))]
    cost = CostModel.fit([(n, n * 10, BATCH_S + TOKEN_S * n) for n in (4, 32, 256, 2048)])
    queue = RequestQueue(policy, budget, cost, capacity=4096, weights={}, starve_after_s=2.0)
    own = [one for one in simulate(arrivals, queue, service_s) if one.request.tenant == "quiet"]
    return sum(one.in_time for one in own) / len(own)


UPPER, LOOK_UP = Budget(1, 1024, 64, 63), Budget(1, 2048, 64, 64)


@pytest.mark.parametrize("policy", [Fcfs(), Sjf(), Das()], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize(
    ("budget", "flooders", "flood_tokens", "quiet_tokens"),
    [
        *(
            (UPPER, *flood)
            for flood in ((7, 20, 60), (7, 20, 200), (19, 25, 100), (40, 25, 60), (63, 12, 12), (100, 12, 200))
        ),
        *((LOOK_UP, *flood) for flood in ((7, 20, 200), (100, 12, 12))),
    ],
)
def test_a_text_longer_than_its_share_is_answered_beside_a_flood(
    policy: Policy, budget: Budget, flooders: int, flood_tokens: int, quiet_tokens: int
) -> None:
    assert answered_share(policy, budget, flooders, flood_tokens, quiet_tokens) == 1.0


def test_it_is_so_in_rows_too() -> None:
    assert answered_share(Das(), Budget(8, 128, 64, 63), 19, 25, 100) == 1.0


def flood(tenants: int, each: int, tokens: int = 10) -> list[Waiting]:
    return [Waiting(i, f"f{i % tenants}", tokens, i * 1e-3, math.inf) for i in range(tenants * each)]


def served(*batches: tuple[float, tuple[str, ...]]) -> ServiceHistory:
    found = ServiceHistory()
    for at_s, tenants in batches:
        found.add(tenants, at_s)
    return found


def test_who_was_served_longest_ago_goes_first_by_weight() -> None:
    others = [Waiting(1000 + i, name, 10, 1.0, math.inf) for i, name in enumerate(("new", "old", "heavy"))]
    waiting = [*flood(8, 8), *others]
    before = served((1.0, ("old",)), (2.0, ("new", "heavy")), (3.0, tuple(f"f{i}" for i in range(8))))
    # Half of the batch holds two of them. The weight of `heavy` makes its one second of waiting count four times.
    batch = fair_select(Fcfs(), waiting, 4.0, Budget(1, 1000, 4, 4), {"heavy": 4.0}, math.inf, before)
    assert [one.tenant for one in batch.requests[:2]] == ["heavy", "old"]


def test_without_a_tenant_that_is_served_again_the_policy_chooses_alone() -> None:
    waiting = flood(100, 1)
    batch = fair_select(Sjf(), waiting, 4.0, Budget(1, 200, 20, 20), {}, math.inf, served((1.0, ("f98", "f99"))))
    assert batch == Sjf().select(waiting, 4.0, Budget(1, 200, 20, 20))


@pytest.mark.parametrize("rows", [1, 4])
def test_no_more_than_half_of_a_batch_is_taken_from_the_policy(rows: int) -> None:
    quiet = [Waiting(1000 + i, f"q{i}", 10, 1.0 + i, math.inf) for i in range(50)]
    waiting = [*flood(4, 20), *quiet]
    budget = Budget(rows, 400 // rows, 40, 40)
    batch = fair_select(Fcfs(), waiting, 60.0, budget, {}, math.inf, served((0.5, ("f0", "f1", "f2", "f3"))))
    check(batch, waiting, budget)
    assert {one.tenant for one in batch.requests if one.tenant.startswith("f")}


def test_a_text_that_no_batch_holds_has_its_turn_alone() -> None:
    giant = Waiting(1000, "quiet", 500, 1.0, math.inf)
    batch = fair_select(
        Fcfs(), [*flood(2, 20), giant], 2.0, Budget(1, 100, 64, 64), {}, math.inf, served((1.0, ("f0", "f1")))
    )
    assert batch.requests == (giant,)


def test_no_more_tenants_are_remembered_than_fit() -> None:
    found = ServiceHistory()
    for i in range(MOST_TENANTS + 5):
        found.add((f"t{i}",), float(i))
    assert found.served_s("t4") == -math.inf
    assert found.served_s("t5") == 5.0
    assert found.last == {f"t{MOST_TENANTS + 4}"}
