"""Scores on dev examples with their chance: whether a model is better than another on the same examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# The most groups of dev examples. With 50 groups a standard error is itself uncertain by a tenth.
MOST_GROUPS = 50
# A difference above so many standard errors is clear. If two models differ in one example alone, the difference is one standard
# error, so the limit is a little more: a single example never decides.
CLEAR_ERRORS = 1.1


@dataclass(frozen=True)
class DevScore:
    """A model's score on all dev examples, and its scores `without` each group of them (delete-a-group jackknife).

    Scores are comparable if they are of the same examples in the same order.
    """

    value: float
    without: tuple[float, ...]

    @classmethod
    def of(cls, score: Callable[[list[int]], float], count: int) -> DevScore:
        """Score `count` examples; `score` returns the score of the examples with the given numbers."""
        everything = np.arange(count)
        groups = min(count, MOST_GROUPS) if count > 1 else 0
        # Every so many examples, because examples of a class may stand together.
        without = (everything[everything % groups != group].tolist() for group in range(groups))
        return cls(score(everything.tolist()), tuple(map(score, without)))

    def error_beside(self, other: DevScore) -> float:
        """Return the standard error of the difference between two scores; infinite if there is a single example."""
        groups = len(self.without)
        if groups < 2:
            return math.inf
        differences = np.subtract(self.without, other.without)
        return math.sqrt((groups - 1) / groups * float(np.square(differences - differences.mean()).sum()))

    def is_clearly_above(self, other: DevScore) -> bool:
        """Return whether this score is above the other by more than CLEAR_ERRORS standard errors of the difference."""
        return self.value - other.value > CLEAR_ERRORS * self.error_beside(other)

    @property
    def leaves_room(self) -> bool:
        """Whether a model that is right on every example would be clearly above this one."""
        return DevScore(1.0, (1.0,) * len(self.without)).is_clearly_above(self)
