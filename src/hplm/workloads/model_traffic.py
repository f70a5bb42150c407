"""Draws requests to several models, each with a process of its own or divided from a common process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hplm.errors import ConfigError
from hplm.workloads.arrivals import Arrivals, GammaArrivals, require_positive
from hplm.workloads.deadlines import DeadlineClasses
from hplm.workloads.model_requests import ModelRequests
from hplm.workloads.popularity import random_split, round_robin_split
from hplm.workloads.traces import Seconds
from hplm.workloads.windows import WindowedArrivals, fit_windows

# The deadline of each model in seconds from the arrival, or classes of which each request has a random one.
Deadlines: TypeAlias = "Mapping[str, float] | DeadlineClasses"


def requests_of(
    arrivals: Mapping[str, Arrivals], deadlines: Deadlines, duration_s: float, rng: np.random.Generator
) -> ModelRequests:
    """Draw the requests to models whose arrivals are independent of each other."""
    require_positive(duration_s=duration_s)
    times = [process.times(duration_s, rng) for process in arrivals.values()]
    models = [np.full(len(own), number, np.int32) for number, own in enumerate(times)]
    together, numbers = np.concatenate([np.empty(0), *times]), np.concatenate([np.empty(0, np.int32), *models])
    order = np.argsort(together, kind="stable")
    return _with_deadlines(tuple(arrivals), together[order], numbers[order], deadlines, duration_s, rng)


def gamma_requests(
    rates: Mapping[str, float], cv: float, deadlines: Deadlines, duration_s: float, rng: np.random.Generator
) -> ModelRequests:
    """Draw the requests to models with independent Gamma processes of `rates` requests a second; cv 1 is Poisson.

    A model of rate 0 gets no request.
    """
    drawn = requests_of(
        {name: GammaArrivals(rate, cv) for name, rate in rates.items() if rate}, deadlines, duration_s, rng
    )
    names = tuple(rates)
    numbers = np.array([names.index(name) for name in drawn.names], np.int32)
    return ModelRequests(names, drawn.times_s, numbers[drawn.models], drawn.deadlines_s, duration_s)


def split_requests(
    arrivals: Arrivals,
    shares: Mapping[str, float],
    deadlines: Deadlines,
    duration_s: float,
    rng: np.random.Generator,
) -> ModelRequests:
    """Draw the requests of one process, each to a random model by `shares` (see `power_law`)."""
    require_positive(duration_s=duration_s)
    times_s = arrivals.times(duration_s, rng)
    models = random_split(shares, len(times_s), rng)
    return _with_deadlines(tuple(shares), times_s, models, deadlines, duration_s, rng)


def trace_requests(
    times_s: Seconds,
    names: tuple[str, ...],
    deadlines: Deadlines,
    rng: np.random.Generator,
    shares: Mapping[str, float] | None = None,
) -> ModelRequests:
    """Return a trace's requests (see `read_trace`), to models one after another, or at random by `shares`."""
    if shares is not None and tuple(shares) != names:
        raise ConfigError(f"a share for each of {names} was expected, got shares of {tuple(shares)}")
    models = round_robin_split(len(names), len(times_s)) if shares is None else random_split(shares, len(times_s), rng)
    # The trace ends with its last arrival; the next arrival would come after a gap of mean length.
    duration_s = float(times_s[-1]) * len(times_s) / (len(times_s) - 1)
    return _with_deadlines(names, times_s, models, deadlines, duration_s, rng)


def resampled(
    recorded: ModelRequests,
    window_s: float,
    deadlines: Deadlines,
    rng: np.random.Generator,
    *,
    rate_scale: float = 1.0,
    cv_scale: float = 1.0,
    duration_s: float | None = None,
) -> ModelRequests:
    """Draw requests like recorded ones: each model's arrivals are fitted in windows of `window_s` and drawn anew.

    `rate_scale` and `cv_scale` multiply the rate and the cv of each window (AlpaServe 6.2). By default the new requests last
    as long as the recording.
    """
    arrivals = {
        name: WindowedArrivals(
            fit_windows(recorded.times_s[recorded.models == number], recorded.duration_s, window_s),
            rate_scale,
            cv_scale,
        )
        for number, name in enumerate(recorded.names)
    }
    return requests_of(arrivals, deadlines, duration_s or recorded.duration_s, rng)


def _with_deadlines(
    names: tuple[str, ...],
    times_s: Seconds,
    models: npt.NDArray[np.int32],
    deadlines: Deadlines,
    duration_s: float,
    rng: np.random.Generator,
) -> ModelRequests:
    if isinstance(deadlines, DeadlineClasses):
        deadlines_s = deadlines.draw(len(times_s), rng)
    else:
        if missing := [name for name in names if name not in deadlines]:
            raise ConfigError(f"a deadline for each model was expected, got none for {', '.join(missing)}")
        deadlines_s = np.array([deadlines[name] for name in names], np.float64)[models]
    return ModelRequests(names, times_s, models, deadlines_s, duration_s)
