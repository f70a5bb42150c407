"""Permits to wait for a load: a bounded number, and never all of them for one tenant."""

from __future__ import annotations

import threading
import time
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hplm.serving.load_permits import LoadPermits


@given(most=st.integers(1, 40), asked=st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=200))
def test_permits_are_bounded_and_a_new_tenant_gets_one_while_any_is_free(
    most: int, asked: list[tuple[str, bool]]
) -> None:
    permits, held = LoadPermits(most), Counter[str]()
    for tenant, comes in asked:
        free = most - held.total()
        if comes:
            took = permits.take(tenant)
            assert took == (held[tenant] < free)
            held[tenant] += took
        elif held[tenant]:
            permits.leave(tenant)
            held[tenant] -= 1
        assert held.total() <= most
    # A tenant that holds no permit gets one if any is free.
    assert permits.take("newcomer") == (held.total() < most)


def test_one_tenant_alone_takes_half() -> None:
    permits = LoadPermits(20)
    assert [permits.take("flood") for _ in range(20)] == [True] * 10 + [False] * 10
    assert sum(permits.take(f"t{i}") for i in range(20)) == 10
    permits.leave("flood")
    assert permits.take("another")


def test_no_more_permits_are_taken_than_there_are_however_many_threads_come() -> None:
    permits, begin, most = LoadPermits(3), threading.Barrier(8), 0
    inside: list[str] = []

    def come_and_go(name: str) -> None:
        nonlocal most
        begin.wait()
        for _ in range(1_000):
            if permits.take(name):
                inside.append(name)
                time.sleep(0)  # let another thread run
                most = max(most, len(inside))
                inside.remove(name)
                permits.leave(name)

    threads = [threading.Thread(target=come_and_go, args=(f"t{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 < most <= 3
    assert [permits.take("one") for _ in range(3)] == [True, True, False]
