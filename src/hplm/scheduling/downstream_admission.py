"""Admission by the next stage's queue: a stage refuses requests that the next stage could not answer in time.

If the next stage is the slower one, it must refuse some requests. All work on them before that is in vain: the first stage's
computing, the copies, the server. It takes time from requests that can be answered.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hplm.scheduling.policy import Waiting
from hplm.scheduling.weighted_fair import WeightedFair

# How much work may stand before a request, as a multiple of the time that the request has. It is more than 1 because a policy
# needs more requests than it can run, to choose from. With 2, refusals at three times the capacity took 1.6 s instead of 9 ms.
_CHOICE = 1.25
# The same for a request of several texts. All of them have to be in time, or they are computed for nothing.
_CHOICE_OF_SEVERAL = 0.75
# Up to this many batches before a request, it is admitted: the next stage decides better by itself.
_LEAST_BATCHES = 2.0
# Tokens that left since the turns were computed count before every request. Above this share of a batch, turns are computed
# again.
_NEW_SHARE = 0.1
# The most deadlines of a queue in one backlog.
_STEPS = 64
# Times of arrival travel in whole nanoseconds: times that differ by less than this many seconds are the same.
_CLOCK_S = 1e-6
# Seconds after which a request that left, and that the next stage has not seen, counts as lost.
_LOST_AFTER_S = 5.0
# The same if the next stage's queue is empty: a client that asks for look-ups alone never comes there.
_STRAY_AFTER_S = 0.5


@dataclass(frozen=True)
class Backlog:
    """A stage's queue at `at_s`; times are of the machine's monotonic clock.

    `free_s`: when the batch that runs will end. A full batch has `batch_tokens` and takes `batch_s`. `newest_arrived_s`:
    when the newest request of this stage reached the server. `tokens[i]` tokens are due by `deadlines_s[i]`, both rising.
    `of_tenant`: the tokens that wait, by tenant. `costs_s`: seconds of a batch, and of a token and a squared length in it.
    """

    at_s: float
    free_s: float
    batch_tokens: int
    batch_s: float
    newest_arrived_s: float
    deadlines_s: tuple[float, ...]
    tokens: tuple[int, ...]
    of_tenant: dict[str, int]
    costs_s: tuple[float, ...] = (0.0, 0.0, 0.0)

    @property
    def is_busy(self) -> bool:
        """Whether a request that comes now waits for a batch of others."""
        return bool(self.tokens) or self.free_s > self.at_s

    def alone_s(self, tokens: int) -> float:
        """Return the seconds of a batch of one text of `tokens` tokens."""
        batch_s, token_s, square_s = self.costs_s
        return batch_s + token_s * tokens + square_s * tokens * tokens

    def due(self, deadline_s: float) -> int:
        """Return the number of tokens that wait and are due by a deadline."""
        count = bisect_right(self.deadlines_s, deadline_s)
        return self.tokens[count - 1] if count else 0


def steps(waiting: Sequence[Waiting]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return `deadlines_s` and `tokens` of a Backlog. The last number of tokens is that of all requests that wait."""
    ordered = sorted((request.deadline_s, request.tokens) for request in waiting)
    sums = list(accumulate(tokens for _, tokens in ordered))
    every = range(len(ordered) - 1, -1, -max(1, -(-len(ordered) // _STEPS)))
    return tuple(ordered[i][0] for i in reversed(every)), tuple(sums[i] for i in reversed(every))


def by_tenant(waiting: Sequence[Waiting]) -> dict[str, int]:
    """Return `of_tenant` of a Backlog."""
    of_tenant: Counter[str] = Counter()
    for request in waiting:
        of_tenant[request.tenant] += request.tokens
    return dict(of_tenant)


def combine(backlogs: Sequence[Backlog]) -> Backlog | None:
    """Return the backlogs of stages that share the requests as one; None if none of them has run a batch yet."""
    known = [backlog for backlog in backlogs if backlog.batch_tokens and backlog.batch_s]
    if len(known) < 2:
        return known[0] if known else None
    speeds = [backlog.batch_tokens / backlog.batch_s for backlog in known]
    batch_tokens = sum(backlog.batch_tokens for backlog in known)
    free_s = sum(backlog.free_s * speed for backlog, speed in zip(known, speeds, strict=True)) / sum(speeds)
    of_tenant: Counter[str] = Counter()
    due: list[tuple[float, int]] = []
    for backlog in known:
        of_tenant.update(backlog.of_tenant)
        steps_of = (later - sooner for sooner, later in pairwise((0, *backlog.tokens)))
        due += zip(backlog.deadlines_s, steps_of, strict=True)
    due.sort()
    return Backlog(
        min(backlog.at_s for backlog in known),
        free_s,
        batch_tokens,
        batch_tokens / sum(speeds),
        # A request that went to another stage since that stage's report is not counted until its next report, 0.1 s later.
        max(backlog.newest_arrived_s for backlog in known),
        tuple(deadline_s for deadline_s, _ in due),
        tuple(accumulate(tokens for _, tokens in due)),
        dict(of_tenant),
        tuple(max(costs) for costs in zip(*(backlog.costs_s for backlog in known), strict=True)),
    )


def reserved_s(later: Sequence[Backlog | None], tokens: int, time_s: float) -> float:
    """Return the seconds of a request's time that the stages after this one need, as far as their backlogs are known.

    A stage needs the seconds of a batch of the request alone, and a full batch if the stage is busy. Under overload batches end
    just in time, so the next stage must have that time. But a full batch is no reason to take more than half of the request's
    time, `time_s`: a stage cuts its batches for requests that have little time.
    """
    known = [backlog for backlog in later if backlog is not None]
    alone_s = sum(backlog.alone_s(tokens) for backlog in known)
    busy_s = sum(max(backlog.alone_s(tokens), backlog.batch_s * backlog.is_busy) for backlog in known)
    return max(alone_s, min(busy_s, time_s / 2))


@dataclass(frozen=True)
class _Passed:
    """A request between the two stages."""

    arrived_s: float
    passed_s: float
    tenant: str
    tokens: int


class DownstreamAdmission:
    """The work before a new request in the next stage: its backlog, as `read` returns it, and the requests on their way.

    Of each tenant only that much counts as takes its turn by weight: a tenant that sends a flood is refused alone. If several
    `processes` of a stage share the requests, each assumes that the others pass on as much as itself. If `read` returns None,
    nothing is refused. Safe to use from several threads.
    """

    def __init__(
        self, read: Callable[[float], Backlog | None], weights: Mapping[str, float], processes: int = 1
    ) -> None:
        self._read = read
        self._weights = weights
        self._processes = processes
        self._lock = threading.Lock()
        self._passed: deque[_Passed] = deque()
        self._passed_tokens = 0
        # Tokens passed on since `_turns` were computed.
        self._newly_passed_tokens = 0
        self._backlog: Backlog | None = None
        self._of_tenant: Counter[str] = Counter()
        self._turns = WeightedFair({}, weights)

    def passed(self, tenant: str, tokens: int, arrived_s: float, now_s: float) -> None:
        """Note that a request leaves for the next stage."""
        tokens *= self._processes
        with self._lock:
            self._passed.append(_Passed(arrived_s, now_s, tenant, tokens))
            self._passed_tokens += tokens
            self._newly_passed_tokens += tokens

    def would_be_late(
        self, tenant: str, tokens: int, deadline_s: float, now_s: float, *, waits_for_others: bool = False
    ) -> bool:
        """Return whether a new request of `tokens` would be far too late in the next stage.

        Requests that wait there and are due later do not stand before it, nor what other tenants have beyond their turns. A
        quarter more is admitted than can be computed by the deadline, for a policy to choose from. A quarter less is if the
        request `waits_for_others`, the other texts of its client.
        """
        backlog = self._read(now_s)
        with self._lock:
            newest_s = lost_s = now_s - _LOST_AFTER_S
            if backlog is not None:
                newest_s = backlog.newest_arrived_s + _CLOCK_S
                if not backlog.tokens:
                    lost_s = max(lost_s, backlog.at_s - _STRAY_AFTER_S)
            while self._passed and (self._passed[0].arrived_s <= newest_s or self._passed[0].passed_s <= lost_s):
                self._passed_tokens -= self._passed.popleft().tokens
            if backlog is None:
                return False
            ahead: float = backlog.due(deadline_s) + self._passed_tokens
            if ahead <= _LEAST_BATCHES * backlog.batch_tokens:
                return False
            if backlog is not self._backlog or self._newly_passed_tokens > _NEW_SHARE * backlog.batch_tokens:
                self._compute_turns(backlog)
            own = self._of_tenant[tenant] + tokens
            ahead = min(ahead, self._turns.before(tenant, own) + self._newly_passed_tokens)
        # From `free_s`, not from now: what was computed since the report no longer stands before the request.
        done_s = backlog.free_s + ahead * backlog.batch_s / backlog.batch_tokens
        return done_s - now_s > (_CHOICE_OF_SEVERAL if waits_for_others else _CHOICE) * (deadline_s - now_s)

    def _compute_turns(self, backlog: Backlog) -> None:
        self._backlog = backlog
        self._of_tenant = Counter(backlog.of_tenant)
        for passed in self._passed:
            self._of_tenant[passed.tenant] += passed.tokens
        self._newly_passed_tokens = 0
        self._turns = WeightedFair(self._of_tenant, self._weights)


class PipelineAdmission:
    """The work before a new request in several stages, which the request passes one after another.

    Each stage has a DownstreamAdmission over its backlog, as one of `reads` returns it, in the order of the stages. Requests
    that wait in an earlier stage are on their way to each later stage.
    """

    def __init__(
        self,
        reads: Sequence[Callable[[float], Backlog | None]],
        weights: Mapping[str, float],
        processes: int = 1,
    ) -> None:
        self._reads = reads
        self._stages = [DownstreamAdmission(read, weights, processes) for read in reads]

    def passed(self, tenant: str, tokens: int, arrived_s: float, now_s: float) -> None:
        """Note that a request leaves for the first of the stages."""
        for stage in self._stages:
            stage.passed(tenant, tokens, arrived_s, now_s)

    def would_be_late(
        self, tenant: str, tokens: int, deadline_s: float, now_s: float, *, waits_for_others: bool = False
    ) -> bool:
        """Return whether a new request would be far too late in one of the stages, see DownstreamAdmission.

        Each stage must leave the later stages their time.
        """
        backlogs = [read(now_s) for read in self._reads]
        late = [
            stage.would_be_late(
                tenant,
                tokens,
                deadline_s - reserved_s(backlogs[number:], tokens, deadline_s - now_s),
                now_s,
                waits_for_others=waits_for_others,
            )
            for number, stage in enumerate(self._stages, 1)
        ]
        return any(late)
