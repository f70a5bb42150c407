"""Plans a load before it is sent: which tenant gets which text, when, and with which deadline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hplm.errors import ConfigError
from hplm.reporting.benchmark_result import plain
from hplm.workloads.arrivals import Arrivals, require_positive
from hplm.workloads.deadlines import DeadlineClasses
from hplm.workloads.tenants import Tenants

# Largest number of requests in a load plan. Such a plan takes 0.7 GB of memory.
MAX_REQUESTS = 10_000_000


@dataclass(frozen=True)
class Requests:
    """Requests as columns of the equal length `k`.

    deadlines_s: `[k]`, NaN for a request without a deadline.
    pairs: second texts, None for a request of one text; empty if all requests have one text.
    keys: the access key of each request; empty if the server needs no keys.
    """

    tenants: Sequence[str]
    texts: Sequence[str]
    deadlines_s: npt.NDArray[np.float64]
    pairs: Sequence[str | None] = ()
    keys: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.tenants)

    def share(self, number: int, of: int) -> Requests:
        """Return every `of`-th request, from request `number` on."""
        return Requests(*(getattr(self, column)[number::of] for column in Requests.__dataclass_fields__))


@dataclass(frozen=True)
class LoadPlan:
    """Requests and the times to send them at: `times_s` `[k]`, seconds from the start, rising."""

    times_s: npt.NDArray[np.float64]
    requests: Requests
    duration_s: float


@dataclass(frozen=True)
class RequestMix:
    """A random source of requests: draws a tenant, a text and a deadline for each. All texts are equally likely.

    pair_tenants: the tenants that are sent two texts.
    """

    tenants: Tenants
    texts: Sequence[str]
    deadlines: DeadlineClasses | None = None
    pair_tenants: frozenset[str] = frozenset()

    def draw(self, count: int, rng: np.random.Generator) -> Requests:
        """Draw `count` requests. Raises ConfigError if there are no texts."""
        if not self.texts:
            raise ConfigError("there are no texts to send")
        texts = self._texts(count, rng)
        deadlines = np.full(count, np.nan) if self.deadlines is None else self.deadlines.draw(count, rng)
        tenants = self.tenants.draw(count, rng)
        if not self.pair_tenants:
            return Requests(tenants, texts, deadlines)
        second_texts = zip(tenants, self._texts(count, rng), strict=True)
        pairs = [text if name in self.pair_tenants else None for name, text in second_texts]
        return Requests(tenants, texts, deadlines, pairs)

    def _texts(self, count: int, rng: np.random.Generator) -> list[str]:
        return [self.texts[i] for i in rng.integers(len(self.texts), size=count)]

    def plan(self, arrivals: Arrivals, duration_s: float, rng: np.random.Generator) -> LoadPlan:
        """Draw a load plan of `duration_s`.

        Raises ConfigError if no request or more than `MAX_REQUESTS` requests would arrive, or if the duration is not positive.
        """
        require_positive(duration_s=duration_s)
        if (expected := arrivals.expected_count(duration_s)) > MAX_REQUESTS:
            raise ConfigError(
                f"{plain(expected)} requests would arrive within {plain(duration_s)} s of {arrivals}, and a load plan has "
                f"{MAX_REQUESTS:,} at most: make the duration shorter, the rate lower, or the senders fewer"
            )
        times_s = arrivals.times(duration_s, rng)
        if len(times_s) == 0:
            raise ConfigError(f"no request arrives within {plain(duration_s)} s of {arrivals}")
        return LoadPlan(times_s, self.draw(len(times_s), rng), duration_s)
