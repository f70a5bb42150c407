"""Fair shares of a batch.

1. Shares. While other tenants wait, a tenant gets at most its share of a batch's tokens and of its requests. The share is the
   tenant's weight over the weights of all tenants that wait, but there is always room for one request. First the shares of
   all tenants are filled. Then the policy fills the rest of the batch with any requests. A tenant that sends more than its
   share therefore waits behind its own requests.

2. Tenants that were passed over. Shares do not protect a tenant whose text is longer than its share, nor a tenant among more
   tenants than a batch holds. So the oldest request of a tenant that was not in the last batch goes before tenants that were
   in it. Tenants that were served longest ago go first. Their requests replace at most as much as the tenants of the last
   batch have in this one, and at most half of the batch.

3. No request starves. Requests that have waited longer than `starve_after_s` go first, oldest first, whatever the policy
   prefers. They get at most half of the batch, but one request at least, and each tenant stays within its share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from hplm.scheduling.policy import Batch, Budget, Filler, Policy, Waiting, check, tokens_of
from hplm.scheduling.service_history import ServiceHistory

# How often the policy chooses among all waiting requests before it has to choose for each tenant apart.
TRIES = 4


def fair_select(
    policy: Policy,
    waiting: Sequence[Waiting],
    now_s: float,
    budget: Budget,
    weights: Mapping[str, float],
    starve_after_s: float,
    history: ServiceHistory,
) -> Batch:
    """Return a batch by `policy` within the rules above. `waiting` is in the order of arrival. Raises PolicyError.

    If thousands of requests wait, the policy's choice rarely gives a tenant more than its share. So the policy first chooses
    among all requests, and for each tenant apart only if that breaks a share.
    """
    if not waiting:
        return Batch(())
    counts = Counter(map(attrgetter("tenant"), waiting))
    choice = _Choice(policy, waiting, counts, now_s, budget, _Shares(counts, budget, weights))
    starving = choice.starving(starve_after_s)
    fill = choice.once
    if getattr(policy, "fills_batches", True):
        fill = choice.rows if budget.rows > 1 else choice.row
    batch = fill(starving)
    passed_over = choice.passed_over(batch, starving, history)
    return fill([*passed_over, *starving]) if passed_over else batch


class _Shares:
    """The share of a batch that each tenant has while the other tenants wait."""

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
    """The tokens and requests of each tenant in a batch."""

    def __init__(self, shares: _Shares) -> None:
        self._shares = shares
        self._used: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        """Return the number of tenants."""
        return len(self._used)

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._used

    def has_room(self, request: Waiting) -> bool:
        """Return whether the tenant's share has room for a request. There is always room for a tenant's first request."""
        if request.tenant not in self._used:
            return True
        tokens, requests = self._used[request.tenant]
        shares, tenant = self._shares, request.tenant
        return tokens + request.tokens <= shares.tokens(tenant) and requests < shares.requests(tenant)

    def add(self, request: Waiting) -> None:
        tokens, requests = self._used.get(request.tenant, (0, 0))
        self._used[request.tenant] = tokens + request.tokens, requests + 1

    def full(self) -> set[str]:
        """Return the tenants whose shares are used up."""
        shares = self._shares
        return {
            tenant
            for tenant, (tokens, requests) in self._used.items()
            if tokens >= shares.tokens(tenant) or requests >= shares.requests(tenant)
        }


@dataclass(frozen=True)
class _Choice:
    """The choice of one batch from `waiting`. `counts` has the number of waiting requests of each tenant."""

    policy: Policy
    waiting: Sequence[Waiting]
    counts: Mapping[str, int]
    now_s: float
    budget: Budget
    shares: _Shares

    def starving(self, starve_after_s: float) -> list[Waiting]:
        """Return the requests of rule 3, oldest first."""
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

    def passed_over(self, batch: Batch, starving: Sequence[Waiting], history: ServiceHistory) -> list[Waiting]:
        """Return the requests of rule 2: the oldest of each tenant that is neither in the last batch nor in `batch`.

        There are none if `batch` has no tenant of the last batch. Otherwise there is at least one, if it fits beside
        `starving`.
        """
        again = [request for request in batch.requests if request.tenant in history.last]
        if not again:
            return []
        known = history.last.union(request.tenant for request in batch.requests)
        heads: dict[str, Waiting] = {}
        for request in self.waiting:
            if request.tenant not in known:
                heads.setdefault(request.tenant, request)

        def order(request: Waiting) -> tuple[float, float, int]:
            since_s = self.now_s - history.served_s(request.tenant)
            return -since_s * self.shares.weight(request.tenant), request.arrived_s, request.id

        most_tokens = min(tokens_of(again), self.budget.tokens // 2)
        most_requests = min(len(again), max(1, self.budget.max_requests // 2))
        tokens, tenants = tokens_of(starving), len({request.tenant for request in starving})
        most_tenants = self.budget.max_tenants - tenants
        found: list[Waiting] = []
        for request in sorted(heads.values(), key=order):
            if len(found) >= min(most_requests, most_tenants, self.budget.max_requests - len(starving)):
                break
            fits = tokens + tokens_of(found) + request.tokens <= self.budget.tokens
            if found and tokens_of(found) + request.tokens > most_tokens:
                continue
            # A request that is longer than a batch runs alone.
            if fits or not (starving or found):
                found.append(request)
        return found

    def row(self, starving: Sequence[Waiting]) -> Batch:
        """Return a batch of one row: `starving`, then the shares of all tenants, then the policy's choice for the rest."""
        batch = Batch((tuple(starving),))
        candidates = self.waiting
        # If there are few tenants, the policy chooses for each of them at once.
        for _ in range(TRIES if len(self.counts) > self.budget.max_requests else 0):
            kept, full = self._within(batch)
            if full:
                candidates = [request for request in self.waiting if request.tenant not in full]
            # Requests beyond a tenant's share are taken out, and the policy chooses others in their place.
            batch = self._add_to_row(kept, candidates)
            if self._keeps_to_shares(batch):
                break
        else:
            kept, _ = self._within(batch)
            batch = self._add_to_row(kept, self._left_of_shares(kept.requests))
        return self._add_to_row(batch, self.waiting)

    def once(self, starving: Sequence[Waiting]) -> Batch:
        """Return a batch of a policy that does not fill batches: `starving`, then one choice, within all tenants' shares."""
        add = self._add_rows if self.budget.rows > 1 else self._add_to_row
        first = self._first_rows(starving)
        batch = add(first, self.waiting)
        return batch if self._keeps_to_shares(batch) else add(first, self._left_of_shares(first.requests))

    def rows(self, starving: Sequence[Waiting]) -> Batch:
        """Return a batch of several rows: rows of starving requests, then rows of shares, then rows for the rest."""
        return self._add_rows(self.once(starving), self.waiting)

    def _first_rows(self, starving: Sequence[Waiting]) -> Batch:
        """Return rows of starving requests: at most half of the rows, or the only row."""
        if self.budget.rows == 1:
            return Batch((tuple(starving),))
        filler = Filler(replace(self.budget, rows=self.budget.rows // 2))
        for request in starving:
            any(filler.put(row, request) for row in range(len(filler.rows)))
        return filler.batch()

    def _within(self, batch: Batch) -> tuple[Batch, set[str]]:
        """Return the requests of a row that are within their tenants' shares, and the tenants whose shares are used up."""
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
        """Add the policy's choice from `candidates` to the room that is left in the row."""
        chosen = batch.requests
        known = {request.tenant for request in chosen}
        room = Budget(
            rows=1,
            row_tokens=self.budget.row_tokens - tokens_of(chosen),
            max_requests=self.budget.max_requests - len(chosen),
            # Tenants of the batch need no further slot; counting them again is on the safe side.
            max_tenants=self.budget.max_tenants - len(known),
        )
        if room.row_tokens <= 0 or room.max_requests <= 0:
            return batch
        left = candidates
        if chosen:
            taken = {request.id for request in chosen}
            # A policy puts a request that is too long into an empty row. Here the row is not empty.
            left = [request for request in candidates if request.tokens <= room.row_tokens and request.id not in taken]
            if room.max_tenants == 0:
                left = [request for request in left if request.tenant in known]
                room = replace(room, max_tenants=max(1, len(known)))
        if not left:
            return batch
        more = self._checked(left, room)
        return Batch(((*chosen, *more.requests),), _longer(batch.slot_tokens, more.slot_tokens))

    def _add_rows(self, batch: Batch, candidates: Sequence[Waiting]) -> Batch:
        """Add rows that the policy fills from `candidates`."""
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
        """Return the requests that fill each tenant's share beside `chosen`. The policy chooses if more wait than fit."""
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
            # A tenant's first request has room however long it is; `own` may be that request.
            left = [
                request for request in requests if request.id not in first and (not own or request.tokens <= tokens)
            ]
            if not left or room <= 0:
                continue
            fits = len(left) <= room and tokens_of(left) <= tokens
            found += left if len(left) == 1 or fits else self._checked(left, Budget(1, tokens, room, 1)).requests
        return found

    def _checked(self, waiting: Sequence[Waiting], budget: Budget) -> Batch:
        # A tuple, because a policy that removes its choice from the sequence must not change the queue.
        batch = self.policy.select(tuple(waiting), self.now_s, budget)
        check(batch, waiting, budget)
        return batch


def _longer(first: int | None, second: int | None) -> int | None:
    return max(filter(None, (first, second)), default=None)
