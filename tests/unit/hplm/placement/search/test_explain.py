"""Replication alone, the fewest devices, and explanations of placements."""

from __future__ import annotations

import pytest

from hplm.errors import ConfigError
from hplm.placement.cluster import uniform_cluster
from hplm.placement.placement import ParallelConfig
from hplm.placement.search.enumeration import SearchOptions, selective_replication
from hplm.placement.search.explain import explain
from hplm.placement.search.fewest_devices import fewest_devices
from tests.unit.hplm.placement.search.cases import GB, case, model

FOUR = tuple(model(f"m{number}", gb=5) for number in range(4))


def test_selective_replication_has_no_pipelines() -> None:
    given = case(FOUR, 4)
    found = selective_replication(given.models, given.cluster, given.requests)
    assert {group.config for group in found.placement.groups} == {ParallelConfig()}


def test_the_fewest_devices_are_found_and_one_fewer_misses_the_target() -> None:
    given = case(FOUR, 4, load=0.5, cv=2)
    found = fewest_devices(
        given.models, lambda devices: uniform_cluster(devices, 13 * GB), given.requests, 0.95, most_devices=12
    )
    assert found.result.attainment >= 0.95
    fewer = [
        selective_replication(given.models, uniform_cluster(devices, 13 * GB), given.requests).attainment
        for devices in range(1, found.devices)
    ]
    assert all(share < 0.95 for share in fewer)


def test_a_target_that_the_most_devices_miss_is_refused() -> None:
    given = case(FOUR, 2, load=4.0)
    with pytest.raises(ConfigError, match="with 2 devices"):
        fewest_devices(given.models, lambda n: uniform_cluster(n, 13 * GB), given.requests, 0.99, most_devices=2)


def test_an_explanation_names_the_models_that_limit_and_what_a_change_brings() -> None:
    # "big" fits on no device; the others share two devices.
    given = case((*FOUR[:2], model("big", gb=50)), 2, load=0.4)
    found = selective_replication(given.models, given.cluster, given.requests)
    told = explain(found.placement, given.models, given.cluster, given.requests, SearchOptions(refined=0))
    assert "big" in told.limiting
    lines = told.lines()
    assert any("big is in no group" in line for line in lines)
    assert any(line.startswith("One more device on node node-1") for line in lines)
    looser = [change.attainment for change in told.changes if change.what.startswith("Deadlines")]
    assert told.attainment <= looser[0] <= looser[1]


def test_an_explanation_counts_the_requests_of_every_model() -> None:
    given = case(FOUR, 2, load=1.5)
    found = selective_replication(given.models, given.cluster, given.requests)
    told = explain(found.placement, given.models, given.cluster, given.requests, SearchOptions(refined=0))
    assert sum(one.requests for one in told.models) == len(given.requests)
    missed = sum(one.missed for one in told.models)
    assert missed == round((1 - told.attainment) * len(given.requests))
    assert all(
        str(change) in line for change, line in zip(told.changes, told.lines()[-len(told.changes) :], strict=True)
    )
