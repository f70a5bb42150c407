"""What to send and when, decided before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hplm.errors import ConfigError
from hplm_loadtest.workloads.arrivals import Arrivals, require_positive
from hplm_loadtest.workloads.deadlines import DeadlineClasses
from hplm_loadtest.workloads.tenants import Tenants

# A plan of so many takes 0.7 GB.
MOST_REQUESTS = 10_000_000


@dataclass(frozen=True)
class Requests:
    """`k` requests as columns of equal length. `deadlines_s` `[k]`, NaN where a request has none.

    `pairs`: second texts, None where a request has none; empty where no request has one.
    """

    tenants: Sequence[str]
    texts: Sequence[str]
    deadlines_s: npt.NDArray[np.float64]
    pairs: Sequence[str | None] = ()

    def __len__(self) -> int:
        return len(self.tenants)

    def share(self, number: int, of: int) -> Requests:
        """Every `of`-th, from `number` on."""
        return Requests(*(getattr(self, column)[number::of] for column in Requests.__dataclass_fields__))


@dataclass(frozen=True)
class Plan:
    """Requests and their times `[k]`, seconds from the start, rising."""

    times_s: npt.NDArray[np.float64]
    requests: Requests
    duration_s: float


@dataclass(frozen=True)
class Mix:
    """What the requests of a workload are: tenants, texts (each as often as any other) and deadlines.

    `of_pairs`: the tenants that are sent two texts.
    """

    tenants: Tenants
    texts: Sequence[str]
    deadlines: DeadlineClasses | None = None
    of_pairs: frozenset[str] = frozenset()

    def draw(self, count: int, rng: np.random.Generator) -> Requests:
        """`count` requests."""
        if not self.texts:
            raise ConfigError("there are no texts to send")
        texts = self._texts(count, rng)
        deadlines = np.full(count, np.nan) if self.deadlines is None else self.deadlines.draw(count, rng)
        tenants = self.tenants.draw(count, rng)
        if not self.of_pairs:
            return Requests(tenants, texts, deadlines)
        second = zip(tenants, self._texts(count, rng), strict=True)
        return Requests(tenants, texts, deadlines, [text if name in self.of_pairs else None for name, text in second])

    def _texts(self, count: int, rng: np.random.Generator) -> list[str]:
        return [self.texts[i] for i in rng.integers(len(self.texts), size=count)]

    def plan(self, arrivals: Arrivals, duration_s: float, rng: np.random.Generator) -> Plan:
        """A run of `duration_s`. Raises ConfigError where nothing or too much arrives in it, or that is no duration."""
        require_positive(duration_s=duration_s)
        if (expected := arrivals.expected(duration_s)) > MOST_REQUESTS:
            raise ConfigError(
                f"{expected:.3g} requests would arrive within {duration_s:g} s of {arrivals}, and a plan has {MOST_REQUESTS:,} "
                "at most: make it shorter, or its rate lower, or of fewer senders"
            )
        times_s = arrivals.times(duration_s, rng)
        if len(times_s) == 0:
            raise ConfigError(f"no request arrives within {duration_s:g} s of {arrivals}")
        return Plan(times_s, self.draw(len(times_s), rng), duration_s)
