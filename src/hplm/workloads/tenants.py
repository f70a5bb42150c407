"""Draws the tenants of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hplm.errors import ConfigError


class Tenants(Protocol):
    """The interface of every tenant draw in this module."""

    @property
    def names(self) -> Sequence[str]:
        """Return the tenants to draw from."""

    def draw(self, count: int, rng: np.random.Generator) -> list[str]:
        """Draw `count` tenant names."""


@dataclass(frozen=True)
class _NamedTenants:
    names: Sequence[str]

    def __post_init__(self) -> None:
        if not self.names:
            raise ConfigError("there are no tenants to draw from")


class UniformTenants(_NamedTenants):
    """Random tenants, all equally likely."""

    def draw(self, count: int, rng: np.random.Generator) -> list[str]:
        return [self.names[i] for i in rng.integers(len(self.names), size=count)]


@dataclass(frozen=True)
class ZipfTenants(_NamedTenants):
    """Random tenants; the tenant at rank r has a probability in proportion to `1 / r ** exponent`. Exponent 0 is uniform."""

    exponent: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.exponent < float("inf"):
            raise ConfigError(f"a Zipf exponent is 0 or more, not {self.exponent}")

    def draw(self, count: int, rng: np.random.Generator) -> list[str]:
        weights = np.arange(1, len(self.names) + 1, dtype=np.float64) ** -self.exponent
        return [self.names[i] for i in rng.choice(len(self.names), size=count, p=weights / weights.sum())]


class RoundRobinTenants(_NamedTenants):
    """Tenants one after another in a shuffled order, repeated. With PeriodicArrivals each tenant keeps its phase."""

    def draw(self, count: int, rng: np.random.Generator) -> list[str]:
        order = rng.permutation(len(self.names))
        return [self.names[order[i % len(order)]] for i in range(count)]
