"""Labels of metrics: the busiest tenants have them, as exact counts of all tenants would give them."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hplm.metering.busiest import COUNTERS_A_LABEL, HYSTERESIS, KEEP, BusiestTenants, Sketch, choose_labelled

TENANTS = [f"t{number}" for number in range(30)]
ADDED = st.dictionaries(st.sampled_from(TENANTS), st.integers(1, 50), max_size=12)
# Traffic of turns: in each turn several additions.
TURNS = st.lists(st.lists(ADDED, max_size=4), max_size=12)


class ExactBusiest:
    """The slow twin: counts every tenant."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: Counter[str] = Counter()
        self.labelled: set[str] = set()

    def add(self, texts: dict[str, int]) -> None:
        for tenant, count in texts.items():
            self._counts[tenant] += count
        for tenant in sorted(texts, key=lambda name: (-texts[name], name)):
            if len(self.labelled) < self._most:
                self.labelled.add(tenant)

    def end_turn(self) -> None:
        self.labelled = set(choose_labelled(self.labelled, self._counts, self._most))
        for tenant in self._counts:
            self._counts[tenant] *= KEEP  # type: ignore[assignment]


@given(turns=TURNS, most=st.integers(3, 6))
def test_labels_are_those_of_exact_counts_while_the_sketch_has_room(
    turns: list[list[dict[str, int]]], most: int
) -> None:
    assert COUNTERS_A_LABEL * most >= len(TENANTS)
    fast, slow = BusiestTenants(most), ExactBusiest(most)
    for turn in turns:
        for added in turn:
            fast.add(added)
            slow.add(added)
            assert set(fast.labelled) == slow.labelled
        fast.end_turn()
        slow.end_turn()
        assert set(fast.labelled) == slow.labelled
        assert len(fast.labelled) <= most


@given(added=st.lists(ADDED, max_size=40), capacity=st.integers(1, 12))
def test_a_sketch_is_too_low_by_its_bound_at_most(added: list[dict[str, int]], capacity: int) -> None:
    sketch, exact = Sketch(capacity), Counter[str]()
    for weights in added:
        sketch.add(weights)
        exact.update(weights)
    estimates = sketch.estimates()
    assert len(estimates) <= capacity
    most_missing = exact.total() / (capacity + 1)
    for tenant, weight in exact.items():
        assert weight - most_missing - 1e-9 <= estimates.get(tenant, 0.0) <= weight


def test_a_tenant_that_is_barely_busier_takes_no_label() -> None:
    labelled = {"a", "b"}
    assert choose_labelled(labelled, {"a": 9, "b": 10, "c": 10 * HYSTERESIS - 2}, 2) == labelled
    assert choose_labelled(labelled, {"a": 9, "b": 10, "c": 9 * HYSTERESIS + 1}, 2) == {"b", "c"}


def test_without_labels_no_tenant_has_one() -> None:
    busiest = BusiestTenants(0)
    busiest.add({"a": 5})
    busiest.end_turn()
    assert not busiest.labelled
