"""The formulas of queueing theory agree with each other and with the simulator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.errors import ConfigError
from hplm.placement.cluster import uniform_cluster
from hplm.placement.placement import Group, ParallelConfig, Placement
from hplm.placement.queueing import (
    largest_communication_overhead,
    largest_uneven_overhead,
    pipeline_latency_s,
    simple_latency_s,
    wait_s,
)
from hplm.placement.served_model import ServedModel
from hplm.placement.simulation import simulate
from hplm.placement.stage_times import StageTimes
from hplm.workloads.arrivals import PoissonArrivals
from hplm.workloads.model_traffic import split_requests

NAMES = ("a", "b")
SIMPLE = Placement((Group((0,), ParallelConfig(1)), Group((1,), ParallelConfig(1))), (("a",), ("b",)))
PIPELINE = Placement((Group((0, 1), ParallelConfig(2)),), (NAMES,))


def simulated_latency_s(placement: Placement, rate_per_s: float, share: float, *layer_s: float) -> float:
    times = StageTimes(uniform_cluster(2, 1), [ServedModel(name, layer_s, (0, 0)) for name in NAMES])
    requests = split_requests(
        PoissonArrivals(rate_per_s),
        {"a": share, "b": 1 - share},
        dict.fromkeys(NAMES, np.inf),
        2_000_000 / rate_per_s,
        np.random.default_rng(0),
    )
    return float(simulate(placement, times, requests).latencies_s.mean())


@pytest.mark.parametrize(("rate_per_s", "share"), [(1.0, 0.5), (3.0, 0.5), (2.0, 0.2)])
def test_the_simulator_equals_the_formulas_within_one_percent(rate_per_s: float, share: float) -> None:
    simple = simulated_latency_s(SIMPLE, rate_per_s, share, 0.2, 0.2)
    assert simple == pytest.approx(simple_latency_s(rate_per_s, 0.4, share), rel=0.01)
    pipeline = simulated_latency_s(PIPELINE, rate_per_s, share, 0.22, 0.2)
    assert pipeline == pytest.approx(pipeline_latency_s(rate_per_s, 0.42, 0.22), rel=0.01)


def test_an_even_pipeline_halves_the_wait_of_an_even_split() -> None:
    simple, pipeline = simple_latency_s(3.0, 0.4), pipeline_latency_s(3.0, 0.4, 0.2)
    assert pipeline - 0.4 == pytest.approx((simple - 0.4) / 2)


@given(st.floats(0.001, 1.98))
def test_at_the_largest_overheads_both_placements_are_as_quick(utilisation: float) -> None:
    alpha, beta = largest_communication_overhead(utilisation), largest_uneven_overhead(utilisation)
    assert 1 <= alpha <= beta
    simple = simple_latency_s(utilisation, 1.0)
    assert pipeline_latency_s(utilisation, alpha, alpha / 2) == pytest.approx(simple)
    assert pipeline_latency_s(utilisation, 1.0, beta / 2) == pytest.approx(simple)


@pytest.mark.parametrize("call", [lambda: wait_s(2.0, 0.5), lambda: simple_latency_s(4.0, 0.5)])
def test_a_queue_that_grows_for_ever_is_refused(call: object) -> None:
    with pytest.raises(ConfigError, match="a utilisation from 0 to below 1 was expected, got 1"):
        call()  # type: ignore[operator]


@pytest.mark.parametrize("utilisation", [0.0, 2.0])
def test_overheads_need_a_utilisation_of_two_devices(utilisation: float) -> None:
    for overhead in (largest_communication_overhead, largest_uneven_overhead):
        with pytest.raises(ConfigError, match="above 0 and below 2"):
            overhead(utilisation)
