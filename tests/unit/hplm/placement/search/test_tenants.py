"""Tenants on nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.errors import ConfigError
from hplm.placement.cluster import Node
from hplm.placement.search.tenants import TenantLoad, place_tenants

NODES = tuple(Node(f"n{number}", 1, 1, 10_000) for number in range(4))


@given(rates=st.lists(st.floats(0, 100, allow_subnormal=False), min_size=1, max_size=40), sizes=st.integers(1, 5_000))
def test_a_hot_tenant_has_several_nodes_of_its_base_none_of_which_gets_more_than_an_even_share(
    rates: list[float], sizes: int
) -> None:
    tenants = [TenantLoad(f"t{number}", f"b{number % 2}", rate, sizes) for number, rate in enumerate(rates)]
    bases = {"b0": ["n0", "n1", "n2"], "b1": ["n2", "n3"]}
    rule = place_tenants(tenants, NODES, bases)
    for tenant in tenants:
        names = bases[tenant.base]
        even = sum(one.requests_per_s for one in tenants if one.base == tenant.base) / len(names)
        if tenant.name in rule.hot:
            given_nodes = rule.hot[tenant.name]
            assert len(given_nodes) > 1
            assert set(given_nodes) <= set(names)
            assert tenant.requests_per_s / len(given_nodes) <= even * 1.0001
        else:
            assert tenant.requests_per_s <= 1.5001 * even
    assert set(rule.weights) == {node.name for node in NODES}
    assert all(1 <= weight <= 256 for weight in rule.weights.values())


def test_the_hot_tenant_is_on_several_nodes_and_the_cold_are_on_one() -> None:
    tenants = [TenantLoad("hot", "b", 500, 10), *(TenantLoad(f"t{number}", "b", 1, 10) for number in range(50))]
    rule = place_tenants(tenants, NODES, {"b": [node.name for node in NODES]})
    assert {tenant: len(nodes) for tenant, nodes in rule.hot.items()} == {"hot": 4}


def test_a_node_with_a_smaller_cache_gets_fewer_tenants_if_even_parts_do_not_fit() -> None:
    nodes = [Node("large", 1, 1, 8_000), Node("small", 1, 1, 2_000)]
    many, few = ([TenantLoad(f"t{number}", "b", 1, 10) for number in range(count)] for count in (900, 100))
    assert place_tenants(many, nodes, {"b": ["large", "small"]}).weights == {"large": 64, "small": 16}
    assert place_tenants(few, nodes, {"b": ["large", "small"]}).weights == {"large": 1, "small": 1}


def test_a_tenant_whose_base_is_nowhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="no node serves it"):
        place_tenants([TenantLoad("t", "b", 1, 1)], NODES, {})
