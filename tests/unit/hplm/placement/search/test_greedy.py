"""Algorithm 1 and its fast heuristic."""

from __future__ import annotations

from itertools import product

import pytest

from hplm.placement.placement import Group, ParallelConfig, Placement
from hplm.placement.search.greedy import beam_selection, fast_selection
from hplm.placement.search.partitions import equal_groups
from hplm.placement.search.refinement import refined
from hplm.placement.search.scores import Score, Simulator, score_of
from hplm.placement.search.selection import Groups, Problem
from hplm.placement.stage_times import StageTimes
from tests.unit.hplm.placement.search.cases import Case, case, model

THREE = (model("a"), model("b"), model("c", gb=7))


def groups_of(given: Case, config: ParallelConfig, required_nodes: int = 0) -> tuple[Groups, Simulator]:
    times = StageTimes(given.cluster, given.models)
    problem = Problem(given.models, given.cluster, times, given.requests, required_nodes)
    groups = Groups(problem, equal_groups([range(given.cluster.devices)], config))
    return groups, Simulator(times, given.requests)


def best_of_all(groups: Groups, simulator: Simulator) -> Score:
    """Return the best score of every way to put models into groups."""
    pairs = list(product(groups.problem.names, range(len(groups.groups))))
    scores = []
    for chosen in product((False, True), repeat=len(pairs)):
        placement = Placement.empty(groups.groups)
        for (name, group), put in zip(pairs, chosen, strict=True):
            placement = placement.with_model(name, group) if put else placement
        if simulator.stage_times.fits(placement):
            scores.append(score_of(simulator.run(placement)))
    return max(scores)


@pytest.mark.parametrize("config", [ParallelConfig(1), ParallelConfig(2)])
@pytest.mark.parametrize("seed", range(5))
def test_a_wide_beam_finds_what_exhaustive_search_finds(config: ParallelConfig, seed: int) -> None:
    groups, simulator = groups_of(case(THREE, 2 * config.devices, load=0.8, seed=seed), config)
    found = beam_selection(groups, simulator, beam=64)
    assert found.score.attainment == best_of_all(groups, simulator).attainment


@pytest.mark.parametrize("seed", range(5))
def test_the_refined_heuristic_comes_near_exhaustive_search(seed: int) -> None:
    groups, simulator = groups_of(case(THREE, 2, load=0.8, seed=seed), ParallelConfig(1))
    found = refined(groups, simulator, fast_selection(groups, simulator), 100)
    assert found.score.attainment >= 0.98 * best_of_all(groups, simulator).attainment


def test_the_heuristic_simulates_once_for_each_model_that_it_adds() -> None:
    groups, simulator = groups_of(case(THREE, 4, load=2.0), ParallelConfig(2))
    found = fast_selection(groups, simulator)
    copies = sum(len(names) for names in found.placement.models)
    assert copies <= simulator.simulations <= 1 + len(THREE) * len(groups.groups)


@pytest.mark.parametrize("select", [beam_selection, fast_selection])
def test_nothing_more_is_added_when_every_request_is_in_time(select: object) -> None:
    groups, simulator = groups_of(case(THREE[:1], 4, load=0.01, cv=0.1), ParallelConfig(1))
    found = select(groups, simulator)  # type: ignore[operator]
    assert (found.score.attainment, sum(len(names) for names in found.placement.models)) == (1.0, 1)


def test_a_model_that_misses_every_deadline_is_not_placed() -> None:
    given = case((model("fast", 0.1), model("slow", 0.4)), 2)
    groups, simulator = groups_of(
        Case(given.models, given.cluster, given.requests.with_deadlines({"fast": 1, "slow": 0.3})), ParallelConfig(1)
    )
    assert not any("slow" in names for names in fast_selection(groups, simulator).placement.models)


def test_memory_is_counted_on_the_fullest_device_of_a_stage() -> None:
    given = case((model("a", gb=8), model("b", gb=8)), 2)
    times = StageTimes(given.cluster, given.models)
    problem = Problem(given.models, given.cluster, times, given.requests)
    single = Groups(problem, [Group((0,), ParallelConfig())])
    with_a = single.assign(single.empty(), "a", 0)
    assert not single.can_assign(with_a, "b", 0)
    assert single.release(with_a, "a", 0) == single.empty()
    pair = Groups(problem, [Group((0, 1), ParallelConfig(2))])
    assert pair.can_assign(pair.assign(pair.empty(), "a", 0), "b", 0)


def test_required_copies_are_placed_before_anything_is_replicated() -> None:
    # "a" has nearly all requests; the two devices have room for one more model each.
    given = case((model("a", gb=6), model("b", gb=6), model("c", gb=6)), 2, load=1.5, skew=4.0)
    groups, simulator = groups_of(given, ParallelConfig(1), required_nodes=1)
    found = fast_selection(groups, simulator)
    assert all(found.placement.groups_of(name) for name in "abc")
    assert found.score.copies == 3


def test_models_that_fit_only_when_packed_are_packed() -> None:
    # Devices of 12: the idlest group first would put 4 and 4 on different devices, and 8 nowhere.
    given = case((model("a", gb=4), model("b", gb=4), model("c", gb=8), model("d", gb=8)), 2, device_gb=12, skew=1.0)
    groups, simulator = groups_of(given, ParallelConfig(1), required_nodes=1)
    assert fast_selection(groups, simulator).score.copies == 4


@pytest.mark.parametrize("config", [ParallelConfig(1), ParallelConfig(2)])
@pytest.mark.parametrize("load", [0.3, 1.0, 4.0])
def test_no_placement_serves_more_than_the_bound(config: ParallelConfig, load: float) -> None:
    groups, simulator = groups_of(case(THREE, 4, load=load), config)
    assert fast_selection(groups, simulator).score.attainment <= groups.most_served() + 1e-9
