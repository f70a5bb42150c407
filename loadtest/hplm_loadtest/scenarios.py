"""What `hplm loadtest` can put on a server: arrivals under a name, and how long they last."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hplm_loadtest.arrivals import Arrivals, BurstArrivals, GammaArrivals, PoissonArrivals, RampArrivals, TraceArrivals


@dataclass(frozen=True)
class Scenario:
    """Independent of whom the requests are for and what they say."""

    name: str
    arrivals: Arrivals
    duration_s: float


def steady(rate_per_s: float, cv: float, duration_s: float) -> Scenario:
    """The same mean rate all the time; `cv` above 1 makes it uneven."""
    arrivals = PoissonArrivals(rate_per_s) if cv == 1 else GammaArrivals(rate_per_s, cv)
    return Scenario("steady", arrivals, duration_s)


def ramp(from_per_s: float, to_per_s: float, duration_s: float) -> Scenario:
    """A mean rate that grows, to see where answers start to be late."""
    return Scenario("ramp", RampArrivals(from_per_s, to_per_s), duration_s)


def burst(clients: int, stagger_s: float, period_s: float, count: int) -> Scenario:
    """HMI's burst: it lasts as long as its senders do."""
    arrivals = BurstArrivals(clients, stagger_s, period_s, count)
    return Scenario("burst", arrivals, arrivals.lasts_s)


def replay(trace: Path, rate_per_s: float, burstiness: float, duration_s: float) -> Scenario:
    """A recorded trace at a rate of one's own."""
    return Scenario("replay", TraceArrivals(trace, rate_per_s, burstiness), duration_s)
