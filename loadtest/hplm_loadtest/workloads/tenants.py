"""Whose requests they are: draws of tenant names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hplm.errors import ConfigError


class Tenants(Protocol):
    """What every draw of this module is."""

    @property
    def names(self) -> Sequence[str]:
        """Whom it draws from."""

    def draw(self, count: int, rng: np.random.Generator) -> list[str]:
        """`count` names."""


@dataclass(frozen=True)
class _Named:
    names: Sequence[str]

    def __post_init__(self) -> None:
        if not self.names:
            raise ConfigError("there are no tenants to draw from")


class UniformTenants(_Named):
    """Every name as often as any other, at random."""

    def draw(self, count: int, rng: np.random.Generator) -> list[str]:
        return [self.names[i] for i in rng.integers(len(self.names), size=count)]


@dataclass(frozen=True)
class ZipfTenants(_Named):
    """The name at rank r in proportion to `1 / r ** exponent`; 0 is uniform."""

    exponent: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.exponent < float("inf"):
            raise ConfigError(f"a Zipf exponent is 0 or more, not {self.exponent}")

    def draw(self, count: int, rng: np.random.Generator) -> list[str]:
        weights = np.arange(1, len(self.names) + 1, dtype=np.float64) ** -self.exponent
        return [self.names[i] for i in rng.choice(len(self.names), size=count, p=weights / weights.sum())]


class InTurn(_Named):
    """One after the other in a shuffled order, around and around; with PeriodicArrivals each name keeps its phase."""

    def draw(self, count: int, rng: np.random.Generator) -> list[str]:
        order = rng.permutation(len(self.names))
        return [self.names[order[i % len(order)]] for i in range(count)]
