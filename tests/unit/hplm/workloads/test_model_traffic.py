"""Requests to several models have the rates, shares and deadlines asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hplm.errors import ConfigError, DataError
from hplm.workloads.arrivals import GammaArrivals, MmppArrivals, PoissonArrivals
from hplm.workloads.deadlines import DeadlineClasses
from hplm.workloads.model_traffic import gamma_requests, requests_of, resampled, split_requests, trace_requests
from hplm.workloads.popularity import power_law, random_split, round_robin_split
from hplm.workloads.traces import read_trace


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_each_model_has_arrivals_of_its_own() -> None:
    requests = requests_of(
        {"quick": PoissonArrivals(100), "slow": GammaArrivals(10, 4)}, {"quick": 0.1, "slow": 2.0}, 500, rng()
    )
    assert requests.rates()["quick"] == pytest.approx(100, rel=0.05)
    assert requests.rates()["slow"] == pytest.approx(10, rel=0.3)
    assert set(requests.deadlines_s[requests.models == 0]) == {0.1}
    assert set(requests.deadlines_s[requests.models == 1]) == {2.0}


def test_a_model_of_rate_0_gets_no_request() -> None:
    requests = gamma_requests({"a": 5, "cold": 0, "b": 5}, 1, {"a": 1, "b": 2}, 100, rng())
    assert requests.names == ("a", "cold", "b")
    assert requests.rates()["cold"] == 0
    assert set(requests.deadlines_s[requests.models == 2]) == {2}


def test_requests_of_a_common_process_are_divided_by_shares() -> None:
    requests = split_requests(PoissonArrivals(100), power_law("abcd", 0.5), dict.fromkeys("abcd", 1.0), 1000, rng())
    rates = requests.rates()
    assert rates["a"] / rates["d"] == pytest.approx(2, rel=0.05)


def test_deadline_classes_give_each_request_a_deadline() -> None:
    classes = DeadlineClasses({"interactive": (0.1, 0.7), "batch": (2.0, 0.3)})
    requests = split_requests(PoissonArrivals(100), {"a": 1.0}, classes, 100, rng())
    assert (requests.deadlines_s == 0.1).mean() == pytest.approx(0.7, abs=0.02)


def test_a_model_without_a_deadline_is_refused() -> None:
    with pytest.raises(ConfigError, match="got none for b"):
        split_requests(PoissonArrivals(10), {"a": 0.5, "b": 0.5}, {"a": 1.0}, 10, rng())


def test_power_law_shares_add_up_to_one() -> None:
    shares = power_law("abc", 1.0)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["a"] == pytest.approx(3 * shares["c"])
    assert list(power_law("abc", 0).values()) == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("shares", [{}, {"a": 0.0}, {"a": -1.0, "b": 2.0}, {"a": float("nan")}])
def test_shares_that_cannot_be_drawn_from_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="shares of 0 or more"):
        random_split(shares, 3, rng())


def test_round_robin_goes_through_the_models() -> None:
    assert round_robin_split(3, 7).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_a_traces_requests_go_to_models_one_after_another_or_by_shares(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP\n3\n1\n2\n5\n")
    requests = trace_requests(read_trace(path), ("a", "b"), {"a": 1, "b": 2}, rng())
    assert requests.times_s.tolist() == [0, 1, 2, 4]
    assert requests.models.tolist() == [0, 1, 0, 1]
    assert requests.deadlines_s.tolist() == [1, 2, 1, 2]
    assert requests.duration_s == pytest.approx(16 / 3)
    only_b = trace_requests(read_trace(path), ("a", "b"), {"a": 1, "b": 2}, rng(), {"a": 0, "b": 1})
    assert only_b.models.tolist() == [1, 1, 1, 1]


def test_a_trace_with_a_malformed_line_is_refused_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP\n1\nnoon\n")
    with pytest.raises(DataError, match=r"trace\.csv, line 3: 'noon' is no time"):
        read_trace(path)


def test_resampled_requests_follow_each_models_windows() -> None:
    recorded = requests_of({"a": GammaArrivals(20, 3), "b": PoissonArrivals(5)}, {"a": 1.0, "b": 1.0}, 2000, rng())
    new = resampled(recorded, 500, {"a": 2.0, "b": 2.0}, rng(1), rate_scale=3)
    before, after = recorded.rates(), new.rates()
    assert after["a"] == pytest.approx(3 * before["a"], rel=0.15)
    assert after["b"] == pytest.approx(3 * before["b"], rel=0.1)
    assert set(new.deadlines_s) == {2.0}


def test_mmpp_arrivals_jump_between_their_rates() -> None:
    arrivals = MmppArrivals((0, 100), (30, 10))
    times = arrivals.times(20_000, rng())
    assert len(times) == pytest.approx(arrivals.expected_count(20_000), rel=0.1)
    assert arrivals.expected_count(20_000) == 500_000
    counts = np.bincount(times.astype(int), minlength=20_000)
    assert (counts == 0).mean() == pytest.approx(0.75, abs=0.05)


@pytest.mark.parametrize(("rates", "stays"), [((1,), (1,)), ((1, 2), (1,)), ((0, 0), (1, 1)), ((1, 2), (1, 0))])
def test_mmpp_arrivals_without_rates_or_stays_are_refused(rates: tuple[float, ...], stays: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError):
        MmppArrivals(rates, stays)
