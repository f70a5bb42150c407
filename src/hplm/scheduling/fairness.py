"""Shares of a batch.

The rule: while others wait, a tenant gets of a batch's tokens, and of its requests, at most its share, which is its weight
over the weights of all tenants that wait, but always room for one request. What the others leave free is given back: first
everybody's shares are filled, then the policy fills what is left with whatever waits. A tenant that sends more than its
share waits behind its own requests, not before others'.

And nobody starves: requests that have waited longer than `starve_after_s` go first, oldest first, of each tenant within
its share, into at most half of the batch (but at least one), whatever the policy prefers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from hplm.scheduling.policy import Batch, Budget, Filler, Policy, Waiting, check


def fair_select(
    policy: Policy,
    waiting: Sequence[Waiting],
    now_s: float,
    budget: Budget,
    weights: Mapping[str, float],
    starve_after_s: float,
) -> Batch:
    """A batch by `policy` within the rule. `waiting` is in the order of arrival. Raises PolicyError as `check` does."""
    by_tenant: dict[str, list[Waiting]] = {}
    for request in waiting:
        by_tenant.setdefault(request.tenant, []).append(request)
    shares = _shares(by_tenant, budget, weights)
    starving = _starving(waiting, now_s, budget, starve_after_s, shares)
    fits = len(waiting) <= budget.max_requests and sum(r.tokens for r in waiting) <= budget.tokens
    if not starving and (len(by_tenant) == 1 or fits):
        return _checked(policy, waiting, now_s, budget)
    within = _within_shares(policy, by_tenant, starving, now_s, shares)
    if budget.rows > 1:
        return _rows(policy, starving, within, waiting, now_s, budget)
    chosen = list(starving)
    slot_tokens = None
    for candidates in (within, waiting):
        taken = {request.id for request in chosen}
        left = [request for request in candidates if request.id not in taken]
        room = _remaining(budget, chosen)
        # A request longer than what is left would be put in "an empty row": here the row is not empty.
        left = [request for request in left if not chosen or request.tokens <= room.row_tokens]
        known = {request.tenant for request in chosen}
        if room.max_tenants == 0:
            left = [request for request in left if request.tenant in known]
            room = replace(room, max_tenants=max(1, len(known)))
        if not left or room.row_tokens <= 0 or room.max_requests <= 0:
            continue
        batch = _checked(policy, left, now_s, room)
        slot_tokens = max(filter(None, (batch.slot_tokens, slot_tokens)), default=None)
        chosen += batch.requests
    return Batch((tuple(chosen),), slot_tokens)


def _checked(policy: Policy, waiting: Sequence[Waiting], now_s: float, budget: Budget) -> Batch:
    # A tuple: a policy that takes out what it chose must not take it from those who still wait.
    batch = policy.select(tuple(waiting), now_s, budget)
    check(batch, waiting, budget)
    return batch


def _rows(
    policy: Policy,
    starving: Sequence[Waiting],
    candidates: Sequence[Waiting],
    waiting: Sequence[Waiting],
    now_s: float,
    budget: Budget,
) -> Batch:
    """As `fair_select` over several rows: starving requests have rows of their own, what stays empty is filled after."""
    filler = Filler(replace(budget, rows=max(1, budget.rows // 2)))
    for request in starving:
        any(filler.put(row, request) for row in range(len(filler.rows)))
    rows = list(filler.batch().rows)
    slot_tokens = None
    for part in (candidates, waiting):
        chosen = [request for row in rows for request in row]
        taken = {request.id for request in chosen}
        known = {request.tenant for request in chosen}
        left = [request for request in part if request.id not in taken]
        room = replace(
            budget,
            rows=budget.rows - len(rows),
            max_requests=budget.max_requests - len(chosen),
            max_tenants=budget.max_tenants - len(known),
        )
        if left and room.rows > 0 and room.max_requests > 0 and room.max_tenants > 0:
            batch = _checked(policy, left, now_s, room)
            slot_tokens = max(filter(None, (batch.slot_tokens, slot_tokens)), default=None)
            rows += batch.rows
    return Batch(tuple(rows), slot_tokens)


@dataclass(frozen=True)
class _Share:
    """What of a batch is a tenant's while the others wait."""

    tokens: int
    requests: int


def _shares(by_tenant: Collection[str], budget: Budget, weights: Mapping[str, float]) -> dict[str, _Share]:
    total = sum(weights.get(tenant, 1.0) for tenant in by_tenant)

    def of(whole: int, tenant: str) -> int:
        return max(1, int(whole * weights.get(tenant, 1.0) / total))

    return {tenant: _Share(of(budget.tokens, tenant), of(budget.max_requests, tenant)) for tenant in by_tenant}


def _starving(
    waiting: Sequence[Waiting], now_s: float, budget: Budget, starve_after_s: float, shares: Mapping[str, _Share]
) -> list[Waiting]:
    """Requests that waited too long, oldest first: half of the budget, of each tenant its share, but one at least."""
    old = [request for request in waiting if now_s - request.arrived_s > starve_after_s]
    found: list[Waiting] = []
    used: dict[str, _Share] = {}
    tokens = 0
    for request in sorted(old, key=lambda r: (r.arrived_s, r.id)):
        own, share = used.get(request.tenant), shares[request.tenant]
        if own and (own.tokens + request.tokens > share.tokens or own.requests >= share.requests):
            continue
        over = tokens + request.tokens > budget.tokens // 2 or len(found) >= max(1, budget.max_requests // 2)
        if found and (over or (not own and len(used) >= budget.max_tenants)):
            break
        found.append(request)
        before = own or _Share(0, 0)
        used[request.tenant] = _Share(before.tokens + request.tokens, before.requests + 1)
        tokens += request.tokens
    return found


def _within_shares(
    policy: Policy,
    by_tenant: Mapping[str, list[Waiting]],
    starving: Sequence[Waiting],
    now_s: float,
    shares: Mapping[str, _Share],
) -> list[Waiting]:
    """Of each tenant, what its share holds beside what `starving` has of it; the policy chooses where it wants more."""
    first = {request.id for request in starving}
    found: list[Waiting] = []
    for tenant, requests in by_tenant.items():
        own, share = [request for request in requests if request.id in first], shares[tenant]
        room = _Share(share.tokens - sum(request.tokens for request in own), share.requests - len(own))
        # There is always room for one request, however long: `own` may have been that.
        left = [one for one in requests if one.id not in first and (not own or one.tokens <= room.tokens)]
        if not left or room.requests <= 0:
            continue
        fits = len(left) <= room.requests and sum(request.tokens for request in left) <= room.tokens
        alone = Budget(1, room.tokens, room.requests, 1)
        found += left if len(left) == 1 or fits else _checked(policy, left, now_s, alone).requests
    return found


def _remaining(budget: Budget, chosen: Sequence[Waiting]) -> Budget:
    """What one row still holds. Tenants that are in the batch already cost no slot, so counting them is on the safe side."""
    return Budget(
        rows=1,
        row_tokens=budget.row_tokens - sum(request.tokens for request in chosen),
        max_requests=budget.max_requests - len(chosen),
        max_tenants=budget.max_tenants - len({request.tenant for request in chosen}),
    )
