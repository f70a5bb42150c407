"""n-grams as 64-bit keys: the token ids packed if they fit, else a hash that the table verifies."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]


def fits(n: int, vocab_size: int) -> bool:
    """Return whether n token ids pack into 64 bits without loss."""
    return n * bits(vocab_size) <= 64


def bits(vocab_size: int) -> int:
    """Return the bits of one token id."""
    return max(1, (vocab_size - 1).bit_length())


def pack(grams: npt.NDArray[np.int64], vocab_size: int) -> Keys:
    """Return keys `[W]` of n-grams `[W, n]`. Equal n-grams have equal keys; if ids fit, others have other keys."""
    columns = grams.astype(np.uint64)
    if fits(grams.shape[1], vocab_size):
        return _packed(columns, bits(vocab_size))
    return _hashed(columns)


def unpack(keys: Keys, n: int, vocab_size: int) -> npt.NDArray[np.int64]:
    """Return the n-grams `[W, n]` whose keys `pack` made, for ids that fit."""
    assert fits(n, vocab_size)
    width = bits(vocab_size)
    mask = np.uint64((1 << width) - 1)
    columns = [(keys >> np.uint64(width * place)) & mask for place in reversed(range(n))]
    return np.stack(columns, axis=1).view(np.int64)


def _packed(columns: Keys, width: int) -> Keys:
    key = columns[:, 0]
    for column in columns.T[1:]:
        key = (key << np.uint64(width)) | column
    return key


def _hashed(columns: Keys) -> Keys:
    """Hash with splitmix64's finaliser over the running key, one token at a time."""
    key = np.zeros(len(columns), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for column in columns.T:
            key = (key ^ column) + np.uint64(0x9E3779B97F4A7C15)
            key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            key ^= key >> np.uint64(31)
    return key
