"""The file of quotas: many takers, killed takers, leases."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.quotas.limits import Limits, Use
from hplm.quotas.quota_file import HANDED_S, ON_THE_WAY_S, SEATS, QuotaFile
from hplm.quotas.token_bucket import CLOCK_STEP_S, DEBT_S, Bucket, full, refilled, wait_s
from hplm.runtime.process import SHARED_MEMORY
from tests.waiting import until

FORK = multiprocessing.get_context("fork")
BUSY = Limits(requests_per_s=50.0)
NUMBERS = st.integers(1, 64).map(lambda number: number / 8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "quotas"


@pytest.fixture
def file(path: Path) -> Iterator[QuotaFile]:
    with closing(QuotaFile(path)) as opened:
        yield opened


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 32), st.integers(1, 40)), max_size=30))
def test_it_takes_what_plain_buckets_allow(steps: list[tuple[int, int]], tmp_path_factory: Any) -> None:
    limits, now_s = Limits(requests_per_s=8.0, tokens_per_s=128.0), 1.0
    requests, tokens = limits.requests, limits.tokens
    assert requests is not None
    assert tokens is not None
    plain = [full(requests, now_s), full(tokens, now_s)]
    with closing(QuotaFile(tmp_path_factory.mktemp("shm") / "quotas")) as file:
        for ticks, cost in steps:
            now_s += ticks / 64
            plain = [refilled(bucket, rate, now_s) for bucket, rate in zip(plain, (requests, tokens), strict=True)]
            waits = [wait_s(plain[0].level, requests, 1.0), wait_s(plain[1].level, tokens, cost)]
            refusal = file.take("acme", limits, cost, now_s)
            assert (refusal is None) == (max(waits) == 0)
            if refusal is None:
                plain = [Bucket(plain[0].level - 1.0, now_s), Bucket(plain[1].level - cost, now_s)]
            else:
                quota = "requests/s" if waits[0] > 0 else "tokens/s"
                assert refusal.quota == quota
                assert refusal.wait_s == pytest.approx(waits[0] or waits[1])


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([-3600.0, -5.0, -0.5, 0.0, 0.25, 5.0, 100.0]),
            st.sampled_from([1, 20, 16_384]),
            st.sampled_from(["take", "take", "lease", "set"]),
        ),
        max_size=30,
    )
)
def test_no_refusal_is_longer_than_the_debt_s_bound_whatever_clock_and_batches(
    steps: list[tuple[float, int, str]], tmp_path_factory: Any
) -> None:
    limits, now_s = Limits(tokens_per_s=5.0, generation=1), 1e6
    rate = limits.tokens
    assert rate is not None
    bounded = DEBT_S * rate.per_s + rate.capacity
    # Each bucket and lease that the tenant begins with may end in one debt.
    allowed, used = rate.capacity + bounded, 0.0
    with closing(QuotaFile(tmp_path_factory.mktemp("shm") / "quotas")) as file:
        for move_s, cost, action in steps:
            now_s += move_s
            allowed += max(0.0, move_s) * rate.per_s
            if action == "lease":
                file.lease("acme", limits, Use(0.0, 1.0), file.marked().get("acme", Use()), now_s, now_s + 3.0)
                allowed += rate.capacity + bounded
            elif action == "set":
                limits = Limits(tokens_per_s=5.0, generation=limits.generation + 1)
                allowed += rate.capacity + bounded
                assert file.take("acme", limits, 1, now_s) is None
                used += 1
            if (refusal := file.take("acme", limits, cost, now_s)) is None:
                used += min(cost, bounded)
                assert used <= allowed
            else:
                assert refusal.wait_s <= DEBT_S + 1 / rate.per_s


@pytest.mark.parametrize("is_leased", [False, True])
def test_a_clock_that_stepped_back_refuses_no_more_than_a_moment(file: QuotaFile, is_leased: bool) -> None:
    limits = Limits(requests_per_s=5.0)
    assert file.take("acme", limits, 1.0, 4000.0) is None
    if is_leased:
        file.lease("acme", limits, Use(0.0), Use(1.0), 4000.0, until_s=4003.0)
    assert sum(file.take("acme", limits, 1.0, 400.0 + number / 4) is not None for number in range(60)) <= 5


def test_requests_that_were_handed_on_count_no_longer_after_the_clock_stepped_back(file: QuotaFile) -> None:
    limits = Limits(concurrent=1)
    assert file.take("acme", limits, 1.0, 4000.0) is None
    file.hand_on("acme", 4000.0)
    assert file.take("acme", limits, 1.0, 400.0 + CLOCK_STEP_S + ON_THE_WAY_S) is None


@pytest.mark.parametrize("is_leased", [False, True])
def test_limits_that_are_set_again_forgive_at_once_also_what_another_process_still_charges_to_the_old(
    file: QuotaFile, path: Path, is_leased: bool
) -> None:
    old, new = (Limits(tokens_per_s=5.0, generation=generation) for generation in (1, 2))
    with closing(QuotaFile(path)) as slow:
        if is_leased:
            file.lease("acme", old, Use(0.0, 1.0), Use(), 1.0, until_s=4.0)
        assert file.take("acme", old, 16_384, 1.0) is None
        assert (refusal := slow.take("acme", old, 1.0, 1.0)) is not None
        assert DEBT_S <= refusal.wait_s <= DEBT_S + 1 / 5
        assert file.take("acme", new, 1.0, 1.0) is None
        # A process and a keeper that do not know yet give the tenant nothing more, and take nothing.
        assert slow.take("acme", old, 1.0, 1.0) is not None
        slow.lease("acme", old, Use(0.0, 9.0), Use(), 1.0, until_s=4.0)
        assert file.take("acme", new, 1.0, 1.0) is not None
        assert file.take("acme", new, 1.0, 1.2) is None


def race(path: Path, limits: Limits, until_s: float, taken: Any) -> None:
    with closing(QuotaFile(path)) as file:
        count = 0
        while (now_s := time.monotonic()) < until_s:
            count += file.take("acme", limits, 1.0, now_s) is None
            file.end("acme", limits, now_s)
        with taken.get_lock():
            taken.value += count


def test_racing_takers_never_exceed_the_allowance(path: Path) -> None:
    taken = FORK.Value("q", 0)
    began_s = time.monotonic()
    racers = [FORK.Process(target=race, args=(path, BUSY, began_s + 1.5, taken)) for _ in range(64)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    rate = BUSY.requests
    assert rate is not None
    # At the latest taken when the last process ended.
    assert 0 < taken.value <= rate.capacity + rate.per_s * (time.monotonic() - began_s)


def take_and_hold(path: Path, limits: Limits, ready: Path) -> None:
    file = QuotaFile(path)
    for _ in range(3):
        assert file.take("acme", limits, 1.0, time.monotonic()) is None
    ready.touch()
    time.sleep(60)


def test_a_killed_taker_gives_its_concurrent_requests_back(file: QuotaFile, path: Path, tmp_path: Path) -> None:
    limits, ready = Limits(concurrent=3), tmp_path / "ready"
    holder = FORK.Process(target=take_and_hold, args=(path, limits, ready))
    holder.start()
    until(ready.exists)
    refusal = file.take("acme", limits, 1.0, 1.0)
    assert refusal is not None
    assert refusal.quota == "concurrent requests"
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert file.under_way("acme", 1.0) == 0
    assert file.take("acme", limits, 1.0, 1.0) is None
    assert file.under_way("acme", 1.0) == 1


def test_a_new_process_takes_no_counts_of_a_dead_one_over(path: Path, tmp_path: Path) -> None:
    limits, ready = Limits(concurrent=3), tmp_path / "ready"
    holder = FORK.Process(target=take_and_hold, args=(path, limits, ready))
    holder.start()
    until(ready.exists)
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    with closing(QuotaFile(path)) as new:
        assert new.take("acme", limits, 1.0, 1.0) is None
        assert new.under_way("acme", 1.0) == 1


def take_until_killed(path: Path) -> None:
    file = QuotaFile(path)
    while True:
        file.take("acme", Limits(requests_per_s=1e6), 1.0, time.monotonic())


def test_killed_takers_leave_neither_a_lock_nor_half_a_record(file: QuotaFile, path: Path) -> None:
    for _ in range(10):
        taker = FORK.Process(target=take_until_killed, args=(path,))
        taker.start()
        before = Use()
        until(lambda before=before: file.marked().get("acme", before) != before)
        assert taker.pid is not None
        os.kill(taker.pid, signal.SIGKILL)
        taker.join()
        assert file.take("acme", Limits(requests_per_s=1e6), 1.0, time.monotonic()) is None
        spent = file.marked()["acme"]
        assert spent.requests == spent.tokens > 0


def test_concurrent_requests_end_and_are_shared_among_servers(file: QuotaFile) -> None:
    limits = Limits(concurrent=4)
    file.set_servers(2)
    assert [file.take("acme", limits, 1.0, 1.0) is None for _ in range(3)] == [True, True, False]
    file.end("acme", limits, 1.0)
    assert file.take("acme", limits, 1.0, 1.0) is None
    assert file.under_way("acme", 1.0) == 2


def test_a_request_on_its_way_to_another_process_counts_until_that_process_has_ended_it(
    file: QuotaFile, path: Path
) -> None:
    limits = Limits(concurrent=1)
    with closing(QuotaFile(path)) as next_stage:
        assert file.take("acme", limits, 1.0, 1.0) is None
        file.hand_on("acme", 1.9)
        assert file.take("acme", limits, 1.0, 2.0) is not None
        assert next_stage.take_over("acme", 2.1)
        assert not next_stage.take_over("acme", 2.1)
        assert file.take("acme", limits, 1.0, 30.0) is not None
        next_stage.end("acme", limits, 30.0)
        assert file.take("acme", limits, 1.0, 30.0) is None


def test_a_request_that_no_process_takes_over_counts_for_a_moment_only(file: QuotaFile) -> None:
    limits = Limits(concurrent=1)
    assert file.take("acme", limits, 1.0, 1.0) is None
    file.hand_on("acme", 1.0)
    assert file.take("acme", limits, 1.0, 1.0 + ON_THE_WAY_S) is None
    # A slow server's request is charged once all the same.
    assert file.take_over("acme", HANDED_S + 0.9)
    file.hand_on("acme", 20.0)
    assert not file.take_over("acme", 20.0 + HANDED_S)


def test_a_lease_is_all_that_may_be_taken_until_it_ends(file: QuotaFile) -> None:
    limits = Limits(requests_per_s=100.0)
    file.lease("acme", limits, Use(2.0), Use(), 1.0, until_s=2.0)
    assert [file.take("acme", limits, 1.0, 1.9) is None for _ in range(3)] == [True, True, False]
    # Then the file fills by itself.
    assert file.take("acme", limits, 1.0, 2.5) is None


def test_after_a_lease_was_released_the_rest_fills_by_itself(file: QuotaFile) -> None:
    limits = Limits(requests_per_s=10.0)
    file.lease("acme", limits, Use(0.0), Use(), 1.0, until_s=9.0)
    assert file.take("acme", limits, 1.0, 1.0) is not None
    file.release("acme", 1.5)
    assert file.take("acme", limits, 1.0, 1.55) is not None
    assert file.take("acme", limits, 1.0, 1.6) is None


def test_a_lease_counts_what_was_taken_while_it_was_asked_for(file: QuotaFile) -> None:
    limits = Limits(requests_per_s=100.0)
    assert file.take("acme", limits, 1.0, 1.0) is None
    spent = file.marked()["acme"]
    assert file.take("acme", limits, 1.0, 1.0) is None
    file.lease("acme", limits, Use(2.0), spent, 1.0, until_s=2.0)
    assert [file.take("acme", limits, 1.0, 1.0) is None for _ in range(2)] == [True, False]


def test_a_correction_is_charged_and_a_refund_is_given_back(file: QuotaFile) -> None:
    limits = Limits(tokens_per_s=100.0)
    assert file.take("acme", limits, 4.0, 1.0) is None
    file.spend("acme", limits, Use(0.0, 7.0), 1.0)
    assert file.take("acme", limits, 1.0, 1.0) is not None
    file.end("acme", limits, 1.0, Use(1.0, 10.0))
    assert file.take("acme", limits, 10.0, 1.0) is None


def test_there_may_be_more_processes_than_seats(path: Path) -> None:
    files = [QuotaFile(path) for _ in range(SEATS + 2)]
    for each in files:
        assert each.take("acme", Limits(concurrent=1000), 1.0, 1.0) is None
    assert files[0].under_way("acme", 1.0) >= SEATS
    for each in files:
        each.close()


def test_a_first_request_takes_little_shared_memory() -> None:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder, closing(QuotaFile(Path(folder) / "quotas")) as file:
        before = (Path(folder) / "quotas").stat().st_blocks
        assert file.take("acme", BUSY, 1.0, 1.0) is None
        # In blocks of 512 bytes: two pages, if a record lies on both.
        assert (Path(folder) / "quotas").stat().st_blocks - before <= 16


def test_a_stopped_process_that_holds_the_table_s_lock_keeps_no_new_tenant_from_being_answered(
    file: QuotaFile, path: Path
) -> None:
    limits = Limits(requests_per_s=1.0)
    with closing(QuotaFile(path)) as stopped, stopped._records.locked(0):
        assert file.take("new", limits, 1.0, 1.0) is None
        file.end("new", limits, 1.0)
    # As soon as the lock is free, the tenant is limited.
    assert file.take("new", limits, 1.0, 1.0) is None
    assert file.take("new", limits, 1.0, 1.0) is not None
