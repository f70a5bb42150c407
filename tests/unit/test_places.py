"""Places of those who wait for a load: never more than there are, and never all of them one tenant's."""

from __future__ import annotations

import threading
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hplm.serving.places import Places


@given(most=st.integers(1, 40), asked=st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=200))
def test_places_are_bounded_and_a_newcomer_finds_one_while_any_is_free(
    most: int, asked: list[tuple[str, bool]]
) -> None:
    places, held = Places(most), Counter[str]()
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
    places = Places(20)
    assert [places.take("flood") for _ in range(20)] == [True] * 10 + [False] * 10
    assert sum(places.take(f"t{i}") for i in range(20)) == 10
    places.leave("flood")
    assert places.take("another")


def test_places_come_back_from_many_threads() -> None:
    places = Places(8)

    def come_and_go(name: str) -> None:
        for _ in range(2_000):
            if places.take(name):
                places.leave(name)

    threads = [threading.Thread(target=come_and_go, args=(f"t{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [places.take("one") for _ in range(5)] == [True] * 4 + [False]
