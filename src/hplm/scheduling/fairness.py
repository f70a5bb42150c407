"""Shares of a batch.

The rule: while others wait, a tenant gets of a batch's tokens, and of its requests, at most its share, which is its weight
over the weights of all tenants that wait, but always room for one request. What the others leave free is given back: first
everybody's shares are filled, then the policy fills what is left with whatever waits. A tenant that sends more than its
share waits behind its own requests, not before others'.

Shares alone do not protect a tenant whose one text is longer than its share, or one of more tenants than a batch holds. So a
tenant that had nothing in the last batch goes before those that had: its oldest request, of the tenants that were served
longest ago, in place of as much as those have that are served again, up to half of the batch.

And nobody starves: requests that have waited longer than `starve_after_s` go first, oldest first, of each tenant within
its share, into at most half of the batch (but at least one), whatever the policy prefers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from hplm.scheduling.policy import Batch, Budget, Filler, Policy, Waiting, check, tokens_of
from hplm.scheduling.service_history import Served

# How often the policy is asked over all that wait before it is asked for each tenant.
TRIES = 4


def fair_select(
    policy: Policy,
    waiting: Sequence[Waiting],
    now_s: float,
    budget: Budget,
    weights: Mapping[str, float],
    starve_after_s: float,
    served: Served,
) -> Batch:
    """A batch by `policy` within the rule. `waiting` is in the order of arrival. Raises PolicyError as `check` does.

    Where thousands wait, what the policy likes best has little of a tenant beyond its share: it chooses among all of them,
    and for each tenant apart only where that would not do.
    """
    if not waiting:
        return Batch(())
    counts = Counter(map(attrgetter("tenant"), waiting))
    choice = _Choice(policy, waiting, counts, now_s, budget, _Shares(counts, budget, weights))
    starving = choice.starving(starve_after_s)
    fill = choice.rows if budget.rows > 1 else choice.row
    batch = fill(starving)
    left_out = choice.left_out(batch, starving, served)
    return fill([*left_out, *starving]) if left_out else batch


class _Shares:
    """What of a batch is each tenant's while the others wait."""

    def __init__(self, tenants: Collection[str], budget: Budget, weights: Mapping[str, float]) -> None:
        self._budget = budget
        self._weights = weights
        self._total = sum(weights.get(tenant, 1.0) for tenant in tenants) if weights else float(len(tenants))

    def tokens(self, tenant: str) -> int:
        return self._of(self._budget.tokens, tenant)

    def requests(self, tenant: str) -> int:
        return self._of(self._budget.max_requests, tenant)

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _of(self, whole: int, tenant: str) -> int:
        return max(1, int(whole * self.weight(tenant) / self._total))


class _Tally:
    """What tenants have of a batch, request by request."""

    def __init__(self, shares: _Shares) -> None:
        self._shares = shares
        self._used: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        """How many tenants."""
        return len(self._used)

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._used

    def has_room(self, request: Waiting) -> bool:
        """Whether it is within its tenant's share, as a tenant's first request always is."""
        if request.tenant not in self._used:
            return True
        tokens, requests = self._used[request.tenant]
        shares, tenant = self._shares, request.tenant
        return tokens + request.tokens <= shares.tokens(tenant) and requests < shares.requests(tenant)

    def add(self, request: Waiting) -> None:
        tokens, requests = self._used.get(request.tenant, (0, 0))
        self._used[request.tenant] = tokens + request.tokens, requests + 1

    def full(self) -> set[str]:
        """The tenants whose shares are used up."""
        shares = self._shares
        return {
            tenant
            for tenant, (tokens, requests) in self._used.items()
            if tokens >= shares.tokens(tenant) or requests >= shares.requests(tenant)
        }


