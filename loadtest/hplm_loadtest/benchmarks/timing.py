"""Times variants of a computation side by side: several rounds, all variants in each round, medians and spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.progress import Progress


@dataclass(frozen=True)
class Timing:
    """The seconds per call of one variant, one value per round."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> str:
        """Return the fastest and the slowest round in percent of the median."""
        low, high = (100 * value / self.median_s for value in (min(self.seconds), max(self.seconds)))
        return f"{low:.0f}-{high:.0f} %"


def time_interleaved(
    variants: Mapping[str, Callable[[], object]], rounds: int, calls: int, progress: Progress, description: str
) -> dict[str, Timing]:
    """Call each variant `calls` times per round, one variant after another; the first of `rounds + 1` rounds does not count."""
    bar = progress.add_task(description, total=(rounds + 1) * len(variants))
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name, call in variants.items():
            start = time.perf_counter()
            for _ in range(calls):
                call()
            if turn:
                seconds[name].append((time.perf_counter() - start) / calls)
            progress.update(bar, advance=1)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}
