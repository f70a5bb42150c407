"""The bounded queue of a stage: who may wait, who is refused at once, what runs next.

Not thread-safe but for `preview` and `backlog`: its owner holds a lock. Time is handed in, so tests and the simulator
drive the same code.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from hplm.scheduling.cost import CostModel
from hplm.scheduling.downstream_admission import Backlog, by_tenant, steps
from hplm.scheduling.fairness import fair_select
from hplm.scheduling.policies import Fcfs
from hplm.scheduling.policy import Batch, Budget, Policy, Waiting, tokens_of
from hplm.scheduling.service_history import Served
from hplm.scheduling.weighted_fair import WeightedFair

# A batch takes at most this share of the time that requests are given, so that who comes while one runs can go with the next.
_SHARE_OF_TIME = 0.5
# The time given that counts: this share of those that wait have less, where they are enough. By the least of all, one request
# in a great hurry would make everybody's batches small.
_HASTIEST = 0.1
# Shares of a batch mean nothing where it holds a request or two.
_LEAST_REQUESTS = 4
# Who goes before whom is worked out anew when so many times the requests wait.
_TURNS_UP_TO = 1.06


@dataclass(frozen=True)
class Refused:
    """A request that will not be computed: the queue is `full`, or its `deadline` cannot be met."""

    request: Waiting
    reason: Literal["full", "deadline"]


@dataclass(frozen=True)
class Taken:
    """The batch to run now, None where nothing is left to run; requests refused on the way; what a policy did wrong."""

    batch: Batch | None
    refused: tuple[Refused, ...]
    policy_failure: BaseException | None = None


class RequestQueue:
    """At most `capacity` requests.

    When it is full, a newcomer whose tenant has less than its share of the queue takes the place of the newest request of
    the tenant that is furthest above its own; any other newcomer is refused. A tenant that floods the queue so pushes out
    only itself.

    A request is refused at once when its deadline is past, or could not be met even if it ran alone right after the
    batch that runs now. First come, first served, also where it could not be met behind what goes before it, if that is
    more than two batches: of each tenant as much as its own would have, by weight. (Other policies may prefer a newcomer.)

    In a chosen batch, requests that the whole batch would make late are saved by leaving others for
    the next batch if that costs less than half of the batch, or if everything that waits fits in two batches anyway;
    otherwise they are refused, for under overload small batches would make more requests late than they save: unless less
    would be left of the batch than the small one has.

    What would wait past its deadline while the chosen batch runs is refused when that begins.

    While more waits than two batches hold, requests that a full batch would make late are refused as well, unless their
    deadline was that close from the start: a policy that prefers the most urgent would run nothing but those, in batches
    as small as they are urgent.

    A batch holds less than `budget` where a full one would take longer than half of the time that requests have when they
    come (of ten or more, but for the tenth that has least): who comes while one batch runs can then still be answered by the
    next. It holds four requests of mean length all the same, or four rows, and tokens that take four times as long as what a
    batch costs besides. "Two batches" above are two that take half of the median of that time.
    """

    def __init__(
        self,
        policy: Policy,
        budget: Budget,
        cost: CostModel,
        *,
        capacity: int,
        weights: Mapping[str, float],
        starve_after_s: float,
    ) -> None:
        self._policy = policy
        # Not of what is derived from it: that may prefer newcomers.
        self._is_in_order = type(policy) is Fcfs
        self._budget = budget
        self.cost = cost
        self._capacity = capacity
        self._weights = weights
        self._starve_after_s = starve_after_s
        self._waiting: dict[int, Waiting] = {}
        self._of_tenant: dict[str, dict[int, Waiting]] = {}
        self._tokens_of: dict[str, int] = {}
        # Of all tenants, by requests and by tokens, when so many requests waited.
        self._turns: tuple[WeightedFair, WeightedFair] | None = None
        self._turns_of = 0
        # What each had left when it came, which of a second stage is less than it was given.
        self._given_s: dict[int, float] = {}
        # Of the last `take`: what a batch may hold, and what it might if all were given the median of their time.
        self._in_time = self._usual = budget
        # A lazily kept heap: entries of counts that are gone are skipped when they come up.
        self._fullest: list[tuple[float, str]] = []
        self._served = Served()
        self._running: Batch | None = None
        self._running_until_s = 0.0
        # Of the last `take`: tokens and seconds of a full batch of requests as long as those that waited.
        self._full = (0, 0.0)
        self._newest_arrived_s = 0.0
        self.waiting_tokens = 0
        self._waiting_squares = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, request: Waiting, now_s: float) -> list[Refused]:
        """Let a request wait; returns who is refused for it, which may be the request itself."""
        self._newest_arrived_s = max(self._newest_arrived_s, request.arrived_s)
        start_s = max(now_s, self._running_until_s if self._running is not None else now_s)
        if start_s + self._seconds((request,)) > request.deadline_s:
            if self._running is None and not self._waiting and request.deadline_s > now_s:
                self.cost.relax()
            return [Refused(request, "deadline")]
        if not self._waiting:
            # What was cut for others says nothing about whoever comes now.
            self._in_time = self._usual = self._budget
        if self._is_in_order and self._comes_too_late(request, start_s):
            return [Refused(request, "deadline")]
        refused = []
        if len(self._waiting) >= self._capacity:
            victim = self._victim(request)
            if victim is request:
                return [Refused(request, "full")]
            self._remove(victim)
            refused.append(Refused(victim, "full"))
        self._waiting[request.id] = request
        self._of_tenant.setdefault(request.tenant, {})[request.id] = request
        self._tokens_of[request.tenant] = self._tokens_of.get(request.tenant, 0) + request.tokens
        self._given_s[request.id] = request.deadline_s - now_s
        self.waiting_tokens += request.tokens
        self._waiting_squares += request.tokens**2
        heapq.heappush(self._fullest, (-self._fill_of(request.tenant), request.tenant))
        return refused

    def take(self, now_s: float) -> Taken:
        """Choose the next batch and remove it from the queue; `done` must follow before the next `take`."""
        refused = [Refused(request, "deadline") for request in self._drop_hopeless(now_s)]
        if not self._waiting:
            return Taken(None, tuple(refused))
        self._cut_budget()
        self._full = self._tokens_of_full_batch, self._seconds_of_full_batch(self.cost.predict)
        refused += [Refused(request, "deadline") for request in self._drop_pressed(now_s)]
        waiting = self.snapshot()
        failure: BaseException | None = None
        try:
            batch = self._select(self._policy, waiting, now_s)
        except BaseException as error:
            # A third party's code: whatever it raises, the thread that computes must go on.
            _raise_on_main_thread(error)
            failure = error
            batch = self._select(Fcfs(), waiting, now_s)
        batch, late = self._fit_deadlines(batch, now_s)
        for request in (*batch.requests, *late):
            self._remove(request)
        refused += [Refused(request, "deadline") for request in (*late, *self._drop_passing(batch, now_s))]
        self._turns = None
        self._served.add((request.tenant for request in batch.requests), now_s)
        self._running = batch
        self._running_until_s = now_s + self._seconds(batch.requests)
        return Taken(batch, tuple(refused), failure)

    def snapshot(self) -> list[Waiting]:
        """All that wait now, in the order of arrival."""
        return list(self._waiting.values())

    def preview(self, waiting: list[Waiting], now_s: float) -> tuple[Waiting, ...]:
        """What `take` would choose of a snapshot, for a head start. Needs no lock: it changes nothing."""
        try:
            return self._select(self._policy, waiting, now_s).requests if waiting else ()
        except BaseException as error:
            _raise_on_main_thread(error)
            # `take` will meet the same failure and report it.
            return ()

    def backlog(self, waiting: list[Waiting], now_s: float) -> Backlog:
        """Of a snapshot, for the stage before this one. Needs no lock: it changes nothing."""
        free_s = self._running_until_s if self._running is not None else now_s
        told = (*self._full, self._newest_arrived_s, *steps(waiting), by_tenant(waiting))
        return Backlog(now_s, max(now_s, free_s), *told)

    def done(self, seconds: float) -> None:
        """The batch of the last `take` has ended after `seconds`; 0 where that says nothing about what batches cost."""
        assert self._running is not None
        requests = self._running.requests
        self._running = None
        self.cost.observe(*_work(requests), seconds)

    def cancel(self, request_id: int) -> bool:
        """Take a request out of the queue; False where it does not wait (any more)."""
        if request_id not in self._waiting:
            return False
        self._remove(self._waiting[request_id])
        return True

    def oldest(self, count: int, after: int = -1) -> list[Waiting]:
        """The requests that came first, of those with an id above `after`, at most `count`."""
        return list(itertools.islice((one for one in self._waiting.values() if one.id > after), count))

    def drain(self) -> list[Waiting]:
        """All that wait, taken out."""
        left = list(self._waiting.values())
        for request in left:
            self._remove(request)
        return left

    def _select(self, policy: Policy, waiting: list[Waiting], now_s: float) -> Batch:
        return fair_select(policy, waiting, now_s, self._in_time, self._weights, self._starve_after_s, self._served)

    def _cut_budget(self) -> None:
        given_s = sorted(self._given_s.values())
        self._in_time = self._budget_within(given_s[int(_HASTIEST * len(given_s))])
        self._usual = self._budget_within(given_s[len(given_s) // 2])

    def _budget_within(self, given_s: float) -> Budget:
        """What a batch may hold where requests have so much time when they come."""
        tokens = self.cost.tokens_within(_SHARE_OF_TIME * given_s, self._waiting_squares / self.waiting_tokens)
        least = _LEAST_REQUESTS * self.waiting_tokens / len(self._waiting)
        return self._budget.holding(max(tokens, least), _LEAST_REQUESTS)

    def _seconds(self, requests: tuple[Waiting, ...]) -> float:
        return self.cost.bound(*_work(requests))

    def _drop_hopeless(self, now_s: float) -> list[Waiting]:
        """What could not end in time even alone, by what batches are known to cost now."""
        longest = max((request.tokens for request in self._waiting.values()), default=0)
        # Nobody else needs to be looked at one by one.
        by_s = now_s + self.cost.bound(longest, longest**2)
        close = [request for request in self._waiting.values() if request.deadline_s < by_s]
        found = [request for request in close if request.deadline_s < now_s + self._seconds((request,))]
        for request in found:
            self._remove(request)
        return found

    def _drop_pressed(self, now_s: float) -> list[Waiting]:
        """Of more than two batches, what a full batch would make late, unless its deadline was that close from the start."""
        found: list[Waiting] = []
        if self.fills_two_batches:
            full_s = self._seconds_of_full_batch(self.cost.bound)
            pressed = [request for request in self._waiting.values() if request.deadline_s < now_s + full_s]
            for request in sorted(pressed, key=lambda r: r.deadline_s):
                if not self.fills_two_batches:
                    break
                if request.deadline_s - request.arrived_s > 2 * full_s:
                    found.append(request)
                    self._remove(request)
        return found

    def _drop_passing(self, batch: Batch, now_s: float) -> list[Waiting]:
        """What the batch leaves waiting past its deadline: it may as well know now."""
        requests = batch.requests
        by_s = now_s + self.cost.predict(*_work(requests))
        found = [request for request in self._waiting.values() if request.deadline_s <= by_s]
        for request in found:
            self._remove(request)
        return found

    def _comes_too_late(self, request: Waiting, start_s: float) -> bool:
        """Whether a newcomer, first come, first served, would be late behind more than two batches that go before it.

        Not where it comes late itself, because it waited for files: those who came meanwhile do not go before it.
        """
        if not self.fills_two_batches:
            return False
        oldest, newest = (
            next(iter(side)).arrived_s for side in (self._waiting.values(), reversed(self._waiting.values()))
        )
        if request.arrived_s < (oldest + newest) / 2:
            return False
        batch_s = self._seconds_of_full_batch(self.cost.predict)
        last_s = start_s + self._seconds_of_full_batch(self.cost.bound)

        def is_late(batches: float) -> bool:
            return batches > 2 and last_s + math.floor(batches) * batch_s > request.deadline_s

        # The most it can be is known at once.
        if not is_late(self._batches(self.waiting_tokens, len(self._waiting))):
            return False
        by_requests, by_tokens = self._taking_turns()
        requests = len(self._of_tenant.get(request.tenant, ())) + 1
        tokens = self._tokens_of.get(request.tenant, 0) + request.tokens
        batches = self._batches(by_tokens.before(request.tenant, tokens), by_requests.before(request.tenant, requests))
        # There is always room for one request of each tenant, as far as a batch holds so many.
        tenants = len(self._of_tenant)
        of_each = self._batches(tenants * self.waiting_tokens / len(self._waiting), tenants)
        return is_late(min(batches, requests * max(1.0, of_each)))

    def _batches(self, tokens: float, requests: float) -> float:
        """That hold so much, and something of each tenant."""
        budget = self._in_time
        return max(tokens / budget.tokens, requests / budget.max_requests, len(self._of_tenant) / budget.max_tenants)

    def _taking_turns(self) -> tuple[WeightedFair, WeightedFair]:
        if self._turns is None or len(self._waiting) > _TURNS_UP_TO * self._turns_of:
            requests = {tenant: len(own) for tenant, own in self._of_tenant.items()}
            self._turns = WeightedFair(requests, self._weights), WeightedFair(self._tokens_of, self._weights)
            self._turns_of = len(self._waiting)
        return self._turns

    @property
    def fills_two_batches(self) -> bool:
        """Whether more waits than two batches hold."""
        usual = self._usual
        tenants = len(self._of_tenant) > 2 * usual.max_tenants
        return tenants or self.waiting_tokens > 2 * usual.tokens or len(self._waiting) > 2 * usual.max_requests

    def _seconds_of_full_batch(self, seconds_of: Callable[[int, int], float]) -> float:
        """Of requests as long as those that wait."""
        tokens = self._tokens_of_full_batch
        return seconds_of(tokens, int(tokens * self.waiting_tokens / len(self._waiting)))

    @property
    def _tokens_of_full_batch(self) -> int:
        """Of requests as long as those that wait."""
        return min(self._in_time.tokens, int(self._in_time.max_requests * self.waiting_tokens / len(self._waiting)))

    def _fit_deadlines(self, batch: Batch, now_s: float) -> tuple[Batch, list[Waiting]]:
        """The batch without what it would make late, and what of that is refused (the rest goes on waiting)."""
        late_of_whole = self._late(batch.requests, now_s)
        if not late_of_whole:
            return batch, []
        ids = {request.id for request in self._ending_in_time(batch.requests, now_s)}
        small = _without(batch, [request for request in batch.requests if request.id not in ids])
        if 2 * tokens_of(small.requests) >= tokens_of(batch.requests) or not self.fills_two_batches:
            return small, []
        large, refused = batch, []
        while late_of_whole:
            refused += late_of_whole
            large = _without(large, late_of_whole)
            late_of_whole = self._late(large.requests, now_s)
        # Where whole batches take longer than anybody has, nothing is left of the large one.
        return (large, refused) if tokens_of(large.requests) >= tokens_of(small.requests) else (small, [])

    def _ending_in_time(self, requests: tuple[Waiting, ...], now_s: float) -> list[Waiting]:
        """The most urgent, after those who waited too long: as many as end before the earliest deadline among them."""
        kept: list[Waiting] = []
        tokens, squares, earliest_s = 0, 0, math.inf
        for request in sorted(
            requests, key=lambda r: (now_s - r.arrived_s <= self._starve_after_s, r.deadline_s, r.id)
        ):
            more = tokens + request.tokens, squares + request.tokens**2
            by_s = min(earliest_s, request.deadline_s)
            if now_s + self.cost.bound(*more) <= by_s:
                kept.append(request)
                (tokens, squares), earliest_s = more, by_s
        return kept

    def _late(self, requests: tuple[Waiting, ...], now_s: float) -> list[Waiting]:
        end_s = now_s + self._seconds(requests)
        return [request for request in requests if request.deadline_s < end_s]

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _fill_of(self, tenant: str) -> float:
        """How much of the queue a tenant has, by its weight."""
        return len(self._of_tenant.get(tenant, ())) / self._weight(tenant)

    def _victim(self, newcomer: Waiting) -> Waiting:
        """Who gives way in a full queue: the newest request of the tenant furthest above its share, or the newcomer."""
        while True:
            fill, tenant = self._fullest[0]
            if -fill == self._fill_of(tenant):
                break
            heapq.heappop(self._fullest)
            if tenant in self._of_tenant:
                heapq.heappush(self._fullest, (-self._fill_of(tenant), tenant))
        after = self._fill_of(newcomer.tenant) + 1 / self._weight(newcomer.tenant)
        if tenant == newcomer.tenant or after >= -fill:
            return newcomer
        return next(reversed(self._of_tenant[tenant].values()))

    def _remove(self, request: Waiting) -> None:
        del self._waiting[request.id]
        own = self._of_tenant[request.tenant]
        del own[request.id]
        self._tokens_of[request.tenant] -= request.tokens
        if not own:
            del self._of_tenant[request.tenant], self._tokens_of[request.tenant]
        del self._given_s[request.id]
        self.waiting_tokens -= request.tokens
        self._waiting_squares -= request.tokens**2
        if not self._waiting:
            self._fullest.clear()
        if len(self._fullest) > 4 * len(self._of_tenant) + 64:
            self._fullest = [(-self._fill_of(tenant), tenant) for tenant in self._of_tenant]
            heapq.heapify(self._fullest)


def _raise_on_main_thread(error: BaseException) -> None:
    """There an interrupt is the user's, not the policy's."""
    if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
        raise error


def _work(requests: Iterable[Waiting]) -> tuple[int, int]:
    """What the cost model asks for: tokens, and the sum of their squares, which attention takes."""
    lengths = [request.tokens for request in requests]
    return sum(lengths), sum(length**2 for length in lengths)


def _without(batch: Batch, dropped: list[Waiting]) -> Batch:
    if not dropped:
        return batch
    ids = {request.id for request in dropped}
    rows = (tuple(request for request in row if request.id not in ids) for row in batch.rows)
    return Batch(tuple(row for row in rows if row), batch.slot_tokens)
