"""n-gram windows of packed texts (HMI 3.2.1): which token ids a window holds, and where its vectors belong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def centre(n: int) -> int:
    """Place of a window's own token: a window of n covers tokens t - centre ... t - centre + n - 1."""
    return (n - 1) // 2


def windows(ids: Ids, lengths: Sequence[int], n: int, pad_id: int) -> tuple[Ids, Mask]:
    """One window a token: ids `[N, n]` with `pad_id` beyond the edges of each text, and which places exist `[N, n]`.

    `ids` `[N]` holds the texts one after another, `lengths` sums to N.
    """
    total = len(ids)
    text = np.repeat(np.arange(len(lengths)), lengths)
    places = np.arange(total)[:, None] + (np.arange(n) - centre(n))
    inside = (places >= 0) & (places < total)
    places = np.where(inside, places, 0)
    exists = inside & (text[places] == text[:, None])
    return np.where(exists, ids[places], pad_id), exists


def fragment(grams: Ids, size: int, pad_id: int) -> Ids:
    """The back-off of windows `[W, n]`: the same windows with only the `size` tokens around the centre, others `pad_id`."""
    n = grams.shape[1]
    start = centre(n) - centre(size)
    cut = np.full_like(grams, pad_id)
    cut[:, start : start + size] = grams[:, start : start + size]
    return cut
