"""The compiled simulator answers every request as its slow twin does."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.errors import ConfigError
from hplm.placement.cluster import uniform_cluster
from hplm.placement.outcomes import REFUSED, Outcomes
from hplm.placement.placement import Group, ParallelConfig, Placement
from hplm.placement.reference_simulation import simulate_by_events
from hplm.placement.served_model import IntraCost, ServedModel
from hplm.placement.simulation import simulate
from hplm.placement.stage_times import StageTimes
from hplm.workloads.model_requests import ModelRequests

GIB = 2**30


def model(name: str, *layer_s: float, **rest: float) -> ServedModel:
    return ServedModel(name, layer_s, (GIB,) * len(layer_s), intra=IntraCost(0.1), **rest)  # type: ignore[arg-type]


def requests(*arrivals: tuple[float, str, float], names: tuple[str, ...] = ("a", "b")) -> ModelRequests:
    """Return requests from their times, models and deadlines."""
    times, models, deadlines = zip(*arrivals, strict=True)
    numbers = np.array([names.index(name) for name in models], np.int32)
    return ModelRequests(names, np.array(times, np.float64), numbers, np.array(deadlines, np.float64), 10.0)


def group(first: int, stages: int, intra: int = 1) -> Group:
    config = ParallelConfig(stages, intra)
    return Group(tuple(range(first, first + config.devices)), config)


def assert_equal(fast: Outcomes, slow: Outcomes) -> None:
    np.testing.assert_array_equal(fast.groups, slow.groups)
    np.testing.assert_array_equal(fast.ended_s, slow.ended_s)
    np.testing.assert_allclose(fast.busy_s, slow.busy_s, rtol=1e-12)


# Few different times, so that requests often come just when a stage ends.
SECONDS = st.sampled_from([0.25, 0.5, 0.75, 1.0]) | st.floats(0.01, 2)
CONFIGS = st.sampled_from([ParallelConfig(1), ParallelConfig(2), ParallelConfig(3), ParallelConfig(2, 2)])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Placement, StageTimes, ModelRequests]:
    names = tuple("abc"[: draw(st.integers(1, 3))])
    models = [
        model(name, *draw(st.lists(SECONDS, min_size=3, max_size=4)), hop_s=draw(st.sampled_from([0.0, 0.25, 0.01])))
        for name in names
    ]
    groups, first = [], 0
    for config in draw(st.lists(CONFIGS, min_size=1, max_size=3)):
        groups.append(group(first, config.stages, config.intra))
        first += config.devices
    held = tuple(tuple(sorted(draw(st.sets(st.sampled_from(names))))) for _ in groups)
    gaps = draw(st.lists(st.sampled_from([0.0, 0.25, 0.5]) | st.floats(0, 1), min_size=1, max_size=40))
    count = len(gaps)
    traffic = ModelRequests(
        names,
        np.cumsum(gaps),
        np.array(draw(st.lists(st.integers(0, len(names) - 1), min_size=count, max_size=count)), np.int32),
        np.array(draw(st.lists(st.sampled_from([1.0, 3.0, 10.0, np.inf]), min_size=count, max_size=count))),
        100.0,
    )
    return Placement(tuple(groups), held), StageTimes(uniform_cluster(first, 100 * GIB), models), traffic


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_request_ends_as_in_the_slow_twin(case: tuple[Placement, StageTimes, ModelRequests]) -> None:
    assert_equal(simulate(*case), simulate_by_events(*case))


def test_a_pipeline_overlaps_requests() -> None:
    times = StageTimes(uniform_cluster(2, GIB), [model("a", 1.0, 1.0)])
    outcomes = simulate(Placement((group(0, 2),), (("a",),)), times, requests((0, "a", 9), (0, "a", 9), (0, "a", 9)))
    assert outcomes.ended_s.tolist() == [2, 3, 4]
    assert outcomes.busy_s.tolist() == [3, 3]


def test_a_request_goes_to_the_group_with_the_shortest_queue() -> None:
    times = StageTimes(uniform_cluster(2, 9 * GIB), [model("a", 1.0)])
    placement = Placement((group(0, 1), group(1, 1)), (("a",), ("a",)))
    outcomes = simulate(placement, times, requests(*[(0, "a", 9)] * 5))
    assert outcomes.groups.tolist() == [0, 1, 0, 1, 0]


def test_a_request_that_would_be_late_is_refused_and_takes_no_time() -> None:
    times = StageTimes(uniform_cluster(1, GIB), [model("a", 1.0)])
    outcomes = simulate(
        Placement((group(0, 1),), (("a",),)), times, requests((0, "a", 1), (0, "a", 1.5), (0.5, "a", 1.5))
    )
    assert outcomes.groups.tolist() == [0, REFUSED, 0]
    assert outcomes.ended_s.tolist()[::2] == [1, 2]
    assert outcomes.attainment == pytest.approx(2 / 3)


def test_a_model_that_no_group_holds_is_refused() -> None:
    times = StageTimes(uniform_cluster(1, GIB), [model("a", 1.0), model("b", 1.0)])
    outcomes = simulate(Placement((group(0, 1),), (("a",),)), times, requests((0, "b", 9)))
    assert outcomes.groups.tolist() == [REFUSED]


def test_a_group_that_cannot_divide_its_model_is_refused() -> None:
    times = StageTimes(uniform_cluster(2, GIB), [model("a", 1.0)])
    with pytest.raises(ConfigError, match=r"group 0 of configuration \(2, 1\) cannot divide the model a"):
        simulate(Placement((group(0, 2),), (("a",),)), times, requests((0, "a", 9)))


def test_without_numba_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hplm.placement.compiled_simulation", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    times = StageTimes(uniform_cluster(1, GIB), [model("a", 1.0)])
    with pytest.raises(ConfigError, match=r"pip install 'hplm\[place\]'"):
        simulate(Placement((group(0, 1),), (("a",),)), times, requests((0, "a", 9)))
