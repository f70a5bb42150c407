"""Parts of labelled data: by a hash where files are ours, by a seeded tenth where a tenant sends no dev data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np


def split_of(group: str) -> str:
    """`train` (80 %), `dev` or `test` (10 % each) of a group key; examples that are near copies share a group.

    The same on every machine, whatever the order of the file.
    """
    bucket = int.from_bytes(hashlib.blake2b(group.encode(), digest_size=8).digest(), "little") % 10
    return "dev" if bucket == 8 else "test" if bucket == 9 else "train"


def evenly(kinds: Sequence[Any], count: int, seed: int) -> list[int]:
    """`count` positions in order, or all where there are no more: of each kind its share, which of them by the seed."""
    if count >= len(kinds):
        return [*range(len(kinds))]
    shuffled = np.random.default_rng(seed).permutation(len(kinds)).tolist()
    order = sorted(shuffled, key=lambda i: kinds[i])
    return sorted(order[(2 * place + 1) * len(order) // (2 * count)] for place in range(count))


def every_tenth(kinds: Sequence[Any], candidates: Sequence[int], seed: int) -> set[int]:
    """A tenth of the candidates, at least one where there are two: sorted by kind, so that each kind gives its share."""
    shuffled = np.random.default_rng(seed).permutation(np.array(candidates, dtype=np.int64)).tolist()
    order = sorted(shuffled, key=lambda i: kinds[i])
    return set(order[min(10, len(order)) // 2 :: 10])
