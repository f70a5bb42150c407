"""The bounded queue of a stage: which requests wait, which are refused, and which run next.

Only `preview` and `backlog` are thread-safe; for all else the caller holds a lock. The time is an argument, so that tests and
the simulator use the same code.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from hplm.scheduling.cost import CostModel
from hplm.scheduling.downstream_admission import Backlog, by_tenant, steps
from hplm.scheduling.fairness import fair_select
from hplm.scheduling.policies import Fcfs
from hplm.scheduling.policy import Batch, Budget, Policy, Waiting, tokens_of
from hplm.scheduling.service_history import ServiceHistory
from hplm.scheduling.student_number import StudentNumber, StudentRules, plan_students, work_of
from hplm.scheduling.weighted_fair import WeightedFair

# A batch takes at most this share of the time that requests have, so that a request that arrives during a batch can go with
# the next.
_SHARE_OF_TIME = 0.5
# The quantile of that time which counts. With the least time, one very urgent request would make all batches small.
_URGENT_QUANTILE = 0.1
# A batch has room for at least so many requests, because shares of one or two requests mean nothing.
_LEAST_REQUESTS = 4
# The order of tenants is computed anew when the number of waiting requests has grown by this factor.
_FAIR_ORDER_UP_TO = 1.06


@dataclass(frozen=True)
class RefusedRequest:
    """A request that will not be computed, because the queue is `full` or because its `deadline` cannot be met."""

    request: Waiting
    reason: Literal["full", "deadline"]


@dataclass(frozen=True)
class TakeResult:
    """The result of `take`: the batch to run now (None if no request is left), refused requests, a policy's failure."""

    batch: Batch | None
    refused: tuple[RefusedRequest, ...]
    policy_failure: BaseException | None = None


