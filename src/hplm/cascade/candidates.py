"""Candidates: single levels and cascades with every setting, with expected accuracy and latency (Tabi, section 5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np

from hplm.cascade.dispatch import reroute_probability
from hplm.cascade.level_outputs import LevelOutputs, Numbers, PartOutputs

# Cut-offs that are tried, in this order.
CUT_OFFS = tuple(round(0.95 - 0.05 * step, 2) for step in range(19))
# Slopes that are tried with every cut-off: each makes a candidate, and the selection takes the fastest that holds the target.
# With 6 about a twentieth of the surest texts is re-routed, with 12 one of 400; 24 nearly cuts halfway between c and 1.
SLOPES = (6.0, 12.0, 24.0)
# The 75th percentile of a cascade's latency is at most so many times that of its slowest level.
MOST_P75 = 1.5


@dataclass(frozen=True)
class Candidate:
    """A single level or a cascade, and what dev expects of it.

    `levels` are numbers of levels, `cut_off` c and `slope` k those of every level but the last, `alpha` that of the texts which
    the first level re-routes. `weights` has the weights of each level's answer, see `LevelPlan`. `accuracy` is the expected
    share of right answers, `latency_ms` and `p75_ms` are of requests one at a time. `rerouted` is the expected share of texts
    that leave the first level.
    """

    levels: tuple[int, ...]
    cut_off: float
    slope: float
    alpha: float
    weights: tuple[tuple[float, ...], ...]
    accuracy: float
    latency_ms: float
    p75_ms: float
    rerouted: float


def find_candidates(
    part: PartOutputs,
    temperatures: Sequence[float],
    latencies: Sequence[Callable[[int], float]],
    *,
    deterministic: bool = False,
    most_p75: float = MOST_P75,
) -> list[Candidate]:
    """Return all candidates, single levels first. `latencies` give the milliseconds of a text of so many tokens, by level.

    Cascades have two or more levels of ascending accuracy. With each alpha and slope, the cut-off falls from 0.95 by 0.05 while
    the accuracy is at least the mean of the levels' accuracies. Cascades whose 75th percentile of latency is above `most_p75`
    times that of their slowest level are left out. If `deterministic`, there is one slope, because it decides nothing.
    """
    table = _Table(part, temperatures, latencies, deterministic)
    found = [table.candidate((level,), 0.0, 0.0, 0.0) for level in range(len(part.whole))]
    p75 = [single.p75_ms for single in found]
    accuracies = [single.accuracy for single in found]
    for count in range(2, len(part.whole) + 1):
        for levels in combinations(range(len(part.whole)), count):
            mean = float(np.mean([accuracies[level] for level in levels]))
            most_ms = most_p75 * max(p75[level] for level in levels)
            for alpha in part.alphas(levels[0], levels[1:]):
                for slope in SLOPES[:1] if deterministic else SLOPES:
                    found += [
                        candidate
                        for candidate in table.falling(levels, slope, alpha, mean)
                        if candidate.p75_ms <= most_ms
                    ]
    return found


def best_candidates(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return, of each combination of levels, the candidates that no faster one equals in accuracy: the rows of a table.

    Rows are sorted by combination and latency.
    """
    rows: list[Candidate] = []
    for levels in sorted({candidate.levels for candidate in candidates}, key=lambda levels: (len(levels), levels)):
        best = -1.0
        members = [candidate for candidate in candidates if candidate.levels == levels]
        for candidate in sorted(members, key=lambda one: (one.latency_ms, -one.accuracy)):
            if candidate.accuracy > best:
                rows.append(candidate)
                best = candidate.accuracy
    return rows


