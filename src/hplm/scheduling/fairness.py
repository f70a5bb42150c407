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

# How often the policy is asked over all that wait before it is asked for each tenant.
TRIES = 4


def fair_select(
    policy: Policy,
    waiting: Sequence[Waiting],
    now_s: float,
    budget: Budget,
    weights: Mapping[str, float],
    starve_after_s: float,
) -> Batch:
    """A batch by `policy` within the rule. `waiting` is in the order of arrival. Raises PolicyError as `check` does.

    Where thousands wait, what the policy likes best has little of a tenant beyond its share: it chooses among all of them,
    and for each tenant apart only where that would not do.
    """
    if not waiting:
        return Batch(())
    counts = Counter(map(attrgetter("tenant"), waiting))
    share = _shares(counts, budget, weights)
    starving = _starving(waiting, now_s, budget, starve_after_s, share)
    if budget.rows > 1:
        return _rows(policy, waiting, counts, starving, now_s, budget, share)
    return _row(policy, waiting, counts, starving, now_s, budget, share)


def _row(
    policy: Policy,
    waiting: Sequence[Waiting],
    counts: Mapping[str, int],
    starving: Sequence[Waiting],
    now_s: float,
    budget: Budget,
    share: Callable[[str], _Share],
) -> Batch:
    """One row: `starving`, everybody's shares, and what the policy chooses of all that wait for what is left."""
    batch = Batch((tuple(starving),))
    with_room: Sequence[Waiting] = waiting
    # Of few tenants, each is asked for at once.
    for _ in range(TRIES if len(counts) > budget.max_requests else 0):
        kept, served = _within(batch, share)
        if served:
            with_room = [request for request in waiting if request.tenant not in served]
        # What the policy chooses too much of one tenant is taken out, and its place is asked for again.
        batch = _add_to_row(policy, kept, with_room, now_s, budget)
        if len(_within(batch, share)[0].requests) == len(batch.requests):
            break
    else:
        kept, _ = _within(batch, share)
        left = _left_of_shares(policy, waiting, counts, kept.requests, now_s, share)
        batch = _add_to_row(policy, kept, left, now_s, budget)
    return _add_to_row(policy, batch, waiting, now_s, budget)


def _within(batch: Batch, share: Callable[[str], _Share]) -> tuple[Batch, set[str]]:
    """A row's requests that are within their tenants' shares, the first ones, and the tenants that can have no more."""
    used: dict[str, _Share] = {}
    kept: list[Waiting] = []
    served: set[str] = set()
    for request in batch.requests:
        own, most = used.get(request.tenant), share(request.tenant)
        if own and (own.tokens + request.tokens > most.tokens or own.requests >= most.requests):
            served.add(request.tenant)
            continue
        own = own or _Share(0, 0)
        used[request.tenant] = own = _Share(own.tokens + request.tokens, own.requests + 1)
        if own.requests >= most.requests or own.tokens >= most.tokens:
            served.add(request.tenant)
        kept.append(request)
    return Batch((tuple(kept),), batch.slot_tokens), served


def _add_to_row(policy: Policy, batch: Batch, candidates: Sequence[Waiting], now_s: float, budget: Budget) -> Batch:
    """What is in the row already, and what the policy chooses of `candidates` for the room that is left."""
    chosen = list(batch.requests)
    room = _remaining(budget, chosen)
    if room.row_tokens <= 0 or room.max_requests <= 0:
        return batch
    left = candidates
    if chosen:
        taken = {request.id for request in chosen}
        # A request longer than what is left would be put in "an empty row": here the row is not empty.
        left = [request for request in candidates if request.tokens <= room.row_tokens and request.id not in taken]
        known = {request.tenant for request in chosen}
        if room.max_tenants == 0:
            left = [request for request in left if request.tenant in known]
            room = replace(room, max_tenants=max(1, len(known)))
    if not left:
        return batch
    more = _checked(policy, left, now_s, room)
    return Batch((tuple([*chosen, *more.requests]),), _longer(batch.slot_tokens, more.slot_tokens))


def _rows(
    policy: Policy,
    waiting: Sequence[Waiting],
    counts: Mapping[str, int],
    starving: Sequence[Waiting],
    now_s: float,
    budget: Budget,
    share: Callable[[str], _Share],
) -> Batch:
    """Several rows: starving requests have rows of their own, then shares are filled, then what stays empty."""
    filler = Filler(replace(budget, rows=max(1, budget.rows // 2)))
    for request in starving:
        any(filler.put(row, request) for row in range(len(filler.rows)))
    first = filler.batch()
    batch = _add_rows(policy, first, waiting, now_s, budget)
    if len(_within(batch, share)[0].requests) < len(batch.requests):
        left = _left_of_shares(policy, waiting, counts, starving, now_s, share)
        batch = _add_rows(policy, first, left, now_s, budget)
    return _add_rows(policy, batch, waiting, now_s, budget)


def _add_rows(policy: Policy, batch: Batch, candidates: Sequence[Waiting], now_s: float, budget: Budget) -> Batch:
    """The rows there are, and those that the policy fills from `candidates`."""
    chosen = batch.requests
    taken = {request.id for request in chosen}
    left = [request for request in candidates if request.id not in taken] if taken else candidates
    room = replace(
        budget,
        rows=budget.rows - len(batch.rows),
        max_requests=budget.max_requests - len(chosen),
        max_tenants=budget.max_tenants - len({request.tenant for request in chosen}),
    )
    if not (left and room.rows > 0 and room.max_requests > 0 and room.max_tenants > 0):
        return batch
    more = _checked(policy, left, now_s, room)
    return Batch(batch.rows + more.rows, _longer(batch.slot_tokens, more.slot_tokens))


def _longer(first: int | None, second: int | None) -> int | None:
    return max(filter(None, (first, second)), default=None)


def _checked(policy: Policy, waiting: Sequence[Waiting], now_s: float, budget: Budget) -> Batch:
    # A tuple: a policy that takes out what it chose must not take it from those who still wait.
    batch = policy.select(tuple(waiting), now_s, budget)
    check(batch, waiting, budget)
    return batch


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


def _left_of_shares(
    policy: Policy,
    waiting: Sequence[Waiting],
    counts: Mapping[str, int],
    chosen: Sequence[Waiting],
    now_s: float,
    share: Callable[[str], _Share],
) -> list[Waiting]:
    """Of each tenant, what its share holds beside what `chosen` has of it; the policy chooses where it wants more."""
    first = {request.id for request in chosen}
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
