"""Real texts of wanted lengths in tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hplm.core.text import SPECIAL_TOKENS, TextEncoder
from hplm.errors import DataError


def texts_of_lengths(
    wanted: Sequence[int], sentences: Sequence[str], encoder: TextEncoder, rng: np.random.Generator
) -> list[str]:
    """A text of each wanted number of tokens, special ones included: running sentences, cut where the number is reached.

    Raises DataError where the sentences are too short together.
    """
    words = " ".join(sentences[i] for i in rng.permutation(len(sentences))).split()
    # Tokens of a text are those of its words one after another.
    sizes = [len(one.ids) - SPECIAL_TOKENS for one in encoder.encode(words)]
    made = []
    start = 0
    for length in wanted:
        text, start = _cut(words, sizes, max(1, length - SPECIAL_TOKENS), start)
        made.append(text)
    return made


def token_counts(texts: Sequence[str], encoder: TextEncoder) -> npt.NDArray[np.int64]:
    """Tokens of each text, special ones included: `[k]`."""
    return np.array([len(one.ids) for one in encoder.encode(texts)])


def _cut(words: Sequence[str], sizes: Sequence[int], tokens: int, start: int) -> tuple[str, int]:
    """Words from `start` on, around the end if need be, of exactly `tokens` tokens; and where to go on."""
    for first in (*range(start, len(words)), *range(start)):
        total, last = 0, first
        while last < len(words) and total < tokens:
            total += sizes[last]
            last += 1
        if total == tokens:
            return " ".join(words[first:last]), last % len(words)
    raise DataError(f"the sentences hold no text of {tokens} tokens")
