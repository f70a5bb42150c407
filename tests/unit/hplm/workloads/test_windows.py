"""Arrivals of windows have the recording's rate and burstiness, scaled."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.errors import ConfigError
from hplm.workloads.arrivals import GammaArrivals
from hplm.workloads.windows import Window, WindowedArrivals, fit_windows


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def cv(times: np.ndarray) -> float:
    gaps = np.diff(times)
    return float(gaps.std() / gaps.mean())


@given(st.integers(0, 99), st.floats(0.3, 40))
def test_windows_hold_every_arrival_of_the_recording(seed: int, window_s: float) -> None:
    times = GammaArrivals(5, 2).times(100, rng(seed))
    windows = fit_windows(times, 100, window_s)
    assert sum(window.width_s for window in windows) == pytest.approx(100)
    assert sum(window.rate_per_s * window.width_s for window in windows) == pytest.approx(len(times))


def test_a_fitted_window_has_the_rate_and_the_cv_of_its_arrivals() -> None:
    times = np.concatenate([GammaArrivals(50, 3).times(1000, rng()), 1000 + GammaArrivals(10, 1).times(1000, rng())])
    first, second = fit_windows(times, 2000, 1000)
    assert (first.rate_per_s, second.rate_per_s) == (pytest.approx(50, rel=0.1), pytest.approx(10, rel=0.1))
    assert (first.cv, second.cv) == (pytest.approx(3, rel=0.1), pytest.approx(1, rel=0.1))


def test_a_window_with_few_arrivals_counts_as_poisson() -> None:
    assert fit_windows(np.array([0.1, 0.2, 0.6]), 1, 1)[0].cv == 1


def test_the_scales_multiply_rate_and_cv_of_each_window() -> None:
    arrivals = WindowedArrivals((Window(2000, 5, 2), Window(2000, 50, 1)), rate_scale=2, cv_scale=1.5)
    times = arrivals.times(4000, rng())
    quiet, busy = times[times < 2000], times[times >= 2000]
    assert (len(quiet) / 2000, len(busy) / 2000) == (pytest.approx(10, rel=0.1), pytest.approx(100, rel=0.1))
    assert (cv(quiet), cv(busy)) == (pytest.approx(3, rel=0.1), pytest.approx(1.5, rel=0.1))
    assert arrivals.expected_count(4000) == 220_000


def test_after_the_last_window_the_first_follows_again() -> None:
    arrivals = WindowedArrivals((Window(10, 100, 1), Window(10, 0, 1)))
    times = arrivals.times(35, rng())
    assert ((times // 10) % 2 == 0).all()
    assert np.all(np.diff(times) >= 0)
    assert len(times) == pytest.approx(arrivals.expected_count(35), rel=0.1)


def test_no_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="windows of a recording were expected"):
        WindowedArrivals(())


def test_more_windows_than_a_simulation_can_step_through_are_refused() -> None:
    with pytest.raises(ConfigError, match="28,333,333 windows of 60 s, 1,000,000 were"):
        fit_windows(np.array([0.0, 1.7e9]), 1.7e9, 60.0)
    with pytest.raises(ConfigError, match=r"windows of 0\.001 s"):
        WindowedArrivals((Window(0.001, 5, 1),)).times(1e6, rng())
