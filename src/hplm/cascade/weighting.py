"""The weighted answer of several levels (Tabi, eq. 6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.floating[Any]]


def weighted(
    logits: Sequence[Logits], temperatures: Sequence[float], weights: Sequence[float]
) -> npt.NDArray[np.float64]:
    """Return the probabilities `[labels]` of a text that several levels have answered.

    The arguments have one element for each level, in order: the level's logits `[labels]`, the temperature that divides the
    logits, and the weight of the level's probabilities. The sum of the weights is 1, and so is that of the result.
    """
    total = np.zeros(logits[0].shape[-1])
    for of_level, temperature, weight in zip(logits, temperatures, weights, strict=True):
        scaled = of_level.reshape(-1).astype(np.float64) / temperature
        shares = np.exp(scaled - scaled.max())
        total += weight * (shares / shares.sum())
    return total


def log_probabilities(probabilities: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Return the logarithms as float32. A probability of 0 gives the lowest logarithm of a normal float64, which is finite."""
    return np.log(np.maximum(probabilities, np.finfo(np.float64).tiny)).astype(np.float32)
