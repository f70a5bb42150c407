"""Placements that survive the loss of a node."""

from __future__ import annotations

from hplm.placement.cluster import uniform_cluster
from hplm.placement.placement import Group, ParallelConfig, Placement
from hplm.placement.search.enumeration import SearchOptions, search
from hplm.placement.search.robust import covers_every_model, survives_any_node
from tests.unit.hplm.placement.search.cases import case, model

CLUSTER = uniform_cluster(4, 10**9, per_node=2)


def test_a_model_on_two_nodes_survives_and_a_model_twice_on_one_node_does_not() -> None:
    groups = tuple(Group((device,), ParallelConfig()) for device in range(4))
    assert survives_any_node(Placement(groups, (("a",), (), ("a",), ())), CLUSTER, ["a"])
    assert not survives_any_node(Placement(groups, (("a",), ("a",), (), ())), CLUSTER, ["a"])


def test_a_group_that_spans_both_nodes_is_lost_with_either() -> None:
    groups = (Group((0, 2), ParallelConfig(2)), Group((1, 3), ParallelConfig(2)))
    assert not survives_any_node(Placement(groups, (("a",), ("a",))), CLUSTER, ["a"])


def test_a_model_in_no_group_is_not_covered() -> None:
    placement = Placement((Group((0,), ParallelConfig()),), (("a",),))
    assert covers_every_model(placement, ["a"])
    assert not covers_every_model(placement, ["a", "b"])


def test_a_search_that_must_survive_puts_models_on_two_nodes_where_one_would_do() -> None:
    given = case((model("a"), model("b")), 4, load=0.05, cv=0.1, per_node=2)
    options = SearchOptions(survive_any_node=True)
    found = search(given.models, given.cluster, given.requests, options)
    assert found.survives_any_node
    assert not search(given.models, given.cluster, given.requests).survives_any_node
