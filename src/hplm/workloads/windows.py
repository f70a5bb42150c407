"""Fits recorded arrivals window by window and draws new ones at another rate or burstiness (Clockwork; AlpaServe 6.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hplm.errors import ConfigError
from hplm.reporting.benchmark_result import plain
from hplm.workloads.arrivals import GammaArrivals, require_positive
from hplm.workloads.traces import Seconds

# Gaps that a window needs before its cv is computed. With fewer gaps the window counts as Poisson (cv 1).
_LEAST_GAPS = 3
# The least cv of a fitted window. Exactly equal gaps have a cv of 0, which no Gamma distribution has.
_LEAST_CV = 0.01
# Windows at most of a recording and of a run: each takes microseconds and a hundred bytes, so that a million take seconds.
MOST_WINDOWS = 1_000_000


@dataclass(frozen=True)
class Window:
    """A stretch of `width_s` seconds of a recording: its requests a second, and the coefficient of variation of the gaps."""

    width_s: float
    rate_per_s: float
    cv: float


def fit_windows(times_s: Seconds, duration_s: float, window_s: float) -> tuple[Window, ...]:
    """Return the windows of arrivals at `times_s` (rising, from 0 to `duration_s`). The last window may be shorter."""
    require_positive(duration_s=duration_s, window_s=window_s)
    _check_count(duration_s, window_s)
    # A remainder of less than a millionth of a window comes from rounding and is no window.
    starts = np.arange(0.0, duration_s - 1e-6 * window_s, window_s)
    ends = np.minimum(starts + window_s, duration_s)
    windows = []
    for start_s, end_s in zip(starts.tolist(), ends.tolist(), strict=True):
        inside = times_s[np.searchsorted(times_s, start_s) : np.searchsorted(times_s, end_s)]
        windows.append(Window(end_s - start_s, len(inside) / (end_s - start_s), _cv(inside)))
    return tuple(windows)


def _check_count(duration_s: float, window_s: float) -> None:
    if duration_s / window_s > MOST_WINDOWS:
        raise ConfigError(
            f"{plain(duration_s)} s have {duration_s / window_s:,.0f} windows of {plain(window_s)} s, {MOST_WINDOWS:,} were "
            "expected at most: make the windows longer, the duration shorter, or remove stray time stamps from the trace"
        )


def _cv(times_s: Seconds) -> float:
    gaps = np.diff(times_s)
    if len(gaps) < _LEAST_GAPS or gaps.mean() == 0:
        return 1.0
    return max(_LEAST_CV, float(gaps.std() / gaps.mean()))


@dataclass(frozen=True)
class WindowedArrivals:
    """Arrivals drawn anew in each window of a recording: a Gamma process with the window's rate and cv, both scaled.

    After the last window the first follows again.
    """

    windows: Sequence[Window]
    rate_scale: float = 1.0
    cv_scale: float = 1.0

    def __post_init__(self) -> None:
        require_positive(rate_scale=self.rate_scale, cv_scale=self.cv_scale)
        if not self.windows:
            raise ConfigError("windows of a recording were expected, got none")

    def __str__(self) -> str:
        recorded_s = sum(window.width_s for window in self.windows)
        rate = self.expected_count(recorded_s) / recorded_s
        return (
            f"{plain(rate)} requests/s on average, drawn anew in each of {len(self.windows)} windows of a recording, "
            f"its rate times {self.rate_scale:g} and its cv times {self.cv_scale:g}"
        )

    def expected_count(self, duration_s: float) -> float:
        return sum(width_s * window.rate_per_s * self.rate_scale for _, width_s, window in self._laid_out(duration_s))

    def times(self, duration_s: float, rng: np.random.Generator) -> Seconds:
        drawn = [np.empty(0)]
        for start_s, width_s, window in self._laid_out(duration_s):
            if window.rate_per_s:
                arrivals = GammaArrivals(window.rate_per_s * self.rate_scale, window.cv * self.cv_scale)
                drawn.append(start_s + arrivals.times(width_s, rng))
        times_s = np.concatenate(drawn)
        return times_s[times_s < duration_s]

    def _laid_out(self, duration_s: float) -> list[tuple[float, float, Window]]:
        """Return the start and the width of each window in a run, and the window."""
        _check_count(duration_s, sum(window.width_s for window in self.windows) / len(self.windows))
        laid_out, start_s, number = [], 0.0, 0
        while start_s < duration_s:
            window = self.windows[number % len(self.windows)]
            laid_out.append((start_s, min(window.width_s, duration_s - start_s), window))
            start_s += window.width_s
            number += 1
        return laid_out
