"""The file in shared memory from which all first stages of a server take their tenants' quotas.

A record has a bucket of requests and a bucket of tokens. While `hplm serve` leases from the registry, the buckets hold what
is left of the leases. Else they fill by themselves, as if this server were the only one. Each record also counts the
requests under way, by process, so that those of a killed process count no longer. A request on its way from the look-up
stage to the encode stage counts for the record, because neither process has it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from hplm.quotas.limits import NOTHING, Limits, Refusal, Use
from hplm.quotas.token_bucket import CLOCK_STEP_S, Bucket, Rate, full, refilled, spend, time_of, wait_s
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.runtime.shared_records import SharedRecords

# A tenant with a limit takes 0.5 KB from its first request on.
MOST_TENANTS = 65_536
# Most processes that count requests of one server.
SEATS = 64
# The byte whose lock the process holds that leases for the file.
_KEEPER = 63
# A seat is a byte of the file from here on, whose lock its process holds while it lives.
_FIRST_SEAT = 64
# Bytes at which the file says among how many servers the limits of concurrent requests are shared, and its lock.
_SERVERS_AT, _SERVERS = 1024, struct.Struct("=I")
# Seconds after which to ask again if too many requests are under way. No bucket says when one ends.
BUSY_S = 0.05
# Which of two copies of the state is valid. The other is written, then this number changes: a killed process leaves no half.
_CHOICE = struct.Struct("=Q")
_STATE = struct.Struct("=9d")
_COUNT = struct.Struct("=I")
_SEATS_AT = _CHOICE.size + 2 * _STATE.size
# The last second in which a stage has handed requests on, and the requests that were handed on, by the second.
_HANDED_AT = _SEATS_AT + SEATS * _COUNT.size
# Seconds for which the next stage may take a request over. Later it is charged as a new request.
HANDED_S = 16
_HANDED = struct.Struct(f"=Q{HANDED_S}I")
# The last seconds whose requests count as under way. A client that calls the look-up stage alone never sends a request on.
ON_THE_WAY_S = 2
_BODY_BYTES = _HANDED_AT + _HANDED.size


class _State(NamedTuple):
    """A record: both buckets at `at_s`, all that was ever spent, until when `hplm serve` leases, and of which limits.

    Times are of the monotonic clock, the same for all processes of the machine. A new record is all zeros.
    """

    requests: float
    tokens: float
    at_s: float
    spent_requests: float
    spent_tokens: float
    leased_until_s: float
    forgiven_requests: float
    forgiven_tokens: float
    generation: float

    @property
    def buckets(self) -> tuple[Bucket, Bucket]:
        """The buckets of requests and tokens."""
        requests = Bucket(self.requests, self.at_s, self.forgiven_requests)
        return requests, Bucket(self.tokens, self.at_s, self.forgiven_tokens)

    def with_buckets(self, requests: Bucket, tokens: Bucket) -> _State:
        """Return the state with these buckets, whose time is `at_s`."""
        return self._replace(
            requests=requests.level,
            tokens=tokens.level,
            forgiven_requests=requests.forgiven,
            forgiven_tokens=tokens.forgiven,
        )

    def is_leased(self, now_s: float) -> bool:
        """Return whether a lease is in force. A lease of later than now was made before the clock stepped back."""
        return self.at_s - CLOCK_STEP_S <= now_s < self.leased_until_s


class QuotaFile:
    """The file of one server. Safe to use from several threads and processes of one user. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._records = SharedRecords(path, _BODY_BYTES, MOST_TENANTS)
        self._seat: int | None = None

    def close(self) -> None:
        """Close the file. The requests under way of this process count no longer."""
        self._records.close()

    def keep(self) -> None:
        """Mark the file as in use until it is closed. Stages do so with their first request."""
        self._records.try_keep(_KEEPER)

    def take(self, tenant: str, limits: Limits, tokens: float, now_s: float) -> Refusal | None:
        """Take a request of so many tokens, and count it as under way until `end`. Return None, or why it is refused."""
        if (index := self._index(tenant)) is None:
            return None
        try:
            with self._records.locked_record(index):
                state = self._current(index, limits, now_s)
                refusal = self._refusal(index, state, limits, tokens, now_s)
                if refusal is None:
                    state = _spend(state, limits, Use(1.0, tokens), now_s)
                    self._count(index, 1)
                # Also after a refusal: time has passed, and `hplm serve` shall see that a lease is wanted.
                self._write(index, state)
        except TimeoutError as error:
            log_rate_limited(f"a request is not counted in its tenant's quotas: {error}")
            return None
        self._records.mark(index)
        return refusal

    def spend(self, tenant: str, limits: Limits, use: Use, now_s: float) -> None:
        """Charge more, or less than zero to correct an estimate."""
        self._change(tenant, limits, use, now_s, ended=False)

    def hand_on(self, tenant: str, now_s: float) -> None:
        """Count a request that was taken here as on its way to another process, see `take_over`."""
        if (index := self._index(tenant)) is None:
            return
        try:
            with self._records.locked_record(index):
                now, handed = self._handed(index, now_s)
                handed[now % HANDED_S] += 1
                self._write_handed(index, now, handed)
                self._count(index, -1)
        except TimeoutError as error:
            log_rate_limited(f"a request that is handed on is not counted in its tenant's quotas: {error}")

    def take_over(self, tenant: str, now_s: float) -> bool:
        """Count a request as under way here that another process has handed on. Return False if there is none."""
        if (index := self._index(tenant)) is None:
            return True
        try:
            with self._records.locked_record(index):
                now, handed = self._handed(index, now_s)
                # The oldest first: after this second's place comes that of the oldest second.
                for second in range(now + 1, now + 1 + HANDED_S):
                    if handed[second % HANDED_S]:
                        handed[second % HANDED_S] -= 1
                        self._count(index, 1)
                        self._write_handed(index, now, handed)
                        return True
        except TimeoutError as error:
            log_rate_limited(f"a request that was handed on is not counted in its tenant's quotas: {error}")
            return True
        return False

    def end(self, tenant: str, limits: Limits, now_s: float, refund: Use = NOTHING) -> None:
        """Count a request as no longer under way, and give back what it has not used."""
        self._change(tenant, limits, Use(-refund.requests, -refund.tokens), now_s, ended=True)

    def under_way(self, tenant: str, now_s: float) -> int:
        """Return how many requests of a tenant are under way. Raises TimeoutError if a stopped process holds the record."""
        if (index := self._records.find(tenant)) is None:
            return 0
        with self._records.locked_record(index):
            return self._under_way(index) + self._on_the_way(index, now_s)

    def marked(self) -> dict[str, Use]:
        """Return all that was ever spent by the tenants that have asked for something since the last call."""
        found = {}
        for index in self._records.take_marks():
            if (spent := self._spent(index)) is None:
                self._records.mark(index)
            else:
                found[self._records.name_of(index)] = spent
        return found

    def lease(self, tenant: str, limits: Limits, lease: Use, spent: Use, now_s: float, until_s: float) -> None:
        """Set what a tenant may use until `until_s`: a lease, less what was spent since `spent` was read.

        A lease of limits that are no longer in force is not set.
        """
        if (index := self._index(tenant)) is None:
            return
        try:
            with self._records.locked_record(index):
                state = self._read(index)
                if limits.generation < state.generation:
                    return
                since = Use(state.spent_requests, state.spent_tokens).less(spent)
                state = state._replace(at_s=now_s, leased_until_s=until_s, generation=limits.generation)
                left = [
                    # A correction goes to the account, see `_spend`.
                    Bucket(granted, now_s) if rate is None else spend(Bucket(granted, now_s), rate, max(0.0, used))
                    for rate, granted, used in zip(_rates(limits), lease, since, strict=True)
                ]
                self._write(index, state.with_buckets(*left))
        except TimeoutError as error:
            log_rate_limited(f"a lease of quotas is late: {error}")

    def release(self, tenant: str, now_s: float) -> None:
        """End a tenant's lease. From now on the buckets fill by themselves, from what was left of the lease."""
        if (index := self._index(tenant)) is None:
            return
        try:
            with self._records.locked_record(index):
                self._write(index, self._read(index)._replace(at_s=now_s, leased_until_s=now_s))
        except TimeoutError as error:
            log_rate_limited(f"a lease of quotas does not end: {error}")

    def set_servers(self, servers: int) -> None:
        """Say among how many servers the limits of concurrent requests are shared."""
        _SERVERS.pack_into(self._records.memory, _SERVERS_AT, servers)

    def _spent(self, index: int) -> Use | None:
        """Return all that was ever spent of a record, None if a stopped process holds its lock."""
        try:
            with self._records.locked_record(index):
                state = self._read(index)
        except TimeoutError:
            return None
        return Use(state.spent_requests, state.spent_tokens)

    def _index(self, tenant: str) -> int | None:
        try:
            index = self._records.find_or_add(tenant)
        except TimeoutError as error:
            log_rate_limited(f"a tenant without a record in the file of quotas is not limited: {error}")
            return None
        if index is None:
            log_rate_limited("the file of quotas is full: requests of further tenants are not limited")
        return index

    def _change(self, tenant: str, limits: Limits, use: Use, now_s: float, *, ended: bool) -> None:
        if (index := self._index(tenant)) is None:
            return
        try:
            with self._records.locked_record(index):
                if ended:
                    self._count(index, -1)
                if use != NOTHING:
                    self._write(index, _spend(self._current(index, limits, now_s), limits, use, now_s))
        except TimeoutError as error:
            log_rate_limited(f"a request's end or correction is not counted in its tenant's quotas: {error}")
            return
        if use != NOTHING:
            self._records.mark(index)

    def _current(self, index: int, limits: Limits, now_s: float) -> _State:
        """Return the state now. Buckets fill by themselves unless a lease is in force. New limits begin with full buckets."""
        state = self._read(index)
        is_new = state.at_s == 0.0
        if limits.generation > state.generation:
            is_new, state = True, state._replace(generation=limits.generation, leased_until_s=0.0)
        if state.is_leased(now_s):
            return state
        # A lease that ended does not begin again when the clock steps back.
        state = state._replace(leased_until_s=0.0)
        now = [
            Bucket(0.0, now_s) if rate is None else full(rate, now_s) if is_new else refilled(bucket, rate, now_s)
            for rate, bucket in zip(_rates(limits), state.buckets, strict=True)
        ]
        return state.with_buckets(*now)._replace(at_s=now_s if is_new else time_of(state.at_s, now_s))

    def _refusal(self, index: int, state: _State, limits: Limits, tokens: float, now_s: float) -> Refusal | None:
        if limits.concurrent is not None:
            (servers,) = _SERVERS.unpack_from(self._records.memory, _SERVERS_AT)
            left = max(1, limits.concurrent // max(1, servers)) - self._on_the_way(index, now_s)
            # Counts of killed processes are looked for only when it matters.
            if self._sum_of_counts(index) >= left and self._under_way(index) >= left:
                return Refusal("concurrent requests", BUSY_S)
        for rate, quota, level, cost in (
            (limits.requests, "requests/s", state.requests, 1.0),
            (limits.tokens, "tokens/s", state.tokens, tokens),
        ):
            if rate is not None and (left_s := wait_s(level, rate, cost)) > 0:
                return Refusal(quota, left_s)
        return None

    def _count(self, index: int, change: int) -> None:
        at = self._seat_at(index, self._own_seat())
        (count,) = _COUNT.unpack_from(self._records.memory, at)
        # One number of four bytes is written whole or not at all.
        _COUNT.pack_into(self._records.memory, at, max(0, count + change))

    def _on_the_way(self, index: int, now_s: float) -> int:
        now, handed = self._handed(index, now_s)
        return sum(handed[(now - ago) % HANDED_S] for ago in range(ON_THE_WAY_S))

    def _handed(self, index: int, now_s: float) -> tuple[int, list[int]]:
        """Return this second, and the requests that were handed on and not taken over, by the second modulo HANDED_S."""
        last, *handed = _HANDED.unpack_from(self._records.memory, self._records.body_at(index) + _HANDED_AT)
        # Another process may have read the clock a moment later. If the clock stepped back, the counts end as seconds pass.
        now = int(time_of(last, now_s))
        for second in range(last + 1, min(now, last + HANDED_S) + 1):
            handed[second % HANDED_S] = 0
        return now, handed

    def _write_handed(self, index: int, now: int, handed: list[int]) -> None:
        _HANDED.pack_into(self._records.memory, self._records.body_at(index) + _HANDED_AT, now, *handed)

    def _sum_of_counts(self, index: int) -> int:
        return sum(self._counts(index).values())

    def _under_way(self, index: int) -> int:
        return sum(
            count
            for seat, count in self._counts(index).items()
            if seat == self._seat or self._records.is_locked(_FIRST_SEAT + seat)
        )

    def _counts(self, index: int) -> Mapping[int, int]:
        """Return the requests under way by seat, without seats that have none."""
        counts = struct.unpack_from(f"={SEATS}I", self._records.memory, self._seat_at(index, 0))
        return {seat: count for seat, count in enumerate(counts) if count}

    def _own_seat(self) -> int:
        """Return this process's seat. A seat is taken with the first request, and what a dead process left there is removed."""
        if self._seat is None:
            for seat in range(SEATS):
                if self._records.try_keep(_FIRST_SEAT + seat):
                    for index in self._records.used():
                        _COUNT.pack_into(self._records.memory, self._seat_at(index, seat), 0)
                    self._seat = seat
                    return seat
            # More processes than seats: they share the last, and a killed one of them leaves its counts.
            self._seat = SEATS - 1
        return self._seat

    def _seat_at(self, index: int, seat: int) -> int:
        return self._records.body_at(index) + _SEATS_AT + seat * _COUNT.size

    def _read(self, index: int) -> _State:
        at = self._records.body_at(index)
        (choice,) = _CHOICE.unpack_from(self._records.memory, at)
        return _State(*_STATE.unpack_from(self._records.memory, at + _CHOICE.size + choice * _STATE.size))

    def _write(self, index: int, state: _State) -> None:
        at = self._records.body_at(index)
        (choice,) = _CHOICE.unpack_from(self._records.memory, at)
        _STATE.pack_into(self._records.memory, at + _CHOICE.size + (1 - choice) * _STATE.size, *state)
        _CHOICE.pack_into(self._records.memory, at, 1 - choice)


def is_in_use(path: Path) -> bool:
    """Return whether a living process uses the file. Raises OSError."""
    with closing(SharedRecords(path, _BODY_BYTES, MOST_TENANTS)) as records:
        return records.is_locked(_KEEPER, 1 + SEATS)


def _rates(limits: Limits) -> tuple[Rate | None, Rate | None]:
    return limits.requests, limits.tokens


def _spend(state: _State, limits: Limits, use: Use, now_s: float) -> _State:
    """Return the state after a use.

    While `hplm serve` leases, a correction goes to the registry's account, which may have paid for the use already.
    """
    is_leased = state.is_leased(now_s)
    left = [
        bucket if rate is None or (is_leased and amount < 0) else spend(bucket, rate, amount)
        for rate, bucket, amount in zip(_rates(limits), state.buckets, use, strict=True)
    ]
    return state.with_buckets(*left)._replace(
        spent_requests=state.spent_requests + use.requests, spent_tokens=state.spent_tokens + use.tokens
    )
