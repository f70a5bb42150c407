"""The figures of AlpaServe that take seconds, and the values that are read off curves."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import numpy as np
import pytest
from hplm_loadtest.benchmarks.placement import search_time, two_models
from hplm_loadtest.benchmarks.placement.figure import Effort, crossing, first_reaching
from hplm_loadtest.benchmarks.placement.placement import FIGURES, placement
from hplm_loadtest.benchmarks.placement.systems import Traffic

from hplm.errors import ConfigError
from hplm.placement.served_model import ServedModel
from hplm.placement.stage_times import StageTimes
from hplm.placement.table1 import table1_cluster

CHEAP = ("2", "4", "5", "6", "7", "8", "9", "10", "16")


@pytest.mark.parametrize("name", CHEAP)
def test_a_cheap_figure_has_the_shape_of_the_papers_figure(name: str) -> None:
    module, function = FIGURES[name]
    result = getattr(importlib.import_module(f"hplm_loadtest.benchmarks.placement.{module}"), function)(
        Effort(quick=name == "10")
    )
    assert [said.paper for said in result.statements if not said.holds] == []
    assert result.figure == name


def test_busy_devices_of_a_burst_are_those_counted_by_hand() -> None:
    # A request takes a second on one device, or half a second on each of two.
    times = StageTimes(table1_cluster(2), [ServedModel(name, (0.5, 0.5), (1, 1)) for name in two_models.NAMES])
    ended_s, edges = np.array([1.0, 1.5, 2.0]), np.linspace(0.0, 2.5, 6)
    in_one_group = two_models.busy_devices(two_models.PIPELINE, times, np.zeros(3, np.int32), ended_s, edges)
    assert in_one_group.tolist() == [1, 2, 2, 1, 0]
    in_two = two_models.busy_devices(two_models.SIMPLE, times, np.array([0, 1, 0], np.int32), ended_s, edges)
    assert in_two.tolist() == [1, 2, 2, 1, 0]


def test_the_fast_search_is_compared_with_the_full_search_on_problems_drawn_from_a_seed() -> None:
    first, again, other = (search_time.random_problem(np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert first[:2] == again[:2]
    assert first[2].times_s.tolist() == again[2].times_s.tolist()
    assert first[:2] != other[:2]
    assert search_time.share_of_full(3) >= search_time.LEAST_SHARE


def test_every_figure_has_a_function() -> None:
    for module, function in FIGURES.values():
        assert callable(getattr(importlib.import_module(f"hplm_loadtest.benchmarks.placement.{module}"), function))


def test_an_unknown_figure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--figure: one of .* was expected, got '3'"):
        placement(["3"], quick=True, trace=None, pictures=None, models=tmp_path)


def test_a_figure_is_drawn_and_its_statements_are_rows(tmp_path: Path) -> None:
    report = placement(["9"], quick=True, trace=None, pictures=tmp_path, models=tmp_path)
    assert (tmp_path / "figure-9.svg").stat().st_size > 1000
    assert sum("shape holds" in row for row in report.rows) == 3


def test_a_falling_curve_crosses_the_target_between_two_points() -> None:
    assert crossing([1, 2, 3], [1.0, 1.0, 0.98], 0.99) == pytest.approx(2.5)
    assert crossing([1, 2], [0.5, 0.4], 0.99) is None
    assert crossing([1, 2], [1.0, 1.0], 0.99) == 2


def test_a_rising_curve_reaches_the_target_between_two_points() -> None:
    assert first_reaching([1, 2, 3], [0.9, 0.98, 1.0], 0.99) == pytest.approx(2.5)
    assert first_reaching([1, 2], [0.5, 0.6], 0.99) is None


def test_a_quick_look_takes_three_points_of_a_curve() -> None:
    assert Effort(quick=True).points([1, 2, 3, 4, 5, 6]) == [1, 4, 6]
    assert Effort().points([1, 2, 3, 4, 5, 6]) == [1, 2, 3, 4, 5, 6]


def test_another_ranking_makes_other_models_popular() -> None:
    first = Traffic("S2", "gamma", 40.0, 1.0, 5.0, 200.0)
    rates = [dataclasses.replace(first, ranking=ranking).requests(Effort().rng()).rates() for ranking in (0, 1)]
    assert max(rates[0], key=lambda name: rates[0][name]) != max(rates[1], key=lambda name: rates[1][name])
