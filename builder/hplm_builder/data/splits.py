"""Splitting labelled data: a fixed hash split for our own files, and a seeded tenth for tenants that send no dev data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def split_of(group: str) -> str:
    """Return the part of a group key: `train` (80 %), `dev` or `test` (10 % each). Near copies should share a group.

    The part depends on the key alone, so it is the same on every machine and in any order of the file.
    """
    bucket = int.from_bytes(_digest(group), "little") % 10
    return "dev" if bucket == 8 else "test" if bucket == 9 else "train"


def stratified_sample(kinds: Sequence[Any], count: int, seed: int) -> list[int]:
    """Return `count` sorted positions in `kinds`, or all of them: each kind by its share, chosen by `seed`."""
    if count >= len(kinds):
        return [*range(len(kinds))]
    shuffled = np.random.default_rng(seed).permutation(len(kinds)).tolist()
    order = sorted(shuffled, key=lambda i: kinds[i])
    return sorted(order[(2 * place + 1) * len(order) // (2 * count)] for place in range(count))


def choose_tenth(texts: Mapping[int, str], kinds: Sequence[Any], seed: int) -> set[int]:
    """Return the positions of about a tenth of the texts, at least one, each kind by its share, chosen by seed and text.

    If texts are added later, nearly all earlier texts stay on their side.
    """
    by_kind: dict[Any, list[int]] = {}
    for position in sorted(texts, key=lambda i: _uniform(seed, texts[i])):
        by_kind.setdefault(kinds[position], []).append(position)
    # If a tenth of a kind is less than one text, the tenth is the probability that the kind gives a text.
    chosen = {
        position
        for kind, members in by_kind.items()
        for position in members[: int(len(members) / 10 + _uniform(seed, str(kind)))]
    }
    return chosen or set(max(by_kind.values(), key=len, default=[])[:1])


def _uniform(seed: int, text: str) -> float:
    """Return a number in [0, 1) that is the same on every machine."""
    return int.from_bytes(_digest(f"{seed} {text}"), "little") / 2**64


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
