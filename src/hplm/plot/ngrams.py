"""The n-grams of texts (HMI 3.2.1): which token ids the n-gram of a token holds, and which tokens its vectors belong to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hplm.core.settings import BaseConfig

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def centre(count: int) -> int:
    """Return the place of token t among `count` tokens around it, which are t - centre ... t - centre + count - 1."""
    return (count - 1) // 2


def text_ngrams(ids: Ids, lengths: Sequence[int], config: BaseConfig) -> tuple[Ids, Mask]:
    """Return the n-gram of each token `[N, n]`, and which of its vectors belong to a token of its text `[N, v]`.

    v is the base's `vectors_per_ngram`. `ids` `[N]` holds the texts one after another, and `lengths` sums to N. Places
    beyond the edges of a text hold `pad_id`.
    """
    n, total = config.window, len(ids)
    text = np.repeat(np.arange(len(lengths)), lengths)
    grams = np.full((total, n), config.pad_id, dtype=np.int64)
    exists = np.zeros((total, n), dtype=np.bool_)
    for place in range(n):
        gram, token = shifted(place - centre(n), total)
        exists[gram, place] = text[gram] == text[token]
        grams[gram, place] = np.where(exists[gram, place], ids[token], config.pad_id)
    return grams, exists[:, middle(config.vectors_per_ngram, n)]


def shifted(shift: int, total: int) -> tuple[slice, slice]:
    """Return the slice of those of `total` n-grams, and the slice of the tokens `shift` places to the right of them."""
    overlap = max(0, total - abs(shift))
    first_gram, first_token = max(0, -shift), max(0, shift)
    return slice(first_gram, first_gram + overlap), slice(first_token, first_token + overlap)


def middle(count: int, of: int) -> slice:
    """Return which `count` of `of` places lie around the token: for a shorter n-gram, or for fewer vectors."""
    start = centre(of) - centre(count)
    return slice(start, start + count)


def fragment(grams: Ids, size: int, pad_id: int) -> Ids:
    """Return the n-grams `[W, n]` cut for the back-off: `size` tokens around the centre stay, other places hold `pad_id`."""
    cut = np.full_like(grams, pad_id)
    kept = middle(size, grams.shape[1])
    cut[:, kept] = grams[:, kept]
    return cut


def vectors_of(size: int, config: BaseConfig) -> int:
    """Return how many vectors a table stores for an n-gram of `size` tokens: none for a token that the n-gram lacks."""
    return min(size, config.vectors_per_ngram)