class _Table:
    """The outputs of a part, with what all candidates need of them computed once."""

    def __init__(
        self,
        part: PartOutputs,
        temperatures: Sequence[float],
        latencies: Sequence[Callable[[int], float]],
        deterministic: bool,
    ) -> None:
        self._part = part
        self._temperatures = temperatures
        self._latencies = latencies
        self._deterministic = deterministic
        # Of the outputs by pruner, level and alpha.
        self._probabilities = cache(self._compute_probabilities)
        self._milliseconds = cache(self._compute_milliseconds)

    def falling(self, levels: tuple[int, ...], slope: float, alpha: float, least: float) -> Iterator[Candidate]:
        """Yield candidates with falling cut-offs, while their accuracy is at least `least`."""
        for cut_off in CUT_OFFS:
            candidate = self.candidate(levels, cut_off, slope, alpha)
            if candidate.accuracy < least:
                return
            yield candidate

    def candidate(self, levels: tuple[int, ...], cut_off: float, slope: float, alpha: float) -> Candidate:
        """Return one candidate. Its accuracy and latency are means over the draws of the dispatcher."""
        first, last = levels[0], len(levels) - 1
        count = len(self._part)
        # The probability that each text comes to a level, and the milliseconds until then.
        reach, spent_ms = np.ones(count), np.zeros(count)
        right, rerouted = 0.0, 0.0
        weights: list[tuple[float, ...]] = []
        ends: list[tuple[Numbers, Numbers]] = []
        for place, level in enumerate(levels):
            outputs = self._part.read(first, level, alpha)
            weights.append(self._weights(levels[: place + 1], alpha, reach))
            spent_ms = spent_ms + self._milliseconds(first, level, alpha)
            leaves = self._leaving(outputs, cut_off, slope) if place < last else np.zeros(count)
            ending = reach * (1 - leaves)
            right += float(ending @ self._right(levels[: place + 1], alpha, weights[-1]))
            ends.append((spent_ms, ending))
            reach = reach * leaves
            if place == 0:
                rerouted = float(reach.mean())
        times, shares = (np.concatenate(arrays) for arrays in zip(*ends, strict=True))
        return Candidate(
            levels,
            cut_off,
            slope,
            alpha,
            tuple(weights),
            right / count,
            float(times @ shares) / count,
            _quantile(times, shares, 0.75),
            rerouted,
        )

    def _leaving(self, outputs: LevelOutputs, cut_off: float, slope: float) -> Numbers:
        """Return the probability `[N]` that a level re-routes each text."""
        # Servers get the cut-off in float32, see `hplm.cascade.dispatch`.
        cut_off = float(np.float32(cut_off))
        if self._deterministic:
            return (outputs.confidence <= cut_off).astype(np.float64)
        return reroute_probability(outputs.confidence, cut_off, slope)

    def _weights(self, levels: tuple[int, ...], alpha: float, reach: Numbers) -> tuple[float, ...]:
        """Return the weights of eq. 6, proportional to the levels' accuracies on the texts that come to the last of them.

        Only the last level counts for taggings, and if no text comes to it.
        """
        first = levels[0]
        shares = [float(reach @ self._part.read(first, level, alpha).right) for level in levels]
        if self._probabilities(first, levels[-1], alpha).shape[1] == 0 or not sum(shares):
            return (*[0.0] * (len(levels) - 1), 1.0)
        return tuple(share / sum(shares) for share in shares)

    def _right(self, levels: tuple[int, ...], alpha: float, weights: tuple[float, ...]) -> Numbers:
        """Return which answers `[N]` are right if the last of `levels` answers, weighted with those before it."""
        first = levels[0]
        if weights[-1] == 1.0:
            return self._part.read(first, levels[-1], alpha).right.astype(np.float64)
        total = sum(
            weight * self._probabilities(first, level, alpha) for weight, level in zip(weights, levels, strict=True)
        )
        return (np.argmax(total, axis=1) == self._part.gold).astype(np.float64)

    def _compute_probabilities(self, pruner: int, level: int, alpha: float) -> Numbers:
        scaled = self._part.read(pruner, level, alpha).logits.astype(np.float64) / self._temperatures[level]
        if not scaled.shape[1]:
            return scaled
        shares = np.exp(scaled - scaled.max(1, keepdims=True))
        return shares / shares.sum(1, keepdims=True)

    def _compute_milliseconds(self, pruner: int, level: int, alpha: float) -> Numbers:
        lengths, places = np.unique(self._part.read(pruner, level, alpha).tokens, return_inverse=True)
        return np.array([self._latencies[level](int(tokens)) for tokens in lengths])[places]


def _quantile(values: Numbers, weights: Numbers, share: float) -> float:
    """Return the least value up to which lies `share` of the weights."""
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(sums, share * sums[-1] - 1e-9)])
