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
    grams = np.full((total, n), pad_id, dtype=np.int64)
    exists = np.zeros((total, n), dtype=np.bool_)
    for place in range(n):
        window, token = shifted(place - centre(n), total)
        exists[window, place] = text[window] == text[token]
        grams[window, place] = np.where(exists[window, place], ids[token], pad_id)
    return grams, exists


def shifted(shift: int, total: int) -> tuple[slice, slice]:
    """Slices of `total` windows, and of the tokens that lie `shift` places to the right of their own."""
    overlap = max(0, total - abs(shift))
    first_window, first_token = max(0, -shift), max(0, shift)
    return slice(first_window, first_window + overlap), slice(first_token, first_token + overlap)


def fragment(grams: Ids, size: int, pad_id: int) -> Ids:
    """The back-off of windows `[W, n]`: the same windows with only the `size` tokens around the centre, others `pad_id`."""
    n = grams.shape[1]
    start = centre(n) - centre(size)
    cut = np.full_like(grams, pad_id)
    cut[:, start : start + size] = grams[:, start : start + size]
    return cut
