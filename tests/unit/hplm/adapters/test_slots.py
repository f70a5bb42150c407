"""The table of adapter slots."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hplm.adapters.slots import IDENTITY, SlotTable


def test_the_least_recently_used_slot_is_reused() -> None:
    table = SlotTable(3)
    a, _ = table.assign("a")
    b, _ = table.assign("b")
    table.release("a")
    table.release("b")
    assert table.assign("a") == (a, False)
    table.release("a")
    assert table.assign("c") == (b, True)
    assert table.find("b") is None


def test_a_pinned_slot_is_never_given_away() -> None:
    table = SlotTable(2)
    table.assign("a")
    assert not table.num_unpinned
    assert table.find("a") is not None
    table.release("a")
    assert table.num_unpinned


@given(st.integers(2, 5), st.lists(st.tuples(st.sampled_from("abcdefg"), st.booleans()), max_size=60))
def test_whatever_happens_pinned_tenants_keep_slots_of_their_own(num_slots: int, steps: list[tuple[str, bool]]) -> None:
    table = SlotTable(num_slots)
    pinned: dict[str, int] = {}
    counts: dict[str, int] = {}
    for key, wants in steps:
        if wants and (table.find(key) is not None or table.num_unpinned):
            slot, _ = table.assign(key)
            assert pinned.setdefault(key, slot) == slot
            counts[key] = counts.get(key, 0) + 1
        elif counts.get(key):
            table.release(key)
            counts[key] -= 1
            if not counts[key]:
                del pinned[key]
        assert IDENTITY not in pinned.values()
        assert len(set(pinned.values())) == len(pinned)
        assert all(table.find(tenant) == slot for tenant, slot in pinned.items())
