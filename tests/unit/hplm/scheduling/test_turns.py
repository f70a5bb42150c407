"""The work that goes before a new request, compared with a count tenant by tenant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.scheduling.weighted_fair import WeightedFair

NAMES = st.sampled_from("abcdefghijkl")


@given(
    st.dictionaries(NAMES, st.integers(1, 50), min_size=1),
    st.dictionaries(NAMES, st.sampled_from([0.1, 1.0, 3.0])),
    NAMES,
    st.integers(1, 9),
)
def test_of_each_other_tenant_as_much_by_weight_as_the_newcomers_would_have(
    waiting: dict[str, int], weights: dict[str, float], tenant: str, more: int
) -> None:
    own = waiting.get(tenant, 0) + more
    level = own / weights.get(tenant, 1.0)
    others = (min(has, level * weights.get(name, 1.0)) for name, has in waiting.items() if name != tenant)
    assert WeightedFair(waiting, weights).before(tenant, own) == pytest.approx(own + sum(others))
