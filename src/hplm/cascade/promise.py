"""The bound of a promise: what accuracy so many right answers prove, and how many examples a promise needs."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

# The probability that the accuracy is at least what is promised.
CONFIDENCE = 0.95
# Nobody labels more examples for a proof, so no larger number is advised.
MOST_EXAMPLES = 1_000_000


def proved_accuracy(right: npt.ArrayLike, examples: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the one-sided 95 % Clopper-Pearson bound: the least accuracy that `right` of `examples` prove."""
    from scipy.stats import beta

    hits, total = np.asarray(right, np.float64), np.asarray(examples, np.float64)
    bound = beta.ppf(1 - CONFIDENCE, np.maximum(hits, 1), total - hits + 1)
    return np.where(hits > 0, bound, 0.0)


@lru_cache(maxsize=1024)
def right_needed(accuracy: float, examples: int) -> int | None:
    """Return how many of `examples` must be right to prove `accuracy`; None if even all of them prove less."""
    if examples < 1 or proved_accuracy(examples, examples) < accuracy:
        return None
    low, high = 0, examples
    while low < high:
        middle = (low + high) // 2
        if proved_accuracy(middle, examples) >= accuracy:
            high = middle
        else:
            low = middle + 1
    return low


def examples_needed(accuracy: float, expected: float) -> int | None:
    """Return how many examples prove `accuracy` if the share `expected` of them is right.

    None if no number up to MOST_EXAMPLES proves it, because `expected` is hardly higher than `accuracy`.
    """

    def proves(examples: int) -> bool:
        return bool(proved_accuracy(math.floor(expected * examples), examples) >= accuracy)

    high = 1
    while not proves(high):
        if high >= MOST_EXAMPLES:
            return None
        high *= 2
    # Whole numbers of right answers make the bound jump a little, so the search ends at a number that proves it, near the
    # least such number.
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if proves(middle) else (middle, high)
    return high
