"""Draws the times at which requests arrive.

Each class is one named workload. `times(duration_s, rng)` returns seconds from the start, float64 `[k]`, rising, all below
`duration_s`. `str` describes the workload in words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from hplm.errors import ConfigError
from hplm.reporting.benchmark_result import plain
from hplm.workloads.traces import Seconds, read_trace

# Arrivals that a workload draws at most, and stays of a state: more take minutes and gigabytes.
MOST_ARRIVALS = 20_000_000
MOST_STAYS = 1_000_000


class Arrivals(Protocol):
    """The interface of every workload in this module."""

    def expected_count(self, duration_s: float) -> float:
        """Return the average number of arrivals in one run."""

    def times(self, duration_s: float, rng: np.random.Generator) -> Seconds:
        """Draw the arrival times of one run."""


class _AtMeanRate:
    rate_per_s: float

    def expected_count(self, duration_s: float) -> float:
        return self.rate_per_s * duration_s


@dataclass(frozen=True)
class PoissonArrivals(_AtMeanRate):
    """Independent arrivals at a constant mean rate."""

    rate_per_s: float

    def __post_init__(self) -> None:
        require_positive(rate_per_s=self.rate_per_s)

    def __str__(self) -> str:
        return f"{plain(self.rate_per_s)} requests/s, independent of each other (Poisson)"

    def times(self, duration_s: float, rng: np.random.Generator) -> Seconds:
        return np.sort(rng.uniform(0.0, duration_s, rng.poisson(self.expected_count(duration_s))))


@dataclass(frozen=True)
class GammaArrivals(_AtMeanRate):
    """Gamma-distributed gaps with coefficient of variation `cv`: 1 is Poisson, 4 is bursty (AlpaServe 6.2)."""

    rate_per_s: float
    cv: float

    def __post_init__(self) -> None:
        require_positive(rate_per_s=self.rate_per_s, cv=self.cv)

    def __str__(self) -> str:
        return f"{plain(self.rate_per_s)} requests/s, gaps with a coefficient of variation of {self.cv:g} (gamma)"

    def times(self, duration_s: float, rng: np.random.Generator) -> Seconds:
        shape = 1.0 / self.cv**2
        expected = self.expected_count(duration_s)
        chunk = int(expected + 4 * self.cv * expected**0.5) + 16
        # The run starts in the middle of a gap, so the first request comes after the rest of that gap.
        end = float(rng.uniform() * rng.gamma(shape + 1.0, 1.0 / (shape * self.rate_per_s)))
        times = [np.array([end])]
        while end < duration_s:
            if (drawn := len(times) * chunk) > MOST_ARRIVALS:
                raise ConfigError(
                    f"{self} in {plain(duration_s)} s may be {drawn:,} arrivals, {MOST_ARRIVALS:,} were expected at most: "
                    "lower the rate, the cv or the duration"
                )
            times.append(end + np.cumsum(rng.gamma(shape, 1.0 / (shape * self.rate_per_s), chunk)))
            end = float(times[-1][-1])
        return _before(np.concatenate(times), duration_s)


@dataclass(frozen=True)
class MmppArrivals:
    """Independent arrivals whose rate jumps between states at random times (a Markov-modulated Poisson process).

    State i has the rate `rates_per_s[i]` and lasts `mean_stay_s[i]` on average, exponentially distributed. Then each other
    state is equally likely.
    """

    rates_per_s: tuple[float, ...]
    mean_stay_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.rates_per_s) < 2 or len(self.rates_per_s) != len(self.mean_stay_s):
            raise ConfigError(
                f"two or more rates and a mean stay for each were expected, got {len(self.rates_per_s)} rates and "
                f"{len(self.mean_stay_s)} stays"
            )
        if not (all(0 <= rate < math.inf for rate in self.rates_per_s) and any(self.rates_per_s)):
            raise ConfigError(f"finite rates, none below 0 and one above 0, were expected, got {self.rates_per_s}")
        for stay_s in self.mean_stay_s:
            require_positive(mean_stay_s=stay_s)

    def __str__(self) -> str:
        states = " or ".join(
            f"{plain(rate)} requests/s for {plain(stay_s)} s"
            for rate, stay_s in zip(self.rates_per_s, self.mean_stay_s, strict=True)
        )
        return f"{states} at a time (Markov-modulated Poisson)"

    def expected_count(self, duration_s: float) -> float:
        return duration_s * float(np.average(self.rates_per_s, weights=self.mean_stay_s))

    def times(self, duration_s: float, rng: np.random.Generator) -> Seconds:
        stays_s = np.array(self.mean_stay_s)
        # Every state is entered equally often, so the run starts in a state with a probability in proportion to its stay.
        state = int(rng.choice(len(stays_s), p=stays_s / stays_s.sum()))
        if (stays := duration_s / float(stays_s.mean())) > MOST_STAYS:
            raise ConfigError(
                f"{plain(duration_s)} s have about {stays:,.0f} stays, {MOST_STAYS:,} were expected at most: make the stays "
                "longer or the duration shorter"
            )
        times, begin_s = [], 0.0
        while begin_s < duration_s:
            stay_s = float(rng.exponential(stays_s[state]))
            count = rng.poisson(self.rates_per_s[state] * stay_s)
            times.append(np.sort(rng.uniform(begin_s, begin_s + stay_s, count)))
            begin_s += stay_s
            state = (state + int(rng.integers(1, len(stays_s)))) % len(stays_s)
        return _before(np.concatenate(times), duration_s)


@dataclass(frozen=True)
class PeriodicArrivals:
    """Arrivals of `clients` senders that each send a request every `period_s`, from a random phase on (HMI Fig. 12).

    The order of the senders is the same in every period. With `RoundRobinTenants` over `clients` names, each name is one
    sender.
    """

    clients: int
    period_s: float

    def __post_init__(self) -> None:
        require_positive(clients=self.clients, period_s=self.period_s)

    def __str__(self) -> str:
        return f"{self.clients:,} senders, a request of each every {plain(self.period_s)} s"

    def expected_count(self, duration_s: float) -> float:
        return self.clients * duration_s / self.period_s

    def times(self, duration_s: float, rng: np.random.Generator) -> Seconds:
        phases = np.sort(rng.uniform(0.0, self.period_s, self.clients))
        starts = np.arange(0.0, duration_s, self.period_s)
        return _before((starts[:, None] + phases).ravel(), duration_s)


@dataclass(frozen=True)
class RampArrivals:
    """Independent arrivals whose mean rate changes linearly over the run."""

    from_per_s: float
    to_per_s: float

    def __post_init__(self) -> None:
        rates = self.from_per_s, self.to_per_s
        if not (all(0 <= rate < math.inf for rate in rates) and any(rates)):
            raise ConfigError(f"a ramp from {self.from_per_s} to {self.to_per_s} requests/s has no arrivals")

    def __str__(self) -> str:
        return f"a ramp from {plain(self.from_per_s)} to {plain(self.to_per_s)} requests/s"

    def expected_count(self, duration_s: float) -> float:
        return (self.from_per_s + self.to_per_s) / 2 * duration_s

    def times(self, duration_s: float, rng: np.random.Generator) -> Seconds:
        first, last = self.from_per_s, self.to_per_s
        share = np.sort(rng.uniform(0.0, 1.0, rng.poisson(self.expected_count(duration_s))))
        # Inverts the share of arrivals before t: (first*t + (last-first)*t^2/2) divided by its value at t = 1.
        part = share * (first + last)
        return _before(duration_s * part / (first + np.sqrt(first**2 + (last - first) * part)), duration_s)


@dataclass(frozen=True)
class BurstArrivals:
    """Arrivals of `clients` senders, started `stagger_s` apart, that each send `count` requests, one every `period_s`.

    The defaults are those of HMI Fig. 13.
    """

    clients: int = 250
    stagger_s: float = 0.05
    period_s: float = 1.2
    count: int = 50

    def __post_init__(self) -> None:
        require_positive(clients=self.clients, period_s=self.period_s, count=self.count)
        if not 0 <= self.stagger_s < math.inf:
            raise ConfigError(f"a stagger of {self.stagger_s} s; write a finite number that is not below 0")

    def __str__(self) -> str:
        return (
            f"{self.clients:,} senders, one started every {plain(self.stagger_s)} s, "
            f"{self.count:,} requests of each, one every {plain(self.period_s)} s"
        )

    def expected_count(self, duration_s: float) -> float:
        return self.clients * self.count

    @property
    def duration_s(self) -> float:
        """Return a duration that holds every request."""
        return (self.clients - 1) * self.stagger_s + self.count * self.period_s

    def times(self, duration_s: float, rng: np.random.Generator) -> Seconds:
        starts = np.arange(self.clients) * self.stagger_s
        sends = np.arange(self.count) * self.period_s
        return _before(np.sort((starts[:, None] + sends).ravel()), duration_s)


@dataclass(frozen=True)
class TraceArrivals(_AtMeanRate):
    """Arrivals of a recorded trace, rescaled to the mean rate `rate_per_s`.

    The file is CSV with a column TIMESTAMP, such as Azure's traces of LLM inference. Time stamps are dates or numbers, such as
    Unix seconds. A date without a time zone is UTC.

    Each gap, as a multiple of the mean gap, is raised to the power `burstiness`: 0 gives equal gaps, 1 keeps the trace, 2 is
    more bursty. A run has as many arrivals as rate and duration say, from a random place of the trace on. The trace starts
    again when it ends. So a pause or a rush of the recording changes when the requests of a run come, and not how many.
    """

    path: Path
    rate_per_s: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        require_positive(rate_per_s=self.rate_per_s)
        if not 0 <= self.burstiness < 10:
            raise ConfigError(f"burstiness is {self.burstiness}; it must be from 0 to 10")

    def __str__(self) -> str:
        return f"{self.path.name} at {plain(self.rate_per_s)} requests/s, burstiness {self.burstiness:g}"

    def times(self, duration_s: float, rng: np.random.Generator) -> Seconds:
        gaps = _relative_gaps(self.path) ** self.burstiness
        count = int(self.expected_count(duration_s) + rng.uniform())
        # Many arrivals of a trace may have the same time, so at least one gap of the run must be above 0.
        above_0 = np.concatenate([[0], np.cumsum(np.resize(gaps > 0, len(gaps) + count))])
        starts = np.flatnonzero(above_0[count : count + len(gaps)] > above_0[: len(gaps)])
        if not len(starts):
            return np.empty(0)
        own = np.resize(np.roll(gaps, -rng.choice(starts)), count)
        # The gaps lie on a circle as long as the run, and the run begins at a random place of the circle.
        shares = np.cumsum(own) / own.sum() + rng.uniform()
        return np.sort(duration_s * np.mod(shares, 1.0))


def _relative_gaps(path: Path) -> Seconds:
    """Return the gaps of a trace as multiples of the mean gap. Raises DataError."""
    gaps = np.diff(read_trace(path))
    return gaps / gaps.mean()


def _before(times: Seconds, duration_s: float) -> Seconds:
    return times[times < duration_s]


def require_positive(**values: float) -> None:
    """Raise ConfigError with the name of the first value that is not positive or is infinite."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value}; write a finite number above 0")
