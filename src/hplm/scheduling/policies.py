"""The policies that come with hplm. Ties go to the earlier arrival, then to the smaller id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from hplm.errors import ConfigError
from hplm.scheduling.policy import Batch, Budget, Filler, Waiting

_BY_ARRIVAL = attrgetter("arrived_s", "id")
_BY_LENGTH = attrgetter("tokens", "arrived_s", "id")
_BY_DEADLINE = attrgetter("deadline_s", "arrived_s", "id")


def _first_fit(order: Sequence[Waiting], budget: Budget) -> Batch:
    """Each request in the first row that has room, in order; ends when nothing that is left can fit."""
    filler = Filler(budget)
    # shortest[i]: of order[i:], so that a full batch is seen without looking at all that wait.
    shortest = [0] * len(order)
    least = order[-1].tokens if order else 0
    for i in range(len(order) - 1, -1, -1):
        least = min(least, order[i].tokens)
        shortest[i] = least
    for i, request in enumerate(order):
        if filler.is_full(shortest[i]):
            break
        for row in range(budget.rows):
            if filler.put(row, request):
                break
    return filler.batch()


@dataclass(frozen=True)
class Fcfs:
    """First come, first served."""

    def select(self, waiting: Sequence[Waiting], now_s: float, budget: Budget) -> Batch:
        return _first_fit(sorted(waiting, key=_BY_ARRIVAL), budget)


@dataclass(frozen=True)
class Sjf:
    """Shortest job first."""

    def select(self, waiting: Sequence[Waiting], now_s: float, budget: Budget) -> Batch:
        return _first_fit(sorted(waiting, key=_BY_LENGTH), budget)


@dataclass(frozen=True)
class Edf:
    """Earliest deadline first (DEF in the TCB paper)."""

    def select(self, waiting: Sequence[Waiting], now_s: float, budget: Budget) -> Batch:
        return _first_fit(sorted(waiting, key=_BY_DEADLINE), budget)


@dataclass(frozen=True)
class Das:
    """Deadline-aware scheduling, TCB Algorithm 1.

    Of each row, a share `eta` goes to the requests of highest utility (the shortest), the rest to the most urgent among
    those whose utility is at least `q` times the mean of the first. The paper sets eta + q = 1. `reference.das` is the
    algorithm word by word; here both orders are sorted once for all rows.
    """

    eta: float = 0.5
    q: float = 0.5

    def __post_init__(self) -> None:
        for key in ("eta", "q"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
                raise ConfigError(f"{key} must be a number between 0 and 1, got {value!r}")

    def select(self, waiting: Sequence[Waiting], now_s: float, budget: Budget) -> Batch:
        return self._fill(waiting, budget)[0].batch()

    def _fill(self, waiting: Sequence[Waiting], budget: Budget) -> tuple[Filler, int]:
        """The filled rows, and the length of the longest request chosen for its utility."""
        filler = Filler(budget)
        by_length = sorted(waiting, key=_BY_LENGTH)
        by_deadline: list[Waiting] = []
        longest = 0
        for row in range(budget.rows):
            if not by_length or filler.is_full(by_length[0].tokens):
                break
            fitting = min(_saturating(by_length, budget.row_tokens), budget.max_requests - filler.count)
            everything_fits = fitting == len(by_length)
            dominant = by_length if everything_fits else by_length[: max(1, int(self.eta * fitting))]
            taken = {request.id for request in dominant if filler.put(row, request)}
            longest = max([longest, *(request.tokens for request in filler.rows[row])])
            if not everything_fits:
                by_deadline = by_deadline or sorted(waiting, key=_BY_DEADLINE)
                least = self.q * sum(request.utility for request in dominant) / len(dominant)
                skipped = {request.id for request in dominant}
                urgent = [r for r in by_deadline if r.utility >= least and r.id not in skipped]
                seen = skipped | {request.id for request in urgent}
                for request in [*urgent, *(r for r in by_length if r.id not in seen)]:
                    if filler.rows[row] and filler.free[row] < by_length[0].tokens:
                        break
                    if filler.put(row, request):
                        taken.add(request.id)
            by_length = [request for request in by_length if request.id not in taken]
            by_deadline = [request for request in by_deadline if request.id not in taken]
        return filler, longest


@dataclass(frozen=True)
class SlottedDas(Das):
    """TCB Algorithm 2: DAS, then rows are cut into slots as long as the longest request chosen for its utility.

    What fits in no slot of its row goes on waiting.
    """

    def select(self, waiting: Sequence[Waiting], now_s: float, budget: Budget) -> Batch:
        filler, slot_tokens = self._fill(waiting, budget)
        slots_per_row = max(1, budget.row_tokens // max(1, slot_tokens))
        rows = []
        for row in filler.rows:
            free = [slot_tokens] * slots_per_row
            kept = []
            for request in row:
                slot = next((s for s in range(slots_per_row) if free[s] >= request.tokens), None)
                if slot is not None:
                    free[slot] -= request.tokens
                    kept.append(request)
            rows.append(tuple(kept))
        return Batch(tuple(row for row in rows if row), slot_tokens)


def _saturating(by_length: Sequence[Waiting], row_tokens: int) -> int:
    """How many of the first requests saturate a row (s_tk)."""
    total = 0
    for count, request in enumerate(by_length):
        total += request.tokens
        if total > row_tokens:
            return count
    return len(by_length)
