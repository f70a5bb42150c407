"""Sweeps of simulated placements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from hplm_loadtest.benchmarks.placement import search_time
from hplm_loadtest.benchmarks.placement.effort import Effort
from hplm_loadtest.benchmarks.placement.sweep import POLICIES, WINDOW_S, Traffic, clockwork, placement_sweep

from hplm.placement.cluster import uniform_cluster
from hplm.placement.search.enumeration import SearchOptions
from hplm.placement.stage_times import StageTimes
from hplm.workloads.model_requests import ModelRequests
from tests.unit.hplm.placement.search.cases import GB, model


def test_a_sweep_has_a_row_for_each_value_and_policy_and_a_picture(tmp_path: Path) -> None:
    traffic = Traffic("S1", rate=20.0, seconds=30.0)
    picture = tmp_path / "sweep.svg"
    report = placement_sweep(
        traffic, 16, "deadline", [5.0, 2.0], list(POLICIES), effort=Effort(quick=True), picture=picture
    )
    assert [(row["deadline"], row["policy"]) for row in report.rows] == [
        (value, name) for value in (2.0, 5.0) for name in POLICIES
    ]
    by = {(row["deadline"], row["policy"]): row["in_time"] for row in report.rows}
    assert all(0 <= share <= 1 for share in by.values())
    # A looser deadline is never worse, and the whole search is no worse than its parts.
    assert all(by[2.0, name] <= by[5.0, name] for name in POLICIES)
    assert by[5.0, "search"] >= max(by[5.0, "replication"], by[5.0, "pipelines"]) - 0.01
    assert picture.stat().st_size > 1000


def test_a_placement_for_other_requests_attains_no_more_than_one_for_the_own() -> None:
    traffic = Traffic("S1", rate=30.0, seconds=30.0)
    own, other = (
        placement_sweep(traffic, 12, "cv", [4.0], ["replication"], changed=changed, effort=Effort(quick=True)).rows[0]
        for changed in (False, True)
    )
    assert other["requests"] == own["requests"]
    assert other["in_time"] <= own["in_time"]


def test_clockwork_swaps_models_at_windows_and_replication_cannot() -> None:
    models, cluster = tuple(model(f"m{number}", gb=5) for number in range(2)), uniform_cluster(1, 6 * GB)
    times_s = np.arange(0.0, 4 * WINDOW_S, 0.2)
    numbers = (times_s // WINDOW_S % 2).astype(np.int32)
    requests = ModelRequests(("m0", "m1"), times_s, numbers, np.full(len(times_s), 0.3), 4 * WINDOW_S)
    times, options = StageTimes(cluster, models), SearchOptions()
    assert clockwork(models, times, requests, requests, options).attainment == 1.0
    assert POLICIES["replication"](models, times, requests, requests, options).attainment == 0.5


def test_another_ranking_makes_other_models_popular() -> None:
    first = Traffic("S2", rate=40.0, cv=1.0, seconds=200.0)
    rates = [replace(first, ranking=ranking).requests(Effort().rng()).rates() for ranking in (0, 1)]
    assert max(rates[0], key=lambda name: rates[0][name]) != max(rates[1], key=lambda name: rates[1][name])


def test_the_fast_search_is_compared_with_the_full_search_on_problems_drawn_from_a_seed() -> None:
    first, again, other = (search_time.random_problem(np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert first[:2] == again[:2]
    assert first[2].times_s.tolist() == again[2].times_s.tolist()
    assert first[:2] != other[:2]
    assert search_time.share_of_full(3) >= search_time.LEAST_SHARE
