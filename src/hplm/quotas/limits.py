"""The quotas of a tenant, and uses of them, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hplm.quotas.token_bucket import Rate, rate_of


@dataclass(frozen=True)
class Limits:
    """The quotas of a tenant: requests and tokens a second, and requests at the same time. None is not limited.

    `generation` is the registry's when the limits were last set. Limits that were set again begin with full buckets.
    """

    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    concurrent: int | None = None
    generation: int = field(default=0, compare=False)

    def over(self, default: Limits) -> Limits:
        """Return these limits. A quota that these limits leave out is the quota of `default`."""
        quotas = {key: default.quotas[key] if own is None else own for key, own in self.quotas.items()}
        return Limits(**quotas, generation=max(self.generation, default.generation))  # type: ignore[arg-type]

    @property
    def quotas(self) -> dict[str, float | None]:
        """The quotas by name."""
        return {key: value for key, value in vars(self).items() if key != "generation"}

    @property
    def requests(self) -> Rate | None:
        """The quota of requests."""
        return None if self.requests_per_s is None else rate_of(self.requests_per_s)

    @property
    def tokens(self) -> Rate | None:
        """The quota of tokens."""
        return None if self.tokens_per_s is None else rate_of(self.tokens_per_s)

    @property
    def is_none(self) -> bool:
        """Whether nothing is limited."""
        return self == Limits()


class Use(NamedTuple):
    """Requests and tokens: what was spent, or what is leased."""

    requests: float = 0.0
    tokens: float = 0.0

    def plus(self, other: Use) -> Use:
        """Return the sum."""
        return Use(self.requests + other.requests, self.tokens + other.tokens)

    def less(self, other: Use) -> Use:
        """Return the difference."""
        return Use(self.requests - other.requests, self.tokens - other.tokens)


NOTHING = Use()


class Refusal(NamedTuple):
    """The quota that is used up, in words, and after how many seconds it has room again."""

    quota: str
    wait_s: float
