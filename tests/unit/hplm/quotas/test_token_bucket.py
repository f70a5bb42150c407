"""Token buckets and leases against slow twins that go through all uses."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.quotas.token_bucket import (
    DEBT_S,
    LEASE_S,
    LEAST,
    Bucket,
    Rate,
    full,
    given_back,
    rate_of,
    refilled,
    settle,
    spend,
    wait_s,
)

# Numbers with few binary digits, so that floats are exact.
NUMBERS = st.integers(1, 400).map(lambda number: number / 16)
RATES = st.builds(Rate, st.sampled_from([0.5, 1.0, 4.0, 32.0, 256.0]), NUMBERS.map(lambda number: LEAST + number))
# Seconds since the last use, and the cost.
USES = st.lists(st.tuples(st.integers(0, 64).map(lambda ticks: ticks / 32), NUMBERS), max_size=40)


def may_use(uses: list[tuple[float, float]], rate: Rate, now_s: float, cost: float) -> bool:
    """The slow twin: in every time up to now, the uses and this one are at most the capacity and what the time gives.

    Of this one, only LEAST counts.
    """
    asked = min(Fraction(cost), Fraction(LEAST))
    for begin in range(len(uses) + 1):
        since_s = Fraction(now_s) - Fraction(uses[begin][0] if begin < len(uses) else now_s)
        used = sum((Fraction(used) for _, used in uses[begin:]), Fraction(0))
        if used + asked > Fraction(rate.capacity) + since_s * Fraction(rate.per_s):
            return False
    return True


@given(rate=RATES, steps=USES)
def test_a_bucket_allows_what_all_its_uses_leave(rate: Rate, steps: list[tuple[float, float]]) -> None:
    bucket, uses, now_s = full(rate, 0.0), list[tuple[float, float]](), 0.0
    for passed_s, cost in steps:
        now_s += passed_s
        bucket = refilled(bucket, rate, now_s)
        is_allowed = wait_s(bucket.level, rate, cost) == 0
        assert is_allowed == may_use(uses, rate, now_s, cost)
        if is_allowed:
            bucket = bucket._replace(level=bucket.level - cost)
            uses.append((now_s, cost))


@given(rate=RATES, steps=USES)
def test_after_the_wait_that_it_says_a_use_is_allowed_and_not_before(
    rate: Rate, steps: list[tuple[float, float]]
) -> None:
    bucket, now_s = full(rate, 0.0), 0.0
    for passed_s, cost in steps:
        now_s += passed_s
        bucket = refilled(bucket, rate, now_s)
        if (left_s := wait_s(bucket.level, rate, cost)) > 0:
            later = refilled(bucket, rate, now_s + left_s)
            assert wait_s(later.level, rate, cost) <= 1e-9
            earlier = refilled(bucket, rate, now_s + left_s / 2)
            assert wait_s(earlier.level, rate, cost) > 0
        else:
            bucket = bucket._replace(level=bucket.level - cost)


def test_a_clock_that_is_set_back_gives_nothing() -> None:
    rate = Rate(10.0, 1.0)
    # Another process read the clock a moment later: its time stays.
    assert refilled(Bucket(0.0, 100.0), rate, 99.5) == Bucket(0.0, 100.0)


@given(rate=RATES, step_s=st.floats(2.0, 1e6))
def test_a_bucket_fills_again_at_once_after_its_clock_stepped_back(rate: Rate, step_s: float) -> None:
    stepped = refilled(Bucket(0.0, step_s), rate, 0.0)
    assert stepped == Bucket(0.0, 0.0)
    assert refilled(stepped, rate, 1.0).level == pytest.approx(min(rate.capacity, rate.per_s))
    assert settle(Bucket(0.0, step_s), rate, 0.0, 0.0, 0.0).account.at_s == 0.0


# Seconds by which the clock moves, also back, and the amount of a use.
MOVES = st.lists(st.tuples(st.sampled_from([-3600.0, -5.0, -0.5, 0.0, 0.5, 5.0, 100.0]), NUMBERS), max_size=30)


@given(rate=RATES, moves=MOVES, factor=st.sampled_from([1, 100, 10_000]))
def test_no_use_is_refused_for_longer_than_the_debt_s_bound_and_only_what_is_beyond_exceeds_the_quota(
    rate: Rate, moves: list[tuple[float, float]], factor: int
) -> None:
    bucket, now_s = full(rate, 4000.0), 4000.0
    passed_s = used = forgiven = 0.0
    for move_s, cost in moves:
        now_s += move_s
        passed_s += max(0.0, move_s)
        bucket = refilled(bucket, rate, now_s)
        left_s = wait_s(bucket.level, rate, cost * factor)
        assert left_s <= DEBT_S + LEAST / rate.per_s
        if left_s == 0:
            bucket = spend(bucket, rate, cost * factor)
            used += cost * factor
            forgiven += bucket.forgiven
            assert bucket.forgiven <= max(0.0, cost * factor - DEBT_S * rate.per_s)
    assert used - forgiven <= rate.capacity + rate.per_s * (passed_s + DEBT_S) + 1e-6


@given(rate=RATES, level=NUMBERS, estimate=st.integers(0, 20_000), share=st.integers(0, 8))
def test_a_corrected_estimate_costs_what_the_text_costs(rate: Rate, level: float, estimate: int, share: int) -> None:
    before, cost = Bucket(min(level, rate.capacity), 1.0), estimate * share / 8
    corrected = spend(spend(before, rate, estimate), rate, cost - estimate)
    assert corrected == pytest.approx(spend(before, rate, cost))


@given(rate=RATES, estimate=st.integers(100, 20_000))
def test_a_correction_pays_no_debt_of_an_account_and_gives_its_server_no_lease(rate: Rate, estimate: int) -> None:
    cost = 1.0 + DEBT_S * rate.per_s + rate.capacity
    account, lease = settle(full(rate, 1.0), rate, 0.0, cost + estimate, 1.0)
    account, lease = settle(account, rate, lease, -float(estimate), 1.0)
    assert (account.level, lease) == (-DEBT_S * rate.per_s, 0.0)


def test_the_least_use_passes_however_small_the_quota() -> None:
    rate = rate_of(0.01)
    assert wait_s(rate.capacity, rate, 1.0) == 0
    assert rate_of(500.0).capacity == LEAST + LEASE_S * 500


@given(
    per_s=st.sampled_from([0.5, 4.0, 10.0, 200.0]),
    cost=st.sampled_from([1.0, 7.0, 300.0]),
    gaps=st.lists(st.integers(0, 100).map(lambda thousandths: thousandths / 1000), min_size=1, max_size=200),
)
def test_no_time_is_lost_if_somebody_asks_every_tenth_of_a_second(per_s: float, cost: float, gaps: list[float]) -> None:
    rate = rate_of(per_s)
    bucket, now_s, used = full(rate, 0.0), 0.0, 0.0
    for gap_s in (0.0, *gaps):
        now_s += gap_s
        bucket = refilled(bucket, rate, now_s)
        while wait_s(bucket.level, rate, cost) == 0:
            bucket = bucket._replace(level=bucket.level - cost)
            used += cost
    assert rate.per_s * now_s + rate.capacity - LEAST - 1e-6 <= used <= rate.per_s * now_s + rate.capacity + cost


@given(per_s=st.sampled_from([0.5, 4.0, 10.0, 200.0]), cost=st.sampled_from([1.0, 7.0, 300.0]))
def test_uses_below_the_quota_are_never_refused(per_s: float, cost: float) -> None:
    rate = rate_of(per_s)
    bucket, now_s = full(rate, 0.0), 0.0
    for _ in range(50):
        bucket = refilled(bucket, rate, now_s)
        assert wait_s(bucket.level, rate, cost) == 0
        bucket = bucket._replace(level=bucket.level - cost)
        now_s += 1.001 * cost / per_s


# Of two servers: which one, what it spends of its lease as a share, whether it settles or is lost.
SERVERS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 64), st.sampled_from(["settle", "settle", "lost"]), st.integers(0, 4)),
    max_size=60,
)


@given(rate=RATES, steps=SERVERS)
def test_servers_never_use_more_than_the_quota_and_what_they_began_with(
    rate: Rate, steps: list[tuple[int, int, str, int]]
) -> None:
    account, now_s, used = full(rate, 0.0), 0.0, 0.0
    leases, credits, lost = [0.0, 0.0], [rate.capacity, rate.capacity], 0.0
    for server, share, what, ticks in steps:
        now_s += ticks / 32
        spent = (leases[server] or credits[server]) * share / 64
        used += spent
        if what == "lost":
            # What it has spent is not known, so its whole lease comes back, and its successor begins anew, with a full bucket.
            account = given_back(account, rate, leases[server], now_s)
            lost += max(leases[server], spent) + rate.capacity
            leases[server], credits[server] = 0.0, rate.capacity
        else:
            account, leases[server] = settle(account, rate, leases[server], spent, now_s)
            assert 0 <= leases[server] <= rate.capacity
            credits[server] = leases[server]
        assert account.level <= rate.capacity
        # Nothing is gained but what the time gave, what a lost server had leased or spent without a lease, and what its
        # successor begins with.
        assert used <= rate.capacity + rate.per_s * now_s + 2 * rate.capacity + lost + 1e-6


@given(rate=RATES, spends=st.lists(NUMBERS, max_size=20))
def test_what_one_server_spends_another_waits_for(rate: Rate, spends: list[float]) -> None:
    account, lease = full(rate, 0.0), 0.0
    for spent in spends:
        account, lease = settle(account, rate, lease, spent, 0.0)
    # At one moment all leases together, and all uses, are what the account had.
    assert abs(account.level - account.forgiven + lease + sum(spends) - rate.capacity) < 1e-6
    _, other = settle(account, rate, 0.0, 0.0, 0.0)
    # One unit stays for a third server, once this server has one.
    assert other == pytest.approx(max(0.0, min(account.level, max(1.0, account.level - 1.0))))
