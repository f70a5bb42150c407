"""How much a benchmark of placements computes, and the processes that compute its points."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from rich.console import Console

Point = TypeVar("Point")
Found = TypeVar("Found")


def tell(line: str) -> None:
    """Print a line of progress to standard error."""
    Console(stderr=True).print(line, highlight=False)


@dataclass(frozen=True)
class Effort:
    """A quick look or the whole benchmark."""

    quick: bool = False
    seed: int = 59

    def each(self, compute: Callable[[Point], Found], points: Sequence[Point], words: str) -> list[Found]:
        """Compute points in processes, as many as this process may use cores, and tell how many are done."""
        # No fork: threads of the parent, such as those of a progress bar, would not exist in the child.
        processes = multiprocessing.get_context("forkserver")
        found = []
        with ProcessPoolExecutor(min(len(points), len(os.sched_getaffinity(0))), processes) as pool:
            for number, one in enumerate(pool.map(compute, points), 1):
                tell(f"{words}: {number} of {len(points)}")
                found.append(one)
        return found

    def rng(self, number: int = 0) -> np.random.Generator:
        """Return a random source. Equal numbers give equal sources, so that variants are asked the same requests."""
        return np.random.default_rng([self.seed, number])
