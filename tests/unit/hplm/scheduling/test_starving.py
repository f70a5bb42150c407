"""Every request is answered or refused with a reason by its deadline, whatever the policy prefers."""

from __future__ import annotations

import numpy as np
import pytest

from hplm.core.settings import EncodeSettings
from hplm.scheduling.policy import Budget, Waiting
from hplm.scheduling.policy_loader import BUILT_IN, load_policy
from hplm.scheduling.simulator import Outcome, simulate
from tests.unit.hplm.scheduling.test_queue import SECONDS_PER_TOKEN, queue_of, service_s

TOKENS_PER_S = 1 / SECONDS_PER_TOKEN
LONG_ARRIVES_S, LONG_DEADLINE_S = 1.5, 7.0
ENDS_S = 9.0
# The time of short requests: less than the time to starve, or more than any request waits.
HASTY_S, PATIENT_S = 0.6, 30.0

policies = pytest.mark.parametrize("policy", BUILT_IN)
tenants = pytest.mark.parametrize("tenant", ["t0", "quiet"])
deadlines = pytest.mark.parametrize("deadline_s", [HASTY_S, PATIENT_S], ids=["hasty", "patient"])


def outcomes_of(policy: str, long: Waiting, load: float, deadline_s: float) -> list[Outcome]:
    """Return the arrivals of a long request and, until after its deadline, of short ones at `load` times the capacity."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 12, int(load * TOKENS_PER_S * ENDS_S / 7))
    at = np.sort(rng.uniform(0, ENDS_S, len(lengths)))
    others = [
        Waiting(1 + i, f"t{i % 20}", tokens, arrived_s, arrived_s + deadline_s)
        for i, (tokens, arrived_s) in enumerate(zip(lengths.tolist(), at.tolist(), strict=True))
    ]
    queue = queue_of(
        load_policy(policy, {}), Budget(1, 100, 64, 64), capacity=300, starve_after_s=EncodeSettings.starve_after_s
    )
    outcomes = simulate(sorted([long, *others], key=lambda one: one.arrived_s), queue, service_s)
    return sorted(outcomes, key=lambda one: one.request.id)


def long_request(tenant: str, tokens: int) -> Waiting:
    return Waiting(0, tenant, tokens, LONG_ARRIVES_S, LONG_DEADLINE_S)


@policies
@tenants
@deadlines
def test_beyond_capacity_nobody_is_left_until_its_deadline_is_over(policy: str, tenant: str, deadline_s: float) -> None:
    outcomes = outcomes_of(policy, long_request(tenant, 90), 3.0, deadline_s)
    kinds = {one.kind for one in outcomes}
    assert "answered" in kinds
    assert len(kinds) > 1
    assert all(one.ended_s <= one.request.deadline_s + 1e-9 for one in outcomes)


@policies
@tenants
@pytest.mark.parametrize("tokens", [90, 250], ids=["nearly a row", "more than a row"])
def test_beyond_capacity_a_long_request_is_answered_while_short_ones_keep_coming(
    policy: str, tenant: str, tokens: int
) -> None:
    long = outcomes_of(policy, long_request(tenant, tokens), 3.0, HASTY_S)[0]
    assert long.in_time
    # It runs when it has waited too long and the batch of that moment has ended.
    assert long.ended_s < LONG_ARRIVES_S + EncodeSettings.starve_after_s + 1.0


@policies
@tenants
@deadlines
def test_below_capacity_a_long_request_is_answered(policy: str, tenant: str, deadline_s: float) -> None:
    assert outcomes_of(policy, long_request(tenant, 250), 0.7, deadline_s)[0].in_time
