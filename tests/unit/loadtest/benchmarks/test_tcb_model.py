"""TCB's model of a server gives utilities computed by hand, and no policy exceeds its bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hplm_loadtest.benchmarks.papers.schedulers import goals_of
from hplm_loadtest.benchmarks.papers.tcb_model import TcbModel
from hplm_loadtest.workloads.lengths import NormalLengths

from hplm.scheduling.policy_loader import BUILT_IN, load_policy

MODEL = TcbModel(
    rows=4, row_tokens=100, variance=100.0, batch_s=0.2, overload=2.0, deadlines_s=(0.5, 3.0), requests=1_000
)


@pytest.mark.parametrize("row_tokens", [5, 50, 100])
@pytest.mark.parametrize("variance", [0.0, 20.0, 400.0])
@pytest.mark.parametrize(("overload", "batch_s"), [(1.5, 0.2), (4.0, 0.2), (0.3, 0.2), (2.0, 2.67), (2.0, 2.5)])
def test_no_policy_exceeds_the_bound(row_tokens: int, variance: float, overload: float, batch_s: float) -> None:
    model = replace(MODEL, row_tokens=row_tokens, variance=variance, overload=overload, batch_s=batch_s)
    found = {name: model.utility_per_s(load_policy(name, {})) for name in BUILT_IN}
    assert min(found.values()) > 0
    assert max(found.values()) <= model.most_per_s() * (1 + 1e-9)  # sums of the same numbers in another order


@pytest.mark.parametrize("variance", [0.0, 20.0, 100.0, 400.0])
def test_the_computed_mean_of_clipped_lengths_equals_the_mean_of_drawn_lengths(variance: float) -> None:
    lengths = NormalLengths(variance=variance)
    assert lengths.draw(200_000, np.random.default_rng(0)).mean() == pytest.approx(lengths.drawn_mean, rel=0.005)


def test_equal_lengths_are_worth_the_same_in_any_order() -> None:
    # Five texts of 20 tokens fill a row: 4 rows x 5 requests x 1/20 in 0.2 s are 5 per second.
    model = replace(MODEL, variance=0.0, requests=20_000)
    for name in ("fcfs", "sjf", "edf", "das"):
        assert model.utility_per_s(load_policy(name, {})) == pytest.approx(5.0, rel=0.1)
    assert model.most_per_s() == pytest.approx(5.0, rel=0.1)


def test_requests_that_no_batch_can_answer_in_time_have_no_utility() -> None:
    # A deadline shorter than a batch cannot be met.
    assert replace(MODEL, deadlines_s=(0.05, 0.1)).most_per_s() == 0
    assert replace(MODEL, requests=0).most_per_s() == 0


def test_shortest_first_comes_within_a_tenth_of_the_bound() -> None:
    model = replace(MODEL, deadlines_s=(2.0, 4.0), requests=20_000)
    assert model.utility_per_s(load_policy("sjf", {})) >= 0.9 * model.most_per_s()


def test_a_model_in_which_nothing_can_be_answered_still_gives_goals() -> None:
    setting = {"rows": 16, "row_tokens": 200, "length_variance": 100.0}
    rows = [{"policy": name, **setting, "utility_per_s": 1.0, "kept_up": 1.0, "lost": 0.0} for name in ("das", "sjf")]
    *_, goal = goals_of(rows, [{**setting, "das": 0.0, "sjf": 0.0, "no_policy_exceeds": 0.0}], [])
    assert goal.value == 1.0
