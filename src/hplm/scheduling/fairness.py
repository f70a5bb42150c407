"""Shares of a batch.

The rule: while others wait, a tenant gets of a batch's tokens, and of its requests, at most its share, which is its weight
over the weights of all tenants that wait, but always room for one request. What the others leave free is given back: first
everybody's shares are filled, then the policy fills what is left with whatever waits. A tenant that sends more than its
share waits behind its own requests, not before others'.

And nobody starves: requests that have waited longer than `starve_after_s` go first, oldest first, of each tenant within
its share, into at most half of the batch (but at least one), whatever the policy prefers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from hplm.scheduling.policy import Batch, Budget, Filler, Policy, Waiting, check


def fair_select(
    policy: Policy,
    waiting: Sequence[Waiting],
    now_s: float,
    budget: Budget,
    weights: Mapping[str, float],
    starve_after_s: float,
) -> Batch:
    """A batch by `policy` within the rule. `waiting` is in the order of arrival. Raises PolicyError as `check` does.

    Where thousands wait, what the policy likes best seldom has more of a tenant than its share: it is asked once then, and
    for each tenant apart only where it has.
    """
    if not waiting:
        return Batch(())
    counts = Counter(map(attrgetter("tenant"), waiting))
    share = _shares(counts, budget, weights)
    starving = _starving(waiting, now_s, budget, starve_after_s, share)
    fill = _rows if budget.rows > 1 else _row
    served = {request.tenant for request in starving}
    parts = ([request for request in waiting if request.tenant not in served], waiting) if starving else (waiting,)
    batch = fill(policy, starving, parts, now_s, _all_shares(counts, share, budget, weights))
    if len(counts) == 1 or len(batch.requests) == len(waiting) or _keeps_to_shares(batch, share):
        return batch
    within = _within_shares(policy, waiting, counts, starving, now_s, share)
    return fill(policy, starving, (within, waiting), now_s, budget)


def _checked(policy: Policy, waiting: Sequence[Waiting], now_s: float, budget: Budget) -> Batch:
    # A tuple: a policy that takes out what it chose must not take it from those who still wait.
    batch = policy.select(tuple(waiting), now_s, budget)
    check(batch, waiting, budget)
    return batch


def _row(
    policy: Policy, starving: Sequence[Waiting], parts: Sequence[Sequence[Waiting]], now_s: float, budget: Budget
) -> Batch:
    """One row: `starving`, then what the policy chooses of each of `parts` in turn for the room that is left."""
    chosen = list(starving)
    slot_tokens = None
    for part in parts:
        room = _remaining(budget, chosen)
        if room.row_tokens <= 0 or room.max_requests <= 0:
            break
        left = part
        if chosen:
            taken = {request.id for request in chosen}
            # A request longer than what is left would be put in "an empty row": here the row is not empty.
            left = [request for request in part if request.tokens <= room.row_tokens and request.id not in taken]
            known = {request.tenant for request in chosen}
            if room.max_tenants == 0:
                left = [request for request in left if request.tenant in known]
                room = replace(room, max_tenants=max(1, len(known)))
        if left:
            batch = _checked(policy, left, now_s, room)
            slot_tokens = max(filter(None, (batch.slot_tokens, slot_tokens)), default=None)
            chosen += batch.requests
    return Batch((tuple(chosen),), slot_tokens)


def _rows(
    policy: Policy, starving: Sequence[Waiting], parts: Sequence[Sequence[Waiting]], now_s: float, budget: Budget
) -> Batch:
    """As `_row` over several rows: starving requests have rows of their own, what stays empty is filled after."""
    filler = Filler(replace(budget, rows=max(1, budget.rows // 2)))
    for request in starving:
        any(filler.put(row, request) for row in range(len(filler.rows)))
    rows = list(filler.batch().rows)
    slot_tokens = None
    for part in parts:
        chosen = [request for row in rows for request in row]
        taken = {request.id for request in chosen}
        known = {request.tenant for request in chosen}
        left = [request for request in part if request.id not in taken] if taken else part
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


def _keeps_to_shares(batch: Batch, share: Callable[[str], _Share]) -> bool:
    """Whether no tenant has more of the batch than its share; a single request is always within."""
    of_tenant: dict[str, list[int]] = {}
    for request in batch.requests:
        of_tenant.setdefault(request.tenant, []).append(request.tokens)
    for tenant, tokens in of_tenant.items():
        if len(tokens) > 1:
            most = share(tenant)
            if len(tokens) > most.requests or sum(tokens) > most.tokens:
                return False
    return True


class _Share(NamedTuple):
    """What of a batch is a tenant's while the others wait."""

    tokens: int
    requests: int


def _shares(tenants: Mapping[str, int], budget: Budget, weights: Mapping[str, float]) -> Callable[[str], _Share]:
    """The share of each of `tenants`."""
    total = sum(weights.get(tenant, 1.0) for tenant in tenants) if weights else float(len(tenants))

    def share(tenant: str) -> _Share:
        weight = weights.get(tenant, 1.0)
        return _Share(max(1, int(budget.tokens * weight / total)), max(1, int(budget.max_requests * weight / total)))

    return share


def _all_shares(
    tenants: Mapping[str, int], share: Callable[[str], _Share], budget: Budget, weights: Mapping[str, float]
) -> Budget:
    """`budget` with no more requests than the shares of so many tenants hold: any more is somebody's surplus."""
    heaviest = max(tenants, key=lambda tenant: weights.get(tenant, 1.0)) if weights else next(iter(tenants))
    return replace(budget, max_requests=min(budget.max_requests, budget.max_tenants * share(heaviest).requests))


def _starving(
    waiting: Sequence[Waiting],
    now_s: float,
    budget: Budget,
    starve_after_s: float,
    share: Callable[[str], _Share],
) -> list[Waiting]:
    """Requests that waited too long, oldest first: half of the budget, of each tenant its share, but one at least."""
    old = [request for request in waiting if now_s - request.arrived_s > starve_after_s]
    found: list[Waiting] = []
    used: dict[str, _Share] = {}
    tokens = 0
    for request in sorted(old, key=attrgetter("arrived_s", "id")):
        own = used.get(request.tenant)
        if own:
            most = share(request.tenant)
            if own.tokens + request.tokens > most.tokens or own.requests >= most.requests:
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
    waiting: Sequence[Waiting],
    counts: Mapping[str, int],
    starving: Sequence[Waiting],
    now_s: float,
    share: Callable[[str], _Share],
) -> list[Waiting]:
    """Of each tenant, what its share holds beside what `starving` has of it; the policy chooses where it wants more."""
    first = {request.id for request in starving}
    found: list[Waiting] = []
    several: dict[str, list[Waiting]] = {}
    for request in waiting:
        if counts[request.tenant] > 1:
            several.setdefault(request.tenant, []).append(request)
        elif request.id not in first:
            found.append(request)
    for tenant, requests in several.items():
        own, most = [request for request in requests if request.id in first], share(tenant)
        room = _Share(most.tokens - sum(request.tokens for request in own), most.requests - len(own))
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
