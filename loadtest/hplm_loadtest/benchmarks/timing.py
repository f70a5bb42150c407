"""Timing side by side: variants in turn, several rounds, medians and spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.progress import Progress


@dataclass(frozen=True)
class Timed:
    """Seconds a call took, one value a round."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> str:
        """Fastest to slowest round, in percent of the median."""
        low, high = (100 * value / self.median_s for value in (min(self.seconds), max(self.seconds)))
        return f"{low:.0f}-{high:.0f} %"


def interleaved(
    variants: Mapping[str, Callable[[], object]], rounds: int, calls: int, progress: Progress, description: str
) -> dict[str, Timed]:
    """Time each variant `calls` times a round, variants in turn, after one round that does not count."""
    bar = progress.add_task(description, total=(rounds + 1) * len(variants))
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name, call in variants.items():
            start = time.perf_counter()
            for _ in range(calls):
                call()
            if turn:
                taken[name].append((time.perf_counter() - start) / calls)
            progress.update(bar, advance=1)
    return {name: Timed(tuple(values)) for name, values in taken.items()}
