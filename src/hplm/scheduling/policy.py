"""The contract of a scheduling policy: waiting requests, the budget of a batch, and the chosen batch (TCB section 5).

A policy is a function of its inputs and the time that it is given. A package adds a policy by an entry point of the group
`hplm.policies` that names a class. The policy's settings are the class's keyword arguments:

    [project.entry-points."hplm.policies"]
    mine = "my_package:MyPolicy"
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol


class PolicyError(Exception):
    """A policy returned something that is no valid batch. For the operator's log, never on the wire."""


class StudentRange(NamedTuple):
    """The least and the most students that may answer a text, see `hplm.scheduling.student_number`. Most tenants have one."""

    least: int = 1
    most: int = 1


ONE_STUDENT = StudentRange()


@dataclass(frozen=True, slots=True)
class Waiting:
    """A waiting request: its size in tokens, its arrival and its deadline, both on the same clock.

    `tokens` is what is computed at least: the text's length, for each of its least number of students.
    """

    id: int
    tenant: str
    tokens: int
    arrived_s: float
    deadline_s: float
    students: StudentRange = ONE_STUDENT

    @property
    def length(self) -> int:
        """The tokens of the text."""
        return self.tokens // self.students.least

    @property
    def squares(self) -> int:
        """The squared length, for each of the least number of students: attention depends on it."""
        return self.tokens * self.length

    def within(self, cap: int) -> int:
        """Return the number of students under a cap. It is never below the least number."""
        return max(self.students.least, min(cap, self.students.most))

    @property
    def utility(self) -> float:
        """The value of an answer before the deadline (TCB 5.1)."""
        return 1.0 / self.tokens


def tokens_of(requests: Iterable[Waiting]) -> int:
    """Return the tokens of all requests together."""
    return sum(request.tokens for request in requests)


@dataclass(frozen=True)
class Budget:
    """The limits of one batch: `rows` rows (TCB's B) of `row_tokens` tokens (TCB's L), its requests and its tenants.

    A request that is longer than a row may have an empty row to itself; otherwise it would wait for ever.
    """

    rows: int
    row_tokens: int
    max_requests: int
    max_tenants: int

    @property
    def tokens(self) -> int:
        return self.rows * self.row_tokens

    def holding(self, tokens: float, least_rows: int) -> Budget:
        """Return the budget cut to `tokens`, with a token at least.

        A single row gets shorter. Several rows become fewer, but not fewer than `least_rows`.
        """
        if tokens >= self.tokens:
            return self
        if self.rows == 1:
            return replace(self, row_tokens=max(1, int(tokens)))
        return replace(self, rows=min(self.rows, max(least_rows, int(tokens / self.row_tokens))))


@dataclass(frozen=True)
class Batch:
    """The requests of each row. `slot_tokens` is set if the policy cuts rows into slots (TCB 4.2).

    `students` are the numbers of students of all `requests`, in their order. The queue sets them, not a policy.
    """

    rows: tuple[tuple[Waiting, ...], ...]
    slot_tokens: int | None = None
    students: tuple[int, ...] = ()

    @property
    def requests(self) -> tuple[Waiting, ...]:
        """The requests of all rows."""
        return tuple(request for row in self.rows for request in row)


class Policy(Protocol):
    """Chooses the next batch. It must choose at least one request if any wait, and must not keep or change its arguments.

    It must be quick, because no request enters the queue meanwhile. It is called several times for a batch, also with a part
    of the waiting requests and of the budget, to fill shares. Two threads may call it at once, because the adapters of
    the next batch are prefetched.

    If a policy has the attribute `fills_batches` and it is False, its choice is a whole batch. Then the policy is not asked to
    fill the rest of the batch. Requests that fair shares put first still go before its choice.
    """

    def select(self, waiting: Sequence[Waiting], now_s: float, budget: Budget) -> Batch: ...


def check(batch: Batch, waiting: Sequence[Waiting], budget: Budget) -> None:
    """Raise PolicyError unless `batch` has waiting requests, each once, within the budget, and is not empty."""
    if not isinstance(batch, Batch):
        raise PolicyError(f"select returned {type(batch).__name__}, a Batch was expected")
    chosen = batch.requests
    if waiting and not chosen:
        raise PolicyError(f"select chose nothing while {len(waiting)} requests wait")
    if batch.slot_tokens is not None and not (isinstance(batch.slot_tokens, int) and batch.slot_tokens > 0):
        raise PolicyError(f"slot_tokens must be a whole number above 0, got {batch.slot_tokens!r}")
    longest = max((request.tokens for request in chosen), default=0)
    if batch.slot_tokens is not None and batch.slot_tokens > max(budget.row_tokens, longest):
        raise PolicyError(f"slots of {batch.slot_tokens} tokens do not fit into rows of {budget.row_tokens}")
    if not set(map(id, chosen)) <= set(map(id, waiting)):
        raise PolicyError("select chose a request that does not wait")
    if len({request.id for request in chosen}) != len(chosen):
        raise PolicyError("select chose a request twice")
    if len(batch.rows) > budget.rows or len(chosen) > budget.max_requests:
        raise PolicyError(f"{len(chosen)} requests in {len(batch.rows)} rows are more than the budget {budget}")
    if len({request.tenant for request in chosen}) > budget.max_tenants:
        raise PolicyError(f"the batch has more than {budget.max_tenants} tenants")
    for row in batch.rows:
        if len(row) > 1 and tokens_of(row) > budget.row_tokens:
            raise PolicyError(f"a row has {tokens_of(row)} tokens, at most {budget.row_tokens} fit")


class Filler:
    """Fills a batch within a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.rows: list[list[Waiting]] = [[] for _ in range(budget.rows)]
        self.free = [budget.row_tokens] * budget.rows
        self.count = 0
        self._tenants: set[str] = set()

    def put(self, row: int, request: Waiting) -> bool:
        """Put the request into this row of the batch if it fits. Return whether it did."""
        if self.count >= self._budget.max_requests:
            return False
        if len(self._tenants) >= self._budget.max_tenants and request.tenant not in self._tenants:
            return False
        if request.tokens > self.free[row] and self.rows[row]:
            return False
        self.rows[row].append(request)
        self.free[row] -= request.tokens
        self.count += 1
        self._tenants.add(request.tenant)
        return True

    def is_full(self, shortest: int) -> bool:
        """Return whether no row has room for a request of `shortest` tokens or more."""
        return self.count >= self._budget.max_requests or (max(self.free) < shortest and all(self.rows))

    def batch(self) -> Batch:
        return Batch(tuple(tuple(row) for row in self.rows if row))
