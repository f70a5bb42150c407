"""Divides requests between models or tenants, by their shares or one after another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hplm.errors import ConfigError


def power_law(names: Sequence[str], exponent: float) -> dict[str, float]:
    """Return the share of each name: the name at rank r has a share in proportion to `1 / r ** exponent`.

    With exponent 0 all shares are equal. AlpaServe 6.3 uses 0.5.
    """
    if not names:
        raise ConfigError("names to divide requests between were expected, got none")
    if not 0 <= exponent < math.inf:
        raise ConfigError(f"an exponent of 0 or more was expected, got {exponent}")
    weights = np.arange(1, len(names) + 1, dtype=np.float64) ** -exponent
    return dict(zip(names, (weights / weights.sum()).tolist(), strict=True))


def random_split(shares: Mapping[str, float], count: int, rng: np.random.Generator) -> npt.NDArray[np.int32]:
    """Draw the number of a name for each of `count` requests, `[count]`. Numbers are those of the names' order in `shares`."""
    weights = np.array(list(shares.values()), dtype=np.float64)
    if not (len(weights) and np.isfinite(weights).all() and weights.min() >= 0 and weights.sum() > 0):
        raise ConfigError(f"shares of 0 or more, not all 0, were expected, got {dict(shares)}")
    return rng.choice(len(weights), size=count, p=weights / weights.sum()).astype(np.int32)


def round_robin_split(names: int, count: int) -> npt.NDArray[np.int32]:
    """Return the numbers 0, 1, ..., `names` - 1 one after another, repeated, `[count]`."""
    return (np.arange(count) % names).astype(np.int32)
