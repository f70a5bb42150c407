"""How far confidences are from the share of right answers: the expected calibration error, without what chance adds to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Bins of equally many texts.
BINS = 15
# How often answers are drawn from the model's own confidences.
DRAWS = 1000


@dataclass(frozen=True)
class Bin:
    """The texts of one bin: their number, their mean confidence, and the share of right answers."""

    texts: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Calibration:
    """The calibration of confidences on labelled texts.

    `error`: the expected calibration error in bins of equal mass. `by_chance`: the mean error of perfectly calibrated answers
    to as many texts. `bins` are those of a reliability picture, in ascending confidence.
    """

    error: float
    by_chance: float
    bins: tuple[Bin, ...]

    @property
    def excess(self) -> float:
        """The error less what chance explains, at least 0."""
        return max(0.0, self.error - self.by_chance)


def measure_calibration(
    confidence: npt.ArrayLike, right: npt.ArrayLike, *, bins: int = BINS, draws: int = DRAWS, seed: int = 0
) -> Calibration:
    """Measure confidences `[N]` of answers of which those in `right` `[N]` are right.

    A perfectly calibrated model has an error too, because each bin has few texts. Its mean is taken from `draws` draws of right
    answers with the probabilities `confidence`.
    """
    confidences, hits = np.asarray(confidence, np.float64), np.asarray(right, np.float64)
    order = np.argsort(confidences, kind="stable")
    confidences, hits = confidences[order], hits[order]
    # Every bin has a text.
    ends = np.linspace(0, len(order), min(bins, len(order)) + 1).astype(int)
    sizes = np.diff(ends)

    def sums(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.add.reduceat(values, ends[:-1], axis=-1)

    def errors(answers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.asarray(np.abs(sums(answers) - sums(confidences)).sum(-1) / len(order))

    rng = np.random.default_rng(seed)
    # One draw after another: all at once would take memory for `draws` times the texts.
    chance = [errors((rng.random(len(order)) < confidences).astype(np.float64)) for _ in range(draws)]
    means = zip(sizes, sums(confidences) / sizes, sums(hits) / sizes, strict=True)
    return Calibration(
        float(errors(hits)),
        float(np.mean(chance)),
        tuple(Bin(int(size), float(mean), float(share)) for size, mean, share in means),
    )
