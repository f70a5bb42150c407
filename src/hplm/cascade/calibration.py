"""The temperature that calibrates a level's confidences, and how far confidences are from the share of right answers.

That distance is the expected calibration error, without what chance adds to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# The temperatures that a level may get. Those of 36 levels (docs/cascade.md) are 0.57 to 3.9. Beyond these bounds a temperature
# says more about the few examples that it was fitted on than about the model.
TEMPERATURES = (0.5, 5.0)
# The standard deviation of the logarithm of temperatures, around that of 1: of the same 36 levels it is 0.57.
LOG_SPREAD = 0.6
# The least examples that a temperature is fitted on.
LEAST_EXAMPLES = 20
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


def why_uncalibrated(right: npt.ArrayLike) -> str:
    """Return why no temperature can be fitted on answers of which those in `right` `[N]` are right; "" if one can.

    If all answers are right, the likeliest temperature is 0, at which every later answer would have the confidence 1.
    """
    hits = np.asarray(right, bool)
    if len(hits) < LEAST_EXAMPLES:
        return f"{len(hits)} examples are fewer than {LEAST_EXAMPLES}"
    if hits.all() or not hits.any():
        return f"all {len(hits):,} answers are {'right' if hits.all() else 'wrong'}"
    return ""


def fit_temperature(log_likelihood: Callable[[float], float], right: npt.ArrayLike) -> float:
    """Return the most probable temperature (Tabi, section 4.1, with a prior), and 1 if `why_uncalibrated` says why.

    `log_likelihood` returns that of the labels of all examples at a temperature. The prior is LOG_SPREAD around 1.
    """
    from scipy.optimize import minimize_scalar

    if why_uncalibrated(right):
        return 1.0

    def loss(log_temperature: float) -> float:
        return 0.5 * (log_temperature / LOG_SPREAD) ** 2 - log_likelihood(float(np.exp(log_temperature)))

    found = minimize_scalar(loss, bounds=tuple(np.log(TEMPERATURES)), method="bounded", options={"xatol": 1e-3})
    # Servers get the temperature in float32.
    return float(np.float32(np.exp(found.x)))


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