class RequestQueue:
    """A queue of at most `capacity` requests that refuses what it cannot serve in time.

    Full queue. If the new request's tenant has less than its share of the queue, the request replaces the newest request of
    the tenant that is furthest above its share. Otherwise the new request is refused. So a tenant that floods the queue
    pushes out only its own requests.

    Refused on arrival. A request is refused if its deadline is past, or could not be met even if the request ran alone right
    after the current batch. With policy `fcfs` it is also refused if more than two batches go before it and make it late.
    What goes before it is, of each tenant, as much work as its own tenant would have by weight. (Other policies may prefer a
    new request.) If a batch holds one request and no other tenant's requests wait, all requests before the new one count, each
    with its own time.

    Late requests of a chosen batch. Requests that the whole batch would make late are saved by a smaller batch, if the smaller
    batch has at least half of the tokens, or if all waiting requests fit in two batches. Otherwise the late requests are
    refused, because under overload small batches make more requests late than they save. But if refusals leave less than
    the smaller batch has, the smaller batch runs.

    Refused when a batch begins. A request whose deadline passes while the batch runs is refused at once. While more requests
    wait than two batches hold, a request that a full batch would make late is refused too, unless its deadline was that
    close on arrival. Otherwise a policy that prefers urgent requests would run only those, in very small batches.

    Size of a batch. A batch is cut below `budget` if a full one would take longer than half of the time that requests have on
    arrival (of ten or more requests, the tenth with least time does not count). Then a request that arrives during a batch can
    still be answered by the next. A batch always has room for four requests of mean length, or four rows, and its tokens take
    at least four times as long as its fixed cost. "Two batches" above means two that take half of the median of that time.
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
        students: StudentRules | None = None,
    ) -> None:
        self._policy = policy
        # A subclass of Fcfs does not count, because it may prefer new requests.
        self._is_in_order = type(policy) is Fcfs
        self._budget = budget
        self.cost = cost
        self._capacity = capacity
        self._weights = weights
        self._starve_after_s = starve_after_s
        self._waiting: dict[int, Waiting] = {}
        self._of_tenant: dict[str, dict[int, Waiting]] = {}
        self._tokens_of: dict[str, int] = {}
        # The fair order of tenants, by requests and by tokens, and the number of requests for which it was computed.
        self._fair_order: tuple[WeightedFair, WeightedFair] | None = None
        self._fair_order_of = 0
        # The time that each request had on arrival. In a second stage it is less than the client gave.
        self._time_s: dict[int, float] = {}
        # From the last `take`: the budget cut to the urgent requests' time, and the budget cut to the median time.
        self._urgent_budget = self._median_budget = budget
        # The urgent budget, cut for the students that the cap allows.
        self._batch_budget = budget
        self.students = StudentNumber(students or StudentRules())
        # A heap of tenants by share used. Outdated entries are skipped when they reach the top.
        self._fullest: list[tuple[float, str]] = []
        self._history = ServiceHistory()
        self._running: Batch | None = None
        self._running_from_s = 0.0
        # The past while no batch runs.
        self._running_until_s = -math.inf
        # From the last `take`: tokens and seconds of a full batch of requests of mean length.
        self._full = (0, 0.0)
        self._newest_arrived_s = 0.0
        self.waiting_tokens = 0
        self._waiting_squares = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, request: Waiting, now_s: float) -> list[RefusedRequest]:
        """Let a request wait. Return the requests that are refused for it, which may include the request itself."""
        self._newest_arrived_s = max(self._newest_arrived_s, request.arrived_s)
        start_s = max(now_s, self._running_until_s)
        if start_s + self._seconds((request,)) > request.deadline_s:
            if self._running is None and not self._waiting and request.deadline_s > now_s:
                self.cost.relax()
            return [RefusedRequest(request, "deadline")]
        if not self._waiting:
            # The budget was cut for earlier requests, which says nothing about this one.
            self._urgent_budget = self._median_budget = self._batch_budget = self._budget
        if self._is_in_order and self._comes_too_late(request, start_s):
            return [RefusedRequest(request, "deadline")]
        refused = []
        if len(self._waiting) >= self._capacity:
            victim = self._victim(request)
            if victim is request:
                return [RefusedRequest(request, "full")]
            self._remove(victim)
            refused.append(RefusedRequest(victim, "full"))
        self.students.admit(request.students.most)
        self._waiting[request.id] = request
        self._of_tenant.setdefault(request.tenant, {})[request.id] = request
        self._tokens_of[request.tenant] = self._tokens_of.get(request.tenant, 0) + request.tokens
        self._time_s[request.id] = request.deadline_s - now_s
        self.waiting_tokens += request.tokens
        self._waiting_squares += request.squares
        heapq.heappush(self._fullest, (-self._fill_of(request.tenant), request.tenant))
        return refused

    def take(self, now_s: float) -> TakeResult:
        """Choose the next batch and remove it from the queue; `done` must follow before the next `take`."""
        refused = self._refuse(self._hopeless(now_s))
        if not self._waiting:
            return TakeResult(None, tuple(refused))
        times_s = sorted(self._time_s.values())
        self._urgent_budget = self._budget_within(times_s[int(_URGENT_QUANTILE * len(times_s))])
        self._median_budget = self._budget_within(times_s[len(times_s) // 2])
        self._full = self._full_batch(self.cost.predict)
        refused += self._refuse_pressed(now_s)
        self._batch_budget = self._budget_for_students(now_s)
        waiting = self.snapshot()
        failure: BaseException | None = None
        try:
            batch = self._select(self._policy, waiting, now_s)
        except BaseException as error:
            # The policy may be foreign code. Whatever it raises, the computing thread must go on.
            _raise_on_main_thread(error)
            failure = error
            batch = self._select(Fcfs(), waiting, now_s)
        batch, late = self._fit_deadlines(batch, now_s)
        for request in batch.requests:
            self._remove(request)
        refused += self._refuse(late)
        numbers = plan_students(batch.requests, self._waiting.values(), self.students.cap, self.cost, now_s)
        batch = replace(batch, students=numbers)
        work = work_of(batch.requests, numbers)
        # Requests whose deadline passes while the batch runs.
        passing_s = now_s + self.cost.predict(*work)
        refused += self._refuse([request for request in self.snapshot() if request.deadline_s <= passing_s])
        self._fair_order = None
        self._history.add((request.tenant for request in batch.requests), now_s)
        self._running, self._running_from_s = batch, now_s
        self._running_until_s = now_s + self.cost.bound(*work)
        return TakeResult(batch, tuple(refused), failure)

    def snapshot(self) -> list[Waiting]:
        """Return all waiting requests in the order of arrival."""
        return list(self._waiting.values())

    def preview(self, waiting: list[Waiting], now_s: float) -> tuple[Waiting, ...]:
        """Return what `take` would choose from a snapshot, for prefetching. Needs no lock, because it changes nothing."""
        try:
            return self._select(self._policy, waiting, now_s).requests if waiting else ()
        except BaseException as error:
            _raise_on_main_thread(error)
            # `take` meets the same failure and reports it.
            return ()

    def backlog(self, waiting: list[Waiting], now_s: float) -> Backlog:
        """Return the backlog of a snapshot for the stage before this one. Needs no lock, because it changes nothing."""
        free_s = max(now_s, self._running_until_s)
        return Backlog(
            now_s,
            free_s,
            *self._full,
            self._newest_arrived_s,
            *steps(waiting),
            by_tenant(waiting),
            self.cost.bounds_s,
        )

    def done(self, seconds: float) -> None:
        """Note that the batch of the last `take` took `seconds`; 0 if the time says nothing about other batches."""
        assert self._running is not None
        requests, work = self._running.requests, work_of(self._running.requests, self._running.students)
        self._running, self._running_until_s = None, -math.inf
        if self.students.most > 1:
            more = work_of(requests, [request.within(self.students.cap + 1) for request in requests])
            usual_s, more_s = self.cost.predict(*work), self.cost.predict(*more)
            more_s = seconds * more_s / usual_s if seconds and usual_s else more_s
            self.students.after_batch(tokens_of(requests), more_s, self._running_from_s + seconds)
        self.cost.observe(*work, seconds)

    def cancel(self, request_id: int) -> bool:
        """Take a request out of the queue. Return False if it does not wait there."""
        if request_id not in self._waiting:
            return False
        self._remove(self._waiting[request_id])
        return True

    def oldest(self, count: int, after: int = -1) -> list[Waiting]:
        """Return the first requests with an id above `after`, in the order of arrival, at most `count`."""
        return list(itertools.islice((request for request in self._waiting.values() if request.id > after), count))

    def drain(self) -> list[Waiting]:
        """Take all requests out of the queue and return them."""
        drained = self.snapshot()
        for request in drained:
            self._remove(request)
        return drained

    def _select(self, policy: Policy, waiting: list[Waiting], now_s: float) -> Batch:
        return fair_select(
            policy, waiting, now_s, self._batch_budget, self._weights, self._starve_after_s, self._history
        )

    def _budget_within(self, time_s: float) -> Budget:
        """Return the budget of a batch if requests have `time_s` on arrival."""
        tokens = self.cost.tokens_within(_SHARE_OF_TIME * time_s, self._waiting_squares / self.waiting_tokens)
        least = _LEAST_REQUESTS * self.waiting_tokens / len(self._waiting)
        return self._budget.holding(max(tokens, least), _LEAST_REQUESTS)

    def _budget_for_students(self, now_s: float) -> Budget:
        """Return the budget of the next batch, after the cap on students has fallen or risen."""
        if self.students.most == 1:
            return self._urgent_budget
        under_cap = self._under_cap(self._median_budget)
        waiting_batches = max(self.waiting_tokens / under_cap.tokens, len(self._waiting) / under_cap.max_requests)
        most = max(request.students.most for request in self._waiting.values())
        self.students.before_batch(waiting_batches, self.waiting_tokens, most, now_s)
        return self._under_cap(self._urgent_budget)

    def _under_cap(self, budget: Budget) -> Budget:
        """Return a budget cut so that its requests fit into it with as many students as the cap allows."""
        numbers = [request.within(self.students.cap) for request in self._waiting.values()]
        tokens, _ = work_of(self._waiting.values(), numbers)
        least = _LEAST_REQUESTS * self.waiting_tokens / len(self._waiting)
        cut = budget.holding(max(budget.tokens * self.waiting_tokens / tokens, least), _LEAST_REQUESTS)
        # Each student of a tenant has an adapter slot.
        return replace(cut, max_tenants=max(1, cut.max_tenants // max(numbers)))

    def _seconds(self, requests: tuple[Waiting, ...]) -> float:
        return self.cost.bound(*_work(requests))

    def _refuse(self, requests: Iterable[Waiting]) -> list[RefusedRequest]:
        """Take requests out of the queue because of their deadlines."""
        refused = [RefusedRequest(request, "deadline") for request in requests]
        for one in refused:
            self._remove(one.request)
        return refused

    def _hopeless(self, now_s: float) -> list[Waiting]:
        """Return requests that could not end in time even alone, by the present cost model."""
        longest = max((request.tokens for request in self._waiting.values()), default=0)
        # No request takes longer alone, so only requests with an earlier deadline need a closer look.
        by_s = now_s + self.cost.bound(longest, longest**2)
        urgent = [request for request in self._waiting.values() if request.deadline_s < by_s]
        return [request for request in urgent if request.deadline_s < now_s + self._seconds((request,))]

    def _refuse_pressed(self, now_s: float) -> list[RefusedRequest]:
        """While more than two batches wait, refuse requests that a full batch would make late.

        Requests whose deadline was that close on arrival stay.
        """
        refused: list[RefusedRequest] = []
        if self.fills_two_batches and not self._runs_one_by_one:
            _, full_s = self._full_batch(self.cost.bound)
            pressed = [request for request in self._waiting.values() if request.deadline_s < now_s + full_s]
            for request in sorted(pressed, key=lambda r: r.deadline_s):
                # One text with many students may be larger than two batches. The last text is never refused here.
                if not self.fills_two_batches or len(self._waiting) == 1:
                    break
                if request.deadline_s - request.arrived_s > 2 * full_s:
                    refused += self._refuse([request])
        return refused

    def _comes_too_late(self, request: Waiting, start_s: float) -> bool:
        """Return whether a new request, first come, first served, would be late behind more than two batches.

        Return False for a request that waited for files before it came here, because later arrivals do not go before it.
        """
        if self._waiting and self._runs_one_by_one and request.tenant in self._of_tenant:
            is_last = request.arrived_s >= next(reversed(self._waiting.values())).arrived_s
            tokens, squares = self.waiting_tokens + request.tokens, self._waiting_squares + request.squares
            batches_s = self.cost.bound(tokens, squares) + len(self._waiting) * self.cost.bound(0, 0)
            return is_last and start_s + batches_s > request.deadline_s
        if not self.fills_two_batches:
            return False
        oldest = next(iter(self._waiting.values())).arrived_s
        newest = next(reversed(self._waiting.values())).arrived_s
        if request.arrived_s < (oldest + newest) / 2:
            return False
        _, batch_s = self._full_batch(self.cost.predict)
        _, last_batch_s = self._full_batch(self.cost.bound)

        def is_late(batches: float) -> bool:
            return batches > 2 and start_s + last_batch_s + math.floor(batches) * batch_s > request.deadline_s

        # The upper limit is known without the order of tenants.
        budget = self._urgent_budget
        if not is_late(self._batches(budget, self.waiting_tokens, len(self._waiting))):
            return False
        by_requests, by_tokens = self._current_fair_order()
        requests = len(self._of_tenant.get(request.tenant, ())) + 1
        tokens = self._tokens_of.get(request.tenant, 0) + request.tokens
        tokens_before, before = by_tokens.before(request.tenant, tokens), by_requests.before(request.tenant, requests)
        # A batch always has room for one request of each tenant, as far as it holds so many.
        tenants = len(self._of_tenant)
        of_each = self._batches(budget, tenants * self.waiting_tokens / len(self._waiting), tenants)
        return is_late(min(self._batches(budget, tokens_before, before), requests * max(1.0, of_each)))

    def _batches(self, budget: Budget, tokens: float, requests: float) -> float:
        """Return the number of batches for so many tokens and requests, and for a request of each tenant."""
        return max(tokens / budget.tokens, requests / budget.max_requests, len(self._of_tenant) / budget.max_tenants)

    def _current_fair_order(self) -> tuple[WeightedFair, WeightedFair]:
        if self._fair_order is None or len(self._waiting) > _FAIR_ORDER_UP_TO * self._fair_order_of:
            requests = {tenant: len(own) for tenant, own in self._of_tenant.items()}
            self._fair_order = WeightedFair(requests, self._weights), WeightedFair(self._tokens_of, self._weights)
            self._fair_order_of = len(self._waiting)
        return self._fair_order

    @property
    def _runs_one_by_one(self) -> bool:
        """Whether the requests that wait will run in the order of arrival, each in a batch of its own."""
        return self._is_in_order and self._budget.max_requests == 1 and len(self._of_tenant) <= 1

    @property
    def fills_two_batches(self) -> bool:
        """Whether more requests wait than two batches hold."""
        return self._batches(self._median_budget, self.waiting_tokens, len(self._waiting)) > 2

    def _full_batch(self, seconds_of: Callable[[int, int], float]) -> tuple[int, float]:
        """Return the tokens and seconds of a full batch whose requests have the mean length of the waiting ones."""
        budget, waiting = self._urgent_budget, len(self._waiting)
        tokens = min(budget.tokens, int(budget.max_requests * self.waiting_tokens / waiting))
        return tokens, seconds_of(tokens, int(tokens * self.waiting_tokens / waiting))

    def _fit_deadlines(self, batch: Batch, now_s: float) -> tuple[Batch, list[Waiting]]:
        """Return the batch without late requests, and the refused ones among these. The other late requests wait."""
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
        # If whole batches take longer than any request has, nothing is left of the large one.
        return (large, refused) if tokens_of(large.requests) >= tokens_of(small.requests) else (small, [])

    def _ending_in_time(self, requests: tuple[Waiting, ...], now_s: float) -> list[Waiting]:
        """Return requests that end together before their earliest deadline: starving requests first, then the most urgent."""
        kept: list[Waiting] = []
        tokens, squares, earliest_s = 0, 0, math.inf
        for request in sorted(
            requests, key=lambda r: (now_s - r.arrived_s <= self._starve_after_s, r.deadline_s, r.id)
        ):
            more = tokens + request.tokens, squares + request.squares
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
        """Return how many requests a tenant has in the queue, divided by its weight."""
        return len(self._of_tenant.get(tenant, ())) / self._weight(tenant)

    def _victim(self, newcomer: Waiting) -> Waiting:
        """Return the request that gives way in a full queue.

        It is the newest request of the tenant furthest above its share, or the newcomer itself.
        """
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
        del self._time_s[request.id]
        self.waiting_tokens -= request.tokens
        self._waiting_squares -= request.squares
        if not self._waiting:
            self._fullest.clear()
        if len(self._fullest) > 4 * len(self._of_tenant) + 64:
            self._fullest = [(-self._fill_of(tenant), tenant) for tenant in self._of_tenant]
            heapq.heapify(self._fullest)


def _raise_on_main_thread(error: BaseException) -> None:
    """Raise an interrupt again on the main thread, because there it comes from the user, not from the policy."""
    if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
        raise error


def _work(requests: Iterable[Waiting]) -> tuple[int, int]:
    """Return the inputs of the cost model for requests with their least number of students, see `work_of`."""
    tokens = squares = 0
    for request in requests:
        tokens, squares = tokens + request.tokens, squares + request.squares
    return tokens, squares


def _without(batch: Batch, dropped: list[Waiting]) -> Batch:
    if not dropped:
        return batch
    ids = {request.id for request in dropped}
    rows = (tuple(request for request in row if request.id not in ids) for row in batch.rows)
    return Batch(tuple(row for row in rows if row), batch.slot_tokens)
