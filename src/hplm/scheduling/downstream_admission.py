"""What one stage knows of the next one's queue, so that it refuses at its own door what the next could not answer in time.

Between two stages lie copies, a server and what the first one computes: where the second is the slower one, all of that is
done in vain for what it must refuse, and takes the time in which it would answer others.
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

# A policy that prefers some requests needs more than it can run: so many times the time that a request has are let in. With
# twice, refusals at three times the capacity took 1.6 s where they take 9 ms.
_CHOICE = 1.25
# Of a request of several texts all have to be in time, or they were computed for nothing.
_CHOICE_TOGETHER = 0.75
# While no more than so many batches are before a request, the stage itself knows better.
_LEAST_BATCHES = 2.0
# What was passed on since the turns were worked out is before everybody: no more of it than this share of a batch.
_NEW_SHARE = 0.1
# Deadlines of a queue that are told, at most.
_STEPS = 64
# Times of arrival go to the next stage in whole nanoseconds: so much later is the same one.
_CLOCK_S = 1e-6
# What was passed on and not seen by the next stage after this time was lost on the way.
_LOST_AFTER_S = 5.0
# And what a queue that nobody waits in has not seen after this time never comes there: who asks for look-ups alone.
_STRAY_AFTER_S = 0.5


@dataclass(frozen=True)
class Backlog:
    """A stage's queue at `at_s`; times are of the machine's monotonic clock.

    `free_s`: when the batch that runs will end. A full batch is of `batch_tokens` and takes `batch_s`. `newest_arrived_s`:
    when the newest request that came here reached the server. `tokens[i]` tokens are due by `deadlines_s[i]`, both rising;
    `of_tenant` are those that wait by tenant.
    """

    at_s: float
    free_s: float
    batch_tokens: int
    batch_s: float
    newest_arrived_s: float
    deadlines_s: tuple[float, ...]
    tokens: tuple[int, ...]
    of_tenant: dict[str, int]

    def due(self, deadline_s: float) -> int:
        """Tokens that wait and are due by then."""
        count = bisect_right(self.deadlines_s, deadline_s)
        return self.tokens[count - 1] if count else 0


def steps(waiting: Sequence[Waiting]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """`deadlines_s` and `tokens` of a Backlog, the last of them all that wait."""
    ordered = sorted((request.deadline_s, request.tokens) for request in waiting)
    sums = list(accumulate(tokens for _, tokens in ordered))
    every = range(len(ordered) - 1, -1, -max(1, -(-len(ordered) // _STEPS)))
    return tuple(ordered[i][0] for i in reversed(every)), tuple(sums[i] for i in reversed(every))


def by_tenant(waiting: Sequence[Waiting]) -> dict[str, int]:
    """`of_tenant` of a Backlog."""
    found: Counter[str] = Counter()
    for request in waiting:
        found[request.tenant] += request.tokens
    return dict(found)


def combine(backlogs: Sequence[Backlog]) -> Backlog | None:
    """Of stages that share what comes, as one; None where none of them has run a batch yet."""
    known = [one for one in backlogs if one.batch_tokens and one.batch_s]
    if len(known) < 2:
        return known[0] if known else None
    speeds = [one.batch_tokens / one.batch_s for one in known]
    batch_tokens = sum(one.batch_tokens for one in known)
    free_s = sum(one.free_s * speed for one, speed in zip(known, speeds, strict=True)) / sum(speeds)
    of_tenant: Counter[str] = Counter()
    due: list[tuple[float, int]] = []
    for one in known:
        of_tenant.update(one.of_tenant)
        due += zip(one.deadlines_s, (later - sooner for sooner, later in pairwise((0, *one.tokens))), strict=True)
    due.sort()
    return Backlog(
        min(one.at_s for one in known),
        free_s,
        batch_tokens,
        batch_tokens / sum(speeds),
        # Who went to another since that one told it is not counted for so long: a tenth of a second.
        max(one.newest_arrived_s for one in known),
        tuple(deadline_s for deadline_s, _ in due),
        tuple(accumulate(tokens for _, tokens in due)),
        dict(of_tenant),
    )


@dataclass(frozen=True)
class _Passed:
    """A request between the two stages."""

    arrived_s: float
    passed_s: float
    tenant: str
    tokens: int


class DownstreamAdmission:
    """What is before a request on its way to the next stage: that one's backlog, as `read`, and what is between the two.

    Of each tenant no more is before it than takes its turn by weight: who floods refuses itself alone. Of several `processes`
    that pass on what comes by turns each takes the others to have passed on as much as itself. Safe to use from several
    threads. Where `read` knows nothing, nothing is refused.
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
        # Since the backlog was read that `_turns` are of.
        self._newly_passed_tokens = 0
        self._backlog: Backlog | None = None
        self._of_tenant: Counter[str] = Counter()
        self._turns = WeightedFair({}, weights)

    def passed(self, tenant: str, tokens: int, arrived_s: float, now_s: float) -> None:
        """A request leaves for the next stage."""
        tokens *= self._processes
        with self._lock:
            self._passed.append(_Passed(arrived_s, now_s, tenant, tokens))
            self._passed_tokens += tokens
            self._newly_passed_tokens += tokens

    def is_too_much(
        self, tenant: str, tokens: int, deadline_s: float, now_s: float, *, is_together: bool = False
    ) -> bool:
        """Whether a newcomer of `tokens` would be far too late in the next stage.

        Who waits there and is due later is not before it, nor what others have beyond their turns. A quarter more than could
        be computed by its deadline is let in, for a policy to choose from; where the newcomer `is_together` with other texts,
        a quarter less.
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
                self._take_turns(backlog)
            own = self._of_tenant[tenant] + tokens
            ahead = min(ahead, self._turns.before(tenant, own) + self._newly_passed_tokens)
        # What was computed since is no longer before it.
        done_s = backlog.free_s + ahead * backlog.batch_s / backlog.batch_tokens
        return done_s - now_s > (_CHOICE_TOGETHER if is_together else _CHOICE) * (deadline_s - now_s)

    def _take_turns(self, backlog: Backlog) -> None:
        self._backlog = backlog
        self._of_tenant = Counter(backlog.of_tenant)
        for one in self._passed:
            self._of_tenant[one.tenant] += one.tokens
        self._newly_passed_tokens = 0
        self._turns = WeightedFair(self._of_tenant, self._weights)
