"""Labelled rows of which no two versions of tenants answer alike: whoever gets another's answer shows it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from tests import tiny

Logits = npt.NDArray[np.float32]
CLASSES, ROWS, MIXED = 6, 40, 12


def rows(name: str, number: int) -> str:
    """Classes are called as the tenant. Most rows have one and the same, which is another each `number`.

    So an update by the next number is better than its start, which stays only where it is not.
    """
    texts = tiny.sentences(ROWS, seed=number)
    classes = [place if place < MIXED else number for place in range(ROWS)]
    lines = [f"{text},{name}-{one % CLASSES}" for text, one in zip(texts, classes, strict=True)]
    return "\n".join(["text,label", *lines]) + "\n"


def settings(number: int, *, update: bool) -> dict[str, Any]:
    """Of the job that takes these rows: one step, at an update a larger one than that which it outdoes."""
    return {"epochs": 1, "learning_rates": [0.05 if update else 0.02], "seed": number}


def difference(one: Logits, other: Logits) -> float:
    """The largest of a class; infinite where the classes are not as many."""
    return float(np.abs(one - other).max()) if one.shape == other.shape else float("inf")


def least_difference(answers: Sequence[Logits]) -> float:
    """Of any two."""
    return min(difference(one, other) for one, other in combinations(answers, 2))
