"""Parts of labelled data: by a hash where files are ours, by a tenth by seed and text where a tenant sends no dev data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def split_of(group: str) -> str:
    """`train` (80 %), `dev` or `test` (10 % each) of a group key; examples that are near copies share a group.

    The same on every machine, whatever the order of the file.
    """
    bucket = int.from_bytes(_digest(group), "little") % 10
    return "dev" if bucket == 8 else "test" if bucket == 9 else "train"


def stratified_sample(kinds: Sequence[Any], count: int, seed: int) -> list[int]:
    """`count` positions in order, or all where there are no more: of each kind its share, which of them by the seed."""
    if count >= len(kinds):
        return [*range(len(kinds))]
    shuffled = np.random.default_rng(seed).permutation(len(kinds)).tolist()
    order = sorted(shuffled, key=lambda i: kinds[i])
    return sorted(order[(2 * place + 1) * len(order) // (2 * count)] for place in range(count))


def choose_tenth(texts: Mapping[int, str], kinds: Sequence[Any], seed: int) -> set[int]:
    """Positions of about a tenth of the texts, of each kind its share, at least one in all; which of them by seed and text.

    Where texts are added later, those of before stay on their sides, but for a few.
    """
    by_kind: dict[Any, list[int]] = {}
    for position in sorted(texts, key=lambda i: _uniform(seed, texts[i])):
        by_kind.setdefault(kinds[position], []).append(position)
    # Of kinds that have too few for a whole one, some give one and some none.
    chosen = {
        position
        for kind, members in by_kind.items()
        for position in members[: int(len(members) / 10 + _uniform(seed, str(kind)))]
    }
    return chosen or set(max(by_kind.values(), key=len, default=[])[:1])


def _uniform(seed: int, text: str) -> float:
    """From 0 up to 1, the same on every machine."""
    return int.from_bytes(_digest(f"{seed} {text}"), "little") / 2**64


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
