"""The seconds that a batch takes, computed from its tokens and learned while serving."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Sample = tuple[int, int, float]
# Scales the features to similar size, so that one small ridge steadies all coefficients.
_SCALE = np.array([1.0, 1e-2, 1e-5])
_RIDGE = 1e-6
# Samples are weighted by relative error; a shorter one is weighted like one of a millisecond.
_LEAST_S = 1e-3
# The most that one batch may differ from the model, as a factor. A lasting change still gets through in a few batches.
_MOST_OFF = 4.0
# The share of batches that end within `bound`. A batch that takes longer moves the bound up by nearly a tenth; each other
# batch moves it down so slowly that this share results.
_WITHIN_BOUND = 0.95
_BOUND_STEP = 0.1
# Batches to see before the model is used. A process's first batch takes ten times as long as later ones, and the model would
# refuse requests that have time enough.
_LEAST_SEEN = 4
# The least ratio of a batch's time for tokens to its fixed time, so that small batches do not waste the fixed time.
_LEAST_WORK = 4.0


class CostModel:
    """`seconds = a + b tokens + c sum(length^2)` with no negative coefficient: least squares that forgets old batches.

    Half of the batches take longer than `predict` says. Under overload the most urgent requests end just in time, so deadlines
    are checked with `bound`, which 19 of 20 batches keep. `forgetting` is the weight of a batch relative to the next one. A
    batch costs nothing until four batches were seen, or until samples were measured. With `is_linear`, c is 0, for work that
    does not relate each token to every other. If all texts are short, a few batches say nothing about c, and a long text
    would look far too expensive.
    """

    def __init__(self, forgetting: float = 0.98, *, is_linear: bool = False) -> None:
        self._forgetting = forgetting
        self._features = [0, 1] if is_linear else [0, 1, 2]
        self._products = np.zeros((3, 3))
        self._targets = np.zeros(3)
        # Seconds of a batch, a token and a squared length. Plain numbers, because they are read for every request.
        self._seconds = (0.0, 0.0, 0.0)
        self._headroom = 1.0
        self._seen = 0

    @classmethod
    def fit(cls, samples: Sequence[Sample]) -> CostModel:
        """Make a model from measured samples `(tokens, sum of squared lengths, seconds)`."""
        model = cls()
        for tokens, squares, seconds in samples:
            model._add(tokens, squares, seconds, seconds)
        model._seen = _LEAST_SEEN
        model._solve()
        return model

    @property
    def bounds_s(self) -> tuple[float, float, float]:
        """The seconds of a batch, and of a token and a squared length in it, as `bound` adds them."""
        batch_s, token_s, square_s = self._seconds
        return self._headroom * batch_s, self._headroom * token_s, self._headroom * square_s

    def predict(self, tokens: int, squares: int) -> float:
        """Return the expected seconds of a batch."""
        a, b, c = self._seconds
        return a + b * tokens + c * squares

    def bound(self, tokens: int, squares: int) -> float:
        """Return the seconds that 19 of 20 such batches do not exceed."""
        return self._headroom * self.predict(tokens, squares)

    def tokens_within(self, seconds: float, squares_per_token: float) -> float:
        """Return the tokens of a batch that ends within `seconds` by `bound`.

        The number is never so small that the fixed cost is more than a fifth of the batch's time.
        """
        batch_s, token_s, square_s = self._seconds
        per_token_s = token_s + square_s * squares_per_token
        if per_token_s == 0:
            return math.inf
        return max(seconds / self._headroom - batch_s, _LEAST_WORK * batch_s) / per_token_s

    def relax(self) -> None:
        """Lower the bound a little, because the model refuses a request that an idle server could try.

        The model learns from batches only, so without this it could refuse everything for ever after a bad hour.
        """
        if self._headroom > 1.0:
            self._headroom = max(1.0, 0.9 * self._headroom)
        elif self._products.any():
            self._targets *= self._forgetting
            self._solve()

    def observe(self, tokens: int, squares: int, seconds: float) -> None:
        """Learn from a batch that has run. Seconds that are not positive and finite are ignored."""
        if not math.isfinite(seconds) or seconds <= 0:
            return
        expected = self.predict(tokens, squares)
        if expected > 0:
            seconds = min(max(seconds, expected / _MOST_OFF), expected * _MOST_OFF)
            is_over = seconds > self._headroom * expected
            self._headroom *= 1 + _BOUND_STEP * (_WITHIN_BOUND if is_over else _WITHIN_BOUND - 1)
            self._headroom = min(max(self._headroom, 1.0), _MOST_OFF)
        self._products *= self._forgetting
        self._targets *= self._forgetting
        self._add(tokens, squares, seconds, expected or seconds)
        self._seen += 1
        if self._seen >= _LEAST_SEEN:
            self._solve()

    def _add(self, tokens: int, squares: int, seconds: float, expected_s: float) -> None:
        features = np.array([1.0, tokens, squares]) * _SCALE
        # The weight depends on the expected time. With the measured time a quick batch would count up to a hundred times more
        # than an equal slow one, and the model would hardly learn from slow batches.
        weight = 1.0 / max(expected_s, _LEAST_S) ** 2
        self._products += weight * np.outer(features, features)
        self._targets += weight * seconds * features

    def _solve(self) -> None:
        """Compute the coefficients by least squares, without features whose coefficient would be negative."""
        kept = list(self._features)
        found = np.zeros(3)
        ridge = _RIDGE * np.trace(self._products) * np.eye(3)
        while kept:
            part = np.linalg.solve((self._products + ridge)[np.ix_(kept, kept)], self._targets[kept])
            if (part >= 0).all():
                found[kept] = part
                break
            kept.pop(int(part.argmin()))
        a, b, c = (found * _SCALE).tolist()
        self._seconds = a, b, c
