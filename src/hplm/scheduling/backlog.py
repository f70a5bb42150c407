"""What one stage knows of the next one's queue, so that it refuses at its own door what the next could not answer in time.

Between two stages lie copies, a server and what the first one computes: where the second is the slower one, all of that is
done in vain for what it must refuse, and takes the time in which it would answer others.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hplm.scheduling.policy import Waiting

# A policy that prefers some requests needs more than it can run: so many times the time that a request has are let in.
_CHOICE = 2.0
# While no more than so many batches are before a request, the stage itself knows better.
_LEAST_BATCHES = 2.0
# Deadlines of a queue that are told, at most.
_STEPS = 64
# What was passed on and not seen by the next stage after this time was lost on the way.
_LOST_AFTER_S = 5.0


@dataclass(frozen=True)
class Backlog:
    """A stage's queue at `at_s`; times are of the machine's monotonic clock.

    `free_s`: when the batch that runs will end. A full batch is of `batch_tokens` and takes `batch_s`. `newest_arrived_s`:
    when the newest request that came here reached the server. `tokens[i]` tokens are due by `deadlines_s[i]`, both rising.
    """

    at_s: float
    free_s: float
    batch_tokens: int
    batch_s: float
    newest_arrived_s: float
    deadlines_s: tuple[float, ...]
    tokens: tuple[int, ...]

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


class Ahead:
    """What is before a request on its way to the next stage: that one's backlog, as `read`, and what is between the two.

    Safe to use from several threads. Where `read` knows nothing, nothing is refused.
    """

    def __init__(self, read: Callable[[float], Backlog | None]) -> None:
        self._read = read
        self._lock = threading.Lock()
        # Of what was passed on, and not seen there yet: when it reached the server, when it was passed on, tokens.
        self._passed: deque[tuple[float, float, int]] = deque()
        self._passed_tokens = 0

    def passed(self, tokens: int, arrived_s: float, now_s: float) -> None:
        """A request leaves for the next stage."""
        with self._lock:
            self._passed.append((arrived_s, now_s, tokens))
            self._passed_tokens += tokens

    def is_too_much(self, waiting_tokens: int, deadline_s: float, now_s: float) -> bool:
        """Whether a newcomer behind `waiting_tokens` in this stage would be far too late in the next.

        Who is due later there is not before it. Twice what could be computed by its deadline is let in, for a policy to
        choose from.
        """
        backlog = self._read(now_s)
        with self._lock:
            newest_s = now_s - _LOST_AFTER_S if backlog is None else backlog.newest_arrived_s
            while self._passed and (self._passed[0][0] <= newest_s or self._passed[0][1] <= now_s - _LOST_AFTER_S):
                self._passed_tokens -= self._passed.popleft()[2]
            coming = waiting_tokens + self._passed_tokens
        if backlog is None or not backlog.batch_tokens:
            return False
        due = backlog.due(deadline_s)
        if due + coming <= _LEAST_BATCHES * backlog.batch_tokens:
            return False
        token_s = backlog.batch_s / backlog.batch_tokens
        # What was computed since is no longer before it.
        ahead_s = max(0.0, backlog.free_s + due * token_s - now_s) + coming * token_s
        return ahead_s > _CHOICE * (deadline_s - now_s)