@dataclass(frozen=True)
class _Choice:
    """One choice among `waiting`; `counts`: how many requests each tenant has there."""

    policy: Policy
    waiting: Sequence[Waiting]
    counts: Mapping[str, int]
    now_s: float
    budget: Budget
    shares: _Shares

    def starving(self, starve_after_s: float) -> list[Waiting]:
        """Requests that waited too long, oldest first: half of the budget, of each tenant its share, but one at least."""
        old = [request for request in self.waiting if self.now_s - request.arrived_s > starve_after_s]
        most_tokens, most_requests = self.budget.tokens // 2, max(1, self.budget.max_requests // 2)
        found: list[Waiting] = []
        tally = _Tally(self.shares)
        tokens = 0
        for request in sorted(old, key=attrgetter("arrived_s", "id")):
            if not tally.has_room(request):
                continue
            is_new = request.tenant not in tally
            over = tokens + request.tokens > most_tokens or len(found) >= most_requests
            if found and (over or (is_new and len(tally) >= self.budget.max_tenants)):
                break
            found.append(request)
            tally.add(request)
            tokens += request.tokens
        return found

    def left_out(self, batch: Batch, starving: Sequence[Waiting], served: Served) -> list[Waiting]:
        """The oldest request of tenants that are in neither the last batch nor this one, while this has some of the last.

        At most as much as those have, and half of the budget; but one at least, where it fits beside `starving`.
        """
        again = [request for request in batch.requests if request.tenant in served.last]
        if not again:
            return []
        known = served.last.union(request.tenant for request in batch.requests)
        heads: dict[str, Waiting] = {}
        for request in self.waiting:
            if request.tenant not in known:
                heads.setdefault(request.tenant, request)

        def turn(request: Waiting) -> tuple[float, float, int]:
            since_s = self.now_s - served.at_s(request.tenant)
            return -since_s * self.shares.weight(request.tenant), request.arrived_s, request.id

        most_tokens = min(tokens_of(again), self.budget.tokens // 2)
        most_requests = min(len(again), max(1, self.budget.max_requests // 2))
        tokens, tenants = tokens_of(starving), len({request.tenant for request in starving})
        most_tenants = self.budget.max_tenants - tenants
        found: list[Waiting] = []
        for request in sorted(heads.values(), key=turn):
            if len(found) >= min(most_requests, most_tenants, self.budget.max_requests - len(starving)):
                break
            fits = tokens + tokens_of(found) + request.tokens <= self.budget.tokens
            if found and tokens_of(found) + request.tokens > most_tokens:
                continue
            # One that no batch holds runs alone.
            if fits or not (starving or found):
                found.append(request)
        return found

    def row(self, starving: Sequence[Waiting]) -> Batch:
        """One row: `starving`, everybody's shares, and what the policy chooses of all that wait for what is left."""
        batch = Batch((tuple(starving),))
        candidates = self.waiting
        # Of few tenants, each is asked for at once.
        for _ in range(TRIES if len(self.counts) > self.budget.max_requests else 0):
            kept, served = self._within(batch)
            if served:
                candidates = [request for request in self.waiting if request.tenant not in served]
            # What the policy chooses too much of one tenant is taken out, and its place is asked for again.
            batch = self._add_to_row(kept, candidates)
            if self._keeps_to_shares(batch):
                break
        else:
            kept, _ = self._within(batch)
            batch = self._add_to_row(kept, self._left_of_shares(kept.requests))
        return self._add_to_row(batch, self.waiting)

    def rows(self, starving: Sequence[Waiting]) -> Batch:
        """Several rows: starving requests have rows of their own, then shares are filled, then what stays empty."""
        filler = Filler(replace(self.budget, rows=max(1, self.budget.rows // 2)))
        for request in starving:
            any(filler.put(row, request) for row in range(len(filler.rows)))
        first = filler.batch()
        batch = self._add_rows(first, self.waiting)
        if not self._keeps_to_shares(batch):
            batch = self._add_rows(first, self._left_of_shares(first.requests))
        return self._add_rows(batch, self.waiting)

    def _within(self, batch: Batch) -> tuple[Batch, set[str]]:
        """A row's first requests within their tenants' shares, and the tenants that can have no more of it."""
        tally = _Tally(self.shares)
        kept: list[Waiting] = []
        beyond: set[str] = set()
        for request in batch.requests:
            if tally.has_room(request):
                tally.add(request)
                kept.append(request)
            else:
                beyond.add(request.tenant)
        return Batch((tuple(kept),), batch.slot_tokens), beyond | tally.full()

    def _keeps_to_shares(self, batch: Batch) -> bool:
        return len(self._within(batch)[0].requests) == len(batch.requests)

    def _add_to_row(self, batch: Batch, candidates: Sequence[Waiting]) -> Batch:
        """What is in the row already, and what the policy chooses of `candidates` for the room that is left."""
        chosen = batch.requests
        known = {request.tenant for request in chosen}
        room = Budget(
            rows=1,
            row_tokens=self.budget.row_tokens - tokens_of(chosen),
            max_requests=self.budget.max_requests - len(chosen),
            # Tenants that are in the batch already cost no slot, so counting them is on the safe side.
            max_tenants=self.budget.max_tenants - len(known),
        )
        if room.row_tokens <= 0 or room.max_requests <= 0:
            return batch
        left = candidates
        if chosen:
            taken = {request.id for request in chosen}
            # A request longer than what is left would be put in "an empty row": here the row is not empty.
            left = [request for request in candidates if request.tokens <= room.row_tokens and request.id not in taken]
            if room.max_tenants == 0:
                left = [request for request in left if request.tenant in known]
                room = replace(room, max_tenants=max(1, len(known)))
        if not left:
            return batch
        more = self._checked(left, room)
        return Batch(((*chosen, *more.requests),), _longer(batch.slot_tokens, more.slot_tokens))

    def _add_rows(self, batch: Batch, candidates: Sequence[Waiting]) -> Batch:
        """The rows there are, and those that the policy fills from `candidates`."""
        chosen = batch.requests
        taken = {request.id for request in chosen}
        left = [request for request in candidates if request.id not in taken] if taken else candidates
        room = replace(
            self.budget,
            rows=self.budget.rows - len(batch.rows),
            max_requests=self.budget.max_requests - len(chosen),
            max_tenants=self.budget.max_tenants - len({request.tenant for request in chosen}),
        )
        if not (left and room.rows > 0 and room.max_requests > 0 and room.max_tenants > 0):
            return batch
        more = self._checked(left, room)
        return Batch(batch.rows + more.rows, _longer(batch.slot_tokens, more.slot_tokens))

    def _left_of_shares(self, chosen: Sequence[Waiting]) -> list[Waiting]:
        """Of each tenant, what its share holds beside what `chosen` has of it; the policy chooses where it wants more."""
        first = {request.id for request in chosen}
        found: list[Waiting] = []
        several: dict[str, list[Waiting]] = {}
        for request in self.waiting:
            if self.counts[request.tenant] > 1:
                several.setdefault(request.tenant, []).append(request)
            elif request.id not in first:
                found.append(request)
        for tenant, requests in several.items():
            own = [request for request in requests if request.id in first]
            tokens = self.shares.tokens(tenant) - tokens_of(own)
            room = self.shares.requests(tenant) - len(own)
            # There is always room for one request, however long: `own` may have been that.
            left = [one for one in requests if one.id not in first and (not own or one.tokens <= tokens)]
            if not left or room <= 0:
                continue
            fits = len(left) <= room and tokens_of(left) <= tokens
            found += left if len(left) == 1 or fits else self._checked(left, Budget(1, tokens, room, 1)).requests
        return found

    def _checked(self, waiting: Sequence[Waiting], budget: Budget) -> Batch:
        # A tuple: a policy that takes out what it chose must not take it from those who still wait.
        batch = self.policy.select(tuple(waiting), self.now_s, budget)
        check(batch, waiting, budget)
        return batch


def _longer(first: int | None, second: int | None) -> int | None:
    return max(filter(None, (first, second)), default=None)
