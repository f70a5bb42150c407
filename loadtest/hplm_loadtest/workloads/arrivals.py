"""When requests arrive: named workloads, each with its own generator.

Every one has `times(duration_s, rng)`: seconds from the start, float64 `[k]`, rising, all below `duration_s`. `str` says
the workload in words.
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hplm.errors import ConfigError, DataError

Seconds = npt.NDArray[np.float64]

# Date, fraction of a second, and zone as sign, hours and minutes. Azure's traces have seven digits of a second, and the
# later ones a zone: Python 3.10 reads neither.
_DATED = re.compile(
    r"(\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?)?)((?<=:\d\d:\d\d)\.\d+)?(?:Z|([+-])([01]\d|2[0-3]):?([0-5]\d)?)?",
    re.ASCII,
)
# Nanoseconds since 1970 are within it; beyond, gaps would add up to infinity.
FURTHEST = 1e20


class Arrivals(Protocol):
    """What every workload of this module is."""

    def expected(self, duration_s: float) -> float:
        """How many arrive in one run, on average."""

    def times(self, duration_s: float, rng: np.random.Generator) -> Seconds:
        """Arrival times of one run."""


@dataclass(frozen=True)
class PoissonArrivals:
    """Independent arrivals at a constant mean rate."""

    rate_per_s: float

    def __post_init__(self) -> None:
        require_positive(rate_per_s=self.rate_per_s)

    def __str__(self) -> str:
        return f"{self.rate_per_s:g} requests/s, independent of each other (Poisson)"

    def expected(self, duration_s: float) -> float:
        return self.rate_per_s * duration_s

    def times(self, duration_s: float, rng: np.random.Generator) -> Seconds:
        return np.sort(rng.uniform(0.0, duration_s, rng.poisson(self.expected(duration_s))))


@dataclass(frozen=True)
class GammaArrivals:
    """Gamma-distributed gaps with coefficient of variation `cv`: 1 is Poisson, 4 is bursty (AlpaServe 6.2)."""

    rate_per_s: float
    cv: float

    def __post_init__(self) -> None:
        require_positive(rate_per_s=self.rate_per_s, cv=self.cv)

    def __str__(self) -> str:
        return f"{self.rate_per_s:g} requests/s, gaps with a coefficient of variation of {self.cv:g} (gamma)"

    def expected(self, duration_s: float) -> float:
        return self.rate_per_s * duration_s

    def times(self, duration_s: float, rng: np.random.Generator) -> Seconds:
        shape = 1.0 / self.cv**2
        expected = self.expected(duration_s)
        at_once = int(expected + 4 * self.cv * expected**0.5) + 16
        # The load does not begin with a request: until the first it is what is left of a gap that has begun long before.
        end = float(rng.uniform() * rng.gamma(shape + 1.0, 1.0 / (shape * self.rate_per_s)))
        times = [np.array([end])]
        while end < duration_s:
            times.append(end + np.cumsum(rng.gamma(shape, 1.0 / (shape * self.rate_per_s), at_once)))
            end = float(times[-1][-1])
        return _before(np.concatenate(times), duration_s)


@dataclass(frozen=True)
class PeriodicArrivals:
    """`clients` senders, each one request every `period_s` from a random phase on (HMI Fig. 12).

    The senders' order is the same in every period: `tenants.InTurn` over as many names gives each its own phase.
    """

    clients: int
    period_s: float

    def __post_init__(self) -> None:
        require_positive(clients=self.clients, period_s=self.period_s)

    def __str__(self) -> str:
        return f"{self.clients} senders, a request of each every {self.period_s:g} s"

    def expected(self, duration_s: float) -> float:
        return self.clients * duration_s / self.period_s

    def times(self, duration_s: float, rng: np.random.Generator) -> Seconds:
        phases = np.sort(rng.uniform(0.0, self.period_s, self.clients))
        starts = np.arange(0.0, duration_s, self.period_s)
        return _before((starts[:, None] + phases).ravel(), duration_s)


@dataclass(frozen=True)
class RampArrivals:
    """Independent arrivals whose mean rate goes from one value to another in a straight line over the run."""

    from_per_s: float
    to_per_s: float

    def __post_init__(self) -> None:
        rates = self.from_per_s, self.to_per_s
        if not (all(0 <= rate < math.inf for rate in rates) and any(rates)):
            raise ConfigError(f"a ramp from {self.from_per_s} to {self.to_per_s} requests/s has no arrivals")

    def __str__(self) -> str:
        return f"a ramp from {self.from_per_s:g} to {self.to_per_s:g} requests/s"

    def expected(self, duration_s: float) -> float:
        return (self.from_per_s + self.to_per_s) / 2 * duration_s

    def times(self, duration_s: float, rng: np.random.Generator) -> Seconds:
        first, last = self.from_per_s, self.to_per_s
        share = np.sort(rng.uniform(0.0, 1.0, rng.poisson(self.expected(duration_s))))
        # The share of arrivals before t, first*t + (last-first)*t^2/2 over its value at 1, solved for t.
        part = share * (first + last)
        return _before(duration_s * part / (first + np.sqrt(first**2 + (last - first) * part)), duration_s)


@dataclass(frozen=True)
class BurstArrivals:
    """`clients` senders started `stagger_s` apart, each `count` requests, one every `period_s` (HMI Fig. 13)."""

    clients: int = 250
    stagger_s: float = 0.05
    period_s: float = 1.2
    count: int = 50

    def __post_init__(self) -> None:
        require_positive(clients=self.clients, period_s=self.period_s, count=self.count)
        if not 0 <= self.stagger_s < math.inf:
            raise ConfigError(f"a stagger of {self.stagger_s} s; it must be finite and not below 0")

    def __str__(self) -> str:
        return (
            f"{self.clients} senders, one started every {self.stagger_s:g} s, "
            f"{self.count} requests of each, one every {self.period_s:g} s"
        )

    def expected(self, duration_s: float) -> float:
        return self.clients * self.count

    @property
    def lasts_s(self) -> float:
        """A duration that holds every request."""
        return (self.clients - 1) * self.stagger_s + self.count * self.period_s

    def times(self, duration_s: float, rng: np.random.Generator) -> Seconds:
        starts = np.arange(self.clients) * self.stagger_s
        sends = np.arange(self.count) * self.period_s
        return _before(np.sort((starts[:, None] + sends).ravel()), duration_s)


@dataclass(frozen=True)
class TraceArrivals:
    """A recorded trace, rescaled: a CSV file with a TIMESTAMP column, such as Azure's of LLM inference.

    Its time stamps are dates, of UTC where they name no zone, or numbers, such as Unix seconds.

    Each gap, as a multiple of the mean gap, is raised to `burstiness`: 0 is evenly spaced, 1 the trace as it is, 2 more
    bursty. The whole trace then has the mean rate `rate_per_s`. A run starts at a random place and goes around at the end.
    """

    path: Path
    rate_per_s: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        require_positive(rate_per_s=self.rate_per_s)
        if not 0 <= self.burstiness < 10:
            raise ConfigError(f"burstiness is {self.burstiness}; it must be from 0 to 10")

    def __str__(self) -> str:
        return f"{self.path.name} at {self.rate_per_s:g} requests/s, burstiness {self.burstiness:g}"

    def expected(self, duration_s: float) -> float:
        return self.rate_per_s * duration_s

    def times(self, duration_s: float, rng: np.random.Generator) -> Seconds:
        gaps = _gaps(self.path) ** self.burstiness
        gaps = np.roll(gaps, -rng.integers(len(gaps))) / gaps.mean() / self.rate_per_s
        rounds = int(duration_s / gaps.sum()) + 1
        return _before(np.cumsum(np.tile(gaps, rounds)), duration_s)


@cache
def _gaps(path: Path) -> Seconds:
    """Gaps of a trace as multiples of their mean. Raises DataError."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            rows = csv.DictReader(lines)
            instants = np.array([_instant(path, rows.line_num, row["TIMESTAMP"] or "") for row in rows])
    except KeyError:
        raise DataError(f"{path} has no column TIMESTAMP") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a trace: {error}") from None
    gaps = np.diff(np.sort(instants))
    if len(gaps) == 0 or gaps.sum() == 0:
        raise DataError(f"{path} holds {len(instants)} arrivals; a trace needs two at different times")
    return gaps / gaps.mean()


def _instant(path: Path, line: int, stamp: str) -> float:
    """Seconds since 1970, or what the trace counts in since whenever: only gaps matter. Raises DataError."""
    try:
        dated = _DATED.fullmatch(stamp.strip())
        instant = float(stamp) if dated is None else _since_1970_s(*dated.groups(default="0"))
    except ValueError:
        instant = math.nan
    if not abs(instant) <= FURTHEST:
        raise DataError(f"{path}, line {line}: {stamp!r:.100} is no time; write Unix seconds or YYYY-MM-DD HH:MM:SS")
    return instant


def _since_1970_s(date: str, fraction: str, sign: str, hours: str, minutes: str) -> float:
    """A date of no zone is of UTC. Raises ValueError."""
    ahead_s = 3600 * int(hours) + 60 * int(minutes)
    whole_s = (datetime.fromisoformat(date) - datetime(1970, 1, 1)).total_seconds()
    return whole_s + float(fraction) + (ahead_s if sign == "-" else -ahead_s)


def _before(times: Seconds, duration_s: float) -> Seconds:
    return times[times < duration_s]


def require_positive(**values: float) -> None:
    """Raises ConfigError for the first that is not, or is infinite, by its name."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value}; it must be finite and above 0")
