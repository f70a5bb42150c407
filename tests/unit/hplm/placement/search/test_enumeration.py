"""Algorithm 2: the whole search."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.errors import ConfigError
from hplm.placement.cluster import Cluster, Node
from hplm.placement.placement import ParallelConfig
from hplm.placement.search.buckets import device_splits, model_buckets
from hplm.placement.search.enumeration import SearchOptions, search, selective_replication
from hplm.placement.search.partitions import blocks_of, equal_groups, group_sizes, parallel_configs
from hplm.placement.search.robust import covers_every_model, survives_any_node
from hplm.placement.stage_times import StageTimes
from tests.unit.hplm.placement.search.cases import GB, case, model, random_case


def test_two_bursty_models_share_a_pipeline_as_in_the_papers_first_example() -> None:
    two = case((model("a", gb=8), model("b", gb=8)), 2, load=0.5, cv=4, count=2000)
    found = search(two.models, two.cluster, two.requests)
    assert [group.config for group in found.placement.groups] == [ParallelConfig(2)]
    assert found.attainment > selective_replication(two.models, two.cluster, two.requests).attainment + 0.05


def test_intra_layer_parallelism_is_chosen_when_deadlines_are_tighter_than_a_model() -> None:
    tight = case((model("a", intra=True), model("b", intra=True)), 4, scale=0.7, load=0.1)
    found = search(tight.models, tight.cluster, tight.requests)
    assert found.attainment > 0.5
    assert {group.config.intra for group in found.placement.groups} <= {2, 4}


@pytest.mark.parametrize("seed", range(12))
def test_the_fast_search_reaches_98_percent_of_the_full_search_and_selective_replication(seed: int) -> None:
    small = random_case(seed)
    fast = search(small.models, small.cluster, small.requests)
    full = search(small.models, small.cluster, small.requests, SearchOptions(method="full"))
    single = selective_replication(small.models, small.cluster, small.requests)
    assert fast.attainment >= 0.98 * full.attainment
    assert fast.attainment >= single.attainment


def test_the_fast_search_of_a_small_problem_also_improves_what_the_full_method_selects() -> None:
    small = random_case(208)
    searches = (SearchOptions(full_up_to=0), SearchOptions(), SearchOptions(method="full"))
    alone, both, full = (search(small.models, small.cluster, small.requests, one).attainment for one in searches)
    assert alone < 0.98 * full
    assert both >= full


def test_of_equal_shares_the_placement_that_leaves_more_of_the_deadlines_wins() -> None:
    idle = case((model("a", intra=True),), 2, load=0.01, cv=0.1, scale=10)
    found = search(idle.models, idle.cluster, idle.requests)
    assert (found.attainment, found.placement.groups[0].config) == (1.0, ParallelConfig(1, 2))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    nodes=st.integers(1, 3),
    span=st.booleans(),
    cover=st.booleans(),
    survive=st.booleans(),
)
def test_every_placement_respects_memory_and_keeps_what_it_says(
    seed: int, nodes: int, span: bool, cover: bool, survive: bool
) -> None:
    drawn = random_case(seed)
    cluster = Cluster(tuple(Node(f"n{number}", 1 + (seed + number) % 3, 13 * GB) for number in range(nodes)))
    options = SearchOptions(
        span_nodes=span, cover_every_model=cover, survive_any_node=survive and nodes > 1, refining_simulations=20
    )
    names = [one.name for one in drawn.models]
    try:
        found = search(drawn.models, cluster, drawn.requests.where(drawn.requests.times_s < 5), options)
    except ConfigError as error:
        if options.required_nodes and "no placement was found" in str(error):
            return
        raise
    assert StageTimes(cluster, drawn.models).fits(found.placement)
    used = [device for group in found.placement.groups for device in group.devices]
    assert len(used) == len(set(used))
    assert found.covers_every_model == covers_every_model(found.placement, names)
    assert found.survives_any_node == survives_any_node(found.placement, cluster, names)
    assert found.covers_every_model or not options.required_nodes
    assert found.survives_any_node or not options.survive_any_node
    if not span:
        assert all(len({cluster.node_of[device] for device in group.devices}) == 1 for group in found.placement.groups)


def test_a_search_that_cannot_hold_every_model_says_which() -> None:
    large = case((model("a", gb=8), model("b", gb=80)), 2)
    with pytest.raises(ConfigError, match="1 did not fit, such as b"):
        search(large.models, large.cluster, large.requests, SearchOptions(cover_every_model=True))


def test_a_cluster_of_one_node_cannot_survive_its_loss() -> None:
    one = case((model("a"),), 2)
    with pytest.raises(ConfigError, match="two nodes or more"):
        search(one.models, one.cluster, one.requests, SearchOptions(survive_any_node=True))


def test_a_sample_of_the_requests_keeps_rates_and_the_result_is_of_all_requests() -> None:
    long = case((model("a"), model("b")), 2, count=4000, cv=1)
    found = search(long.models, long.cluster, long.requests, SearchOptions(most_requests=500))
    whole = search(long.models, long.cluster, long.requests)
    assert found.attainment == pytest.approx(whole.attainment, abs=0.03)


def test_progress_ends_with_the_last_step() -> None:
    two = case((model("a"), model("b", 0.5)), 4)
    steps: list[tuple[int, int]] = []
    search(two.models, two.cluster, two.requests, progress=lambda done, of, words: steps.append((done, of)))
    assert [done for done, _ in steps] == list(range(1, steps[0][1] + 1))


@pytest.mark.parametrize("wrong", [{"method": "best"}, {"beam": 0}, {"bucket_ratio": 0.5}])
def test_options_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        replace(SearchOptions(), **wrong)  # type: ignore[arg-type]


def test_models_of_similar_latency_share_a_bucket() -> None:
    models = [model("a", 0.1), model("b", 0.1), model("c", 0.15), model("d", 0.5)]
    divisions = [[[one.name for one in bucket] for bucket in buckets] for buckets in model_buckets(models, 2.0, 3)]
    assert divisions == [
        [["a", "b", "c", "d"]],
        [["a", "b", "c"], ["d"]],
        [["a", "b"], ["c"], ["d"]],
    ]


def test_devices_are_divided_by_the_work_of_each_bucket() -> None:
    given = case((model("a", 0.1), model("b", 0.3)), 8, skew=0.0)
    splits = device_splits(
        [given.models[:1], given.models[1:]],
        given.cluster,
        given.requests,
        spread=False,
        most_discrepancy=2.0,
        most_splits=5,
    )
    # "b" has three quarters of the work, and half of the weights.
    assert [len(devices) for devices in splits[0].devices] in ([3, 5], [2, 6])
    assert all(split.discrepancy <= 2.0 for split in splits)


def test_groups_stay_in_a_node_unless_they_may_span_nodes() -> None:
    cluster = case((model("a"),), 6, per_node=3).cluster
    of_nodes = blocks_of(range(6), cluster, span_nodes=False)
    assert of_nodes == [(0, 1, 2), (3, 4, 5)]
    assert blocks_of(range(6), cluster, span_nodes=True) == [(0, 1, 2, 3, 4, 5)]
    assert group_sizes(of_nodes, 8) == [1, 2, 3]
    groups = equal_groups(of_nodes, ParallelConfig(2))
    assert [group.devices for group in groups] == [(0, 1), (2,), (3, 4), (5,)]
    assert [group.config.stages for group in groups] == [2, 1, 2, 1]


def test_a_group_is_divided_in_every_way_that_the_limits_allow() -> None:
    configs = parallel_configs(8, most_stages=4, most_intra=4)
    assert configs == [ParallelConfig(4, 2), ParallelConfig(2, 4)]
