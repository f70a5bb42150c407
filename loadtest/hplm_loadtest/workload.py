"""Lengths as the TCB paper draws them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class NormalLengths:
    """Token counts from a normal distribution cut to `low`-`high` (TCB 6.1: 3-100, mean 20)."""

    mean: float = 20.0
    variance: float = 100.0
    low: int = 3
    high: int = 100

    def draw(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        lengths = rng.normal(self.mean, self.variance**0.5, count)
        return np.clip(np.round(lengths), self.low, self.high).astype(np.int64)
