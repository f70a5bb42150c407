"""Lengths as the TCB paper draws them."""

from __future__ import annotations

import math
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

    @property
    def drawn_mean(self) -> float:
        """Of what `draw` gives: cutting moves it, at variance 400 to 22.2."""
        counts = range(self.low, self.high)
        return self.low + sum(1 - self._share_up_to(count + 0.5) for count in counts)

    def _share_up_to(self, tokens: float) -> float:
        if not self.variance:
            return float(tokens > self.mean)
        return 0.5 * (1 + math.erf((tokens - self.mean) / math.sqrt(2 * self.variance)))

    def draw(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        lengths = rng.normal(self.mean, self.variance**0.5, count)
        return np.clip(np.round(lengths), self.low, self.high).astype(np.int64)
