"""The number of students that answer a text: fewer under load, more after a quiet time (Student Parallelism, B.4.3).

A tenant's students are trained one after another, and each one corrects the ones before it. So the first k students answer
alone, with a little less accuracy for every student that is left out. A text with k students costs k times as much.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hplm.scheduling.cost import CostModel
from hplm.scheduling.policy import Waiting

# A number of students that a load has ended is not tried again until the load is this share of it,
_LESS_LOAD = 0.9
# or until this many quiet times are over, because other programs may have slowed the machine down for a while.
_TRY_AGAIN_AFTER = 30


@dataclass(frozen=True)
class StudentRules:
    """When the cap on students falls and rises.

    The cap falls by one if more work waits than `fall_batches` batches hold. The cap rises by one if that was not so for
    `quiet_s` seconds, and if one student more would have kept the stage busy for at most `rise_share` of these seconds.
    """

    fall_batches: float = 1.0
    quiet_s: float = 2.0
    rise_share: float = 0.7


class StudentNumber:
    """The cap: the most students of a text in the next batch. Not thread-safe, but any thread may read `cap` and `most`.

    The cap is 1 to `most`, the largest number of students that any request so far may have. The cap rises only if the recent
    load leaves time for one student more, and not to a number that the same load has ended before. So a steady load does not
    make the cap rise and fall again and again.
    """

    def __init__(self, rules: StudentRules) -> None:
        self._rules = rules
        self.cap = self.most = 1
        # How often the cap fell and rose.
        self.falls = self.rises = 0
        # When the quiet time began: after the last pressure or the last change.
        self._quiet_from_s = -math.inf
        # Of each batch that ended in the last `quiet_s`: when, its tokens, and its seconds if it had one student more.
        self._ended: deque[tuple[float, int, float]] = deque()
        # By numbers of students with which work began to wait: the load in tokens a second, and when it was last as high.
        self._ended_by: dict[int, tuple[float, float]] = {}
        # The number with which work began to wait, until the cap rises or the quiet time is over. Further falls are not
        # remembered, because then it is the waiting work of earlier numbers that waits.
        self._burst_began_at: int | None = None

    def admit(self, most: int) -> None:
        """Note a request that may have up to `most` students. Students that no request had before begin uncapped."""
        if most > self.most:
            self.cap = most if self.cap == self.most else self.cap
            self.most = most

    def before_batch(self, waiting_batches: float, waiting_tokens: int, most_waiting: int, now_s: float) -> None:
        """Let the cap fall or rise before a batch is chosen.

        `waiting_batches`: how many batches the waiting requests fill if each has as many students as the cap allows it.
        `waiting_tokens`: their tokens with their least numbers of students. `most_waiting`: the most students of one of them.
        """
        if waiting_batches <= self._rules.fall_batches:
            self.look(now_s)
            return
        self._forget(now_s)
        self._quiet_from_s = now_s
        if self._burst_began_at is None:
            self._burst_began_at = self.cap
            self._ended_by[self.cap] = 0.0, now_s
        load = max(self._load, waiting_tokens / self._rules.quiet_s, self._ended_by[self._burst_began_at][0])
        self._ended_by[self._burst_began_at] = load, now_s
        # A cap above what the waiting requests may have would first fall without any effect.
        if (fallen := min(self.cap, most_waiting) - 1) >= 1:
            self.cap = fallen
            self.falls += 1

    def after_batch(self, tokens: int, seconds_of_one_more: float, now_s: float) -> None:
        """Note a batch that has ended, with its tokens as in `before_batch`, and its seconds if it had one student more."""
        self._forget(now_s)
        self._ended.append((now_s, tokens, seconds_of_one_more))

    def look(self, now_s: float) -> None:
        """Let the cap rise if the quiet time is over. Call it now and then while nothing waits."""
        rules = self._rules
        self._forget(now_s)
        if now_s - self._quiet_from_s < rules.quiet_s:
            return
        self._burst_began_at = None
        if self.cap == self.most:
            return
        too_much, at_s = self._ended_by.get(self.cap + 1, (math.inf, now_s))
        if self._load > _LESS_LOAD * too_much and now_s - at_s < _TRY_AGAIN_AFTER * rules.quiet_s:
            return
        if sum(seconds for *_, seconds in self._ended) <= rules.rise_share * rules.quiet_s:
            self.cap += 1
            self.rises += 1
            self._quiet_from_s = now_s

    @property
    def _load(self) -> float:
        """The tokens a second of the batches that ended in the last `quiet_s`."""
        return sum(tokens for _, tokens, _ in self._ended) / self._rules.quiet_s

    def _forget(self, now_s: float) -> None:
        while self._ended and self._ended[0][0] <= now_s - self._rules.quiet_s:
            self._ended.popleft()


def plan_students(
    chosen: Sequence[Waiting], left: Iterable[Waiting], cap: int, cost: CostModel, now_s: float
) -> tuple[int, ...]:
    """Return the number of students of each request of a batch: the most up to `cap` that make no request late.

    A request counts as late only if its least number of students would keep its deadline. So students are left out before
    requests are refused. `chosen` is the batch. The requests that are `left` run after the batch, by their deadlines, each
    with its least number of students. No request gets fewer than its least number, nor more than its most.
    """
    least = tuple(request.students.least for request in chosen)
    if least == tuple(request.within(cap) for request in chosen):
        return least
    least_s = cost.bound(*work_of(chosen, least))
    slack_s = [request.deadline_s - now_s for request in chosen]
    tokens = squares = 0
    for request in sorted(left, key=lambda request: request.deadline_s):
        tokens, squares = tokens + request.tokens, squares + request.squares
        slack_s.append(request.deadline_s - now_s - cost.predict(tokens, squares))
    within_s = min((slack for slack in slack_s if slack >= least_s), default=math.inf)
    for number in range(cap, 0, -1):
        planned = tuple(request.within(number) for request in chosen)
        if cost.bound(*work_of(chosen, planned)) <= within_s:
            return planned
    return least


def work_of(requests: Iterable[Waiting], students: Iterable[int]) -> tuple[int, int]:
    """Return the inputs of the cost model for requests with these numbers of students: tokens, sum of squared lengths."""
    tokens = squares = 0
    for request, number in zip(requests, students, strict=True):
        tokens += number * request.length
        squares += number * request.length**2
    return tokens, squares
