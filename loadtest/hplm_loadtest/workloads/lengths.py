"""Draws text lengths in tokens, and makes real texts of given lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hplm.core.text import SPECIAL_TOKENS, TextEncoder
from hplm.errors import DataError


@dataclass(frozen=True)
class NormalLengths:
    """Token counts from a normal distribution, clipped to `low`-`high` (TCB 6.1: 3-100, mean 20)."""

    mean: float = 20.0
    variance: float = 100.0
    low: int = 3
    high: int = 100

    @property
    def drawn_mean(self) -> float:
        """Return the mean of the lengths that `draw` returns. Clipping moves the mean: at variance 400 from 20 to 22.2."""
        counts = range(self.low, self.high)
        return self.low + sum(1 - self._share_up_to(count + 0.5) for count in counts)

    def _share_up_to(self, tokens: float) -> float:
        if not self.variance:
            return float(tokens > self.mean)
        return 0.5 * (1 + math.erf((tokens - self.mean) / math.sqrt(2 * self.variance)))

    def draw(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Draw lengths in tokens `[count]`."""
        lengths = rng.normal(self.mean, self.variance**0.5, count)
        return np.clip(np.round(lengths), self.low, self.high).astype(np.int64)


def texts_of_lengths(
    lengths: Sequence[int], sentences: Sequence[str], encoder: TextEncoder, rng: np.random.Generator
) -> list[str]:
    """Return one text of each length in tokens, special tokens included, cut from the shuffled sentences.

    Raises DataError if the sentences together are too short.
    """
    words = " ".join(sentences[i] for i in rng.permutation(len(sentences))).split()
    # A text has the tokens of its words, one word after another.
    word_tokens = [len(encoded.ids) - SPECIAL_TOKENS for encoded in encoder.encode(words)]
    texts = []
    start = 0
    for length in lengths:
        text, start = _cut_text(words, word_tokens, max(1, length - SPECIAL_TOKENS), start)
        texts.append(text)
    return texts


def token_counts(texts: Sequence[str], encoder: TextEncoder) -> npt.NDArray[np.int64]:
    """Return the tokens of each text, special tokens included: `[k]`."""
    return np.array([len(encoded.ids) for encoded in encoder.encode(texts)])


def _cut_text(words: Sequence[str], word_tokens: Sequence[int], tokens: int, start: int) -> tuple[str, int]:
    """Return a text of exactly `tokens` tokens and the word after the text.

    The text is the first match from word `start` on; after the last word the search continues at the first word.
    """
    for first in (*range(start, len(words)), *range(start)):
        total, last = 0, first
        while last < len(words) and total < tokens:
            total += word_tokens[last]
            last += 1
        if total == tokens:
            return " ".join(words[first:last]), last % len(words)
    raise DataError(f"the sentences hold no text of {tokens} tokens: give more sentences")
