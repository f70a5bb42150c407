"""Stages have the seconds and bytes of their layers, their sending and their devices."""

from __future__ import annotations

import pytest

from hplm.errors import ConfigError
from hplm.placement.cluster import Cluster, Node, uniform_cluster
from hplm.placement.placement import Group, ParallelConfig, Placement
from hplm.placement.served_model import IntraCost, ServedModel
from hplm.placement.stage_times import StageTimes

MODEL = ServedModel(
    "a", (1.0, 1.0, 2.0), (10, 11, 20), fixed_bytes=3, boundary_bytes=50, hop_s=0.1, intra=IntraCost(0.2)
)


def times(device_bytes: int = 100) -> StageTimes:
    return StageTimes(uniform_cluster(4, device_bytes, bytes_per_s=500), [MODEL])


def test_every_stage_but_the_last_sends() -> None:
    assert times().of(MODEL, ParallelConfig(1)) == (4.0,)
    assert times().of(MODEL, ParallelConfig(2)) == pytest.approx((2.2, 2.0))
    assert times().cut_of("a", ParallelConfig(2)) == (2, 1)


def test_a_layer_on_two_devices_takes_half_the_time_and_the_communication() -> None:
    assert times().of("a", ParallelConfig(1, 2)) == pytest.approx((4 / 2 + 0.2 * 4 / 2,))
    assert times().latency_s("a", ParallelConfig(2, 2)) == pytest.approx(2.4 + 0.2)


def test_a_device_holds_its_part_of_the_weights_and_the_fixed_bytes() -> None:
    assert times().bytes_of("a", ParallelConfig(2)) == (24, 23)
    assert times().bytes_of("a", ParallelConfig(2, 2)) == (14, 13)


def test_a_config_that_a_model_cannot_have_has_no_times() -> None:
    plain = ServedModel("b", (1.0,), (1,))
    stage_times = StageTimes(uniform_cluster(4, 100), [plain])
    for config in (ParallelConfig(2), ParallelConfig(1, 2)):
        assert stage_times.of("b", config) is None
        assert stage_times.bytes_of("b", config) is None
        assert stage_times.latency_s("b", config) is None


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of the models a was expected, got 'c'"):
        times().of("c", ParallelConfig(1))


def test_a_placement_fits_if_every_device_has_the_memory() -> None:
    group = Group((0, 1), ParallelConfig(2))
    placement = Placement((group,), (("a",),))
    assert times(24).fits(placement)
    assert not times(23).fits(placement)
    assert not times().fits(Placement((Group((0, 1, 2, 3), ParallelConfig(4)),), (("a",),)))


def test_each_device_counts_with_its_own_memory() -> None:
    cluster = Cluster((Node("large", 1, 24), Node("small", 1, 23)))
    stage_times = StageTimes(cluster, [MODEL])
    assert stage_times.fits(Placement((Group((0, 1), ParallelConfig(2)),), (("a",),)))
    assert not stage_times.fits(Placement((Group((1, 0), ParallelConfig(2)),), (("a",),)))
