"""Places of those who wait for a load: never more than there are, and never all of them one tenant's."""

from __future__ import annotations

import threading
import time
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hplm.serving.load_permits import LoadPermits


@given(most=st.integers(1, 40), asked=st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=200))
def test_places_are_bounded_and_a_newcomer_finds_one_while_any_is_free(
    most: int, asked: list[tuple[str, bool]]
) -> None:
    places, held = LoadPermits(most), Counter[str]()
    for tenant, comes in asked:
        free = most - held.total()
        if comes:
            took = places.take(tenant)
            assert took == (held[tenant] < free)
            held[tenant] += took
        elif held[tenant]:
            places.leave(tenant)
            held[tenant] -= 1
        assert held.total() <= most
    # Who holds none finds room while there is any.
    assert places.take("newcomer") == (held.total() < most)


def test_one_tenant_alone_takes_half() -> None:
    places = LoadPermits(20)
    assert [places.take("flood") for _ in range(20)] == [True] * 10 + [False] * 10
    assert sum(places.take(f"t{i}") for i in range(20)) == 10
    places.leave("flood")
    assert places.take("another")


def test_no_more_are_inside_than_there_are_places_however_many_threads_come() -> None:
    places, begin, most = LoadPermits(3), threading.Barrier(8), 0
    inside: list[str] = []

    def come_and_go(name: str) -> None:
        nonlocal most
        begin.wait()
        for _ in range(1_000):
            if places.take(name):
                inside.append(name)
                time.sleep(0)  # somebody else's turn
                most = max(most, len(inside))
                inside.remove(name)
                places.leave(name)

    threads = [threading.Thread(target=come_and_go, args=(f"t{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 < most <= 3
    assert [places.take("one") for _ in range(3)] == [True, True, False]
