"""The policies of hplm. Of equal requests the earlier arrival goes first, then the smaller id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import attrgetter

from hplm.errors import ConfigError
from hplm.scheduling.policy import Batch, Budget, Filler, Waiting

_ID, _ARRIVAL, _LENGTH, _DEADLINE = map(attrgetter, ("id", "arrived_s", "tokens", "deadline_s"))


def _by_arrival(waiting: Sequence[Waiting]) -> list[Waiting]:
    # Sorting is stable. Two sorts by one number each are several times as fast as one by pairs, and the input is nearly sorted.
    return sorted(sorted(waiting, key=_ID), key=_ARRIVAL)


def _first_fit(order: Sequence[Waiting], budget: Budget) -> Batch:
    """Put each request, in order, into the first row that has room, until no further request can fit."""
    filler = Filler(budget)
    # The least length from each request on, so that a full batch is noticed without a look at all waiting requests.
    shortest = list(accumulate(map(_LENGTH, reversed(order)), min))
    for request in order:
        if filler.is_full(shortest.pop()):
            break
        for row in range(budget.rows):
            if filler.put(row, request):
                break
    return filler.batch()


@dataclass(frozen=True)
class Fcfs:
    """First come, first served."""

    def select(self, waiting: Sequence[Waiting], now_s: float, budget: Budget) -> Batch:
        return _first_fit(_by_arrival(waiting), budget)


@dataclass(frozen=True)
class Sjf:
    """Shortest job first."""

    def select(self, waiting: Sequence[Waiting], now_s: float, budget: Budget) -> Batch:
        return _first_fit(sorted(_by_arrival(waiting), key=_LENGTH), budget)


@dataclass(frozen=True)
class Edf:
    """Earliest deadline first (DEF in the TCB paper)."""

    def select(self, waiting: Sequence[Waiting], now_s: float, budget: Budget) -> Batch:
        return _first_fit(sorted(_by_arrival(waiting), key=_DEADLINE), budget)


@dataclass(frozen=True)
class Das:
    """Deadline-aware scheduling, TCB Algorithm 1.

    A share `eta` of each row goes to the requests of highest utility (the shortest). The rest of the row goes to the most
    urgent requests whose utility is at least `q` times the mean utility of the first. The paper sets eta + q = 1.
    `reference.das` is the algorithm word by word; here both orders are sorted once for all rows.
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
        """Return the filled rows, and the length of the longest request that was chosen for its utility."""
        filler = Filler(budget)
        by_arrival = _by_arrival(waiting)
        by_length = sorted(by_arrival, key=_LENGTH)
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
                by_deadline = by_deadline or sorted(by_arrival, key=_DEADLINE)
                most = _longest_of_utility(self.q * sum(request.utility for request in dominant) / len(dominant))
                skipped = {request.id for request in dominant}
                urgent = (request for request in by_deadline if request.tokens <= most)
                others = (request for request in by_length if request.tokens > most)
                for request in chain(urgent, others):
                    if filler.rows[row] and filler.free[row] < by_length[0].tokens:
                        break
                    if request.id not in skipped and filler.put(row, request):
                        taken.add(request.id)
            by_length = [request for request in by_length if request.id not in taken]
            by_deadline = [request for request in by_deadline if request.id not in taken]
        return filler, longest


@dataclass(frozen=True)
class SlottedDas(Das):
    """TCB Algorithm 2: DAS, then each row is cut into slots as long as the longest request chosen for its utility.

    A request that fits in no slot of its row waits for a later batch.
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


def _longest_of_utility(least: float) -> int:
    """Return the most tokens that a request of at least this utility has."""
    tokens = int(1 / least) + 1
    while 1 / tokens < least:
        tokens -= 1
    return tokens


def _saturating(by_length: Sequence[Waiting], row_tokens: int) -> int:
    """Return how many of the first requests saturate a row (s_tk)."""
    total = 0
    for count, request in enumerate(by_length):
        total += request.tokens
        if total > row_tokens:
            return count
    return len(by_length)
