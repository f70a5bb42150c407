"""What a batch costs: seconds from its tokens, learned while serving."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Sample = tuple[int, int, float]
# Features of like size, so that one small ridge steadies all coefficients.
_SCALE = np.array([1.0, 1e-2, 1e-5])
_RIDGE = 1e-6
# Samples count by relative error, but none below a millisecond counts more than one of a millisecond.
_LEAST_S = 1e-3
# One hiccup moves the model no further than this; a lasting change gets through in a few batches.
_MOST_OFF = 4.0
# Of all batches, this share ends within `bound`; one that does not moves it up by a tenth, the others down as slowly as
# that share asks for.
_WITHIN_BOUND = 0.95
_BOUND_STEP = 0.1
# The first batch of a process takes ten times as long as it would later: many would be refused for it that there is time for.
_LEAST_SEEN = 4
# Tokens of a batch take at least this many times what it costs besides.
_LEAST_WORK = 4.0


class CostModel:
    """`seconds = a + b tokens + c sum(length^2)`, none of them negative: least squares that forgets old batches.

    Half of the batches take longer than `predict` says, and under overload the most urgent requests are those that end
    just in time: promises are made by `bound`, which 19 of 20 batches keep. `forgetting` is what a batch counts beside the one
    after it. A batch costs nothing until four were seen, or samples measured. `is_linear`: c is 0, for work that no token
    does for each other one; where all texts are short, few batches say nothing of c, and a long text would look far too dear.
    """

    def __init__(self, forgetting: float = 0.98, *, is_linear: bool = False) -> None:
        self._forgetting = forgetting
        self._features = [0, 1] if is_linear else [0, 1, 2]
        self._products = np.zeros((3, 3))
        self._targets = np.zeros(3)
        # Of a batch, a token and a squared length: plain numbers, asked for every request.
        self._seconds = (0.0, 0.0, 0.0)
        self._headroom = 1.0
        self._seen = 0

    @classmethod
    def fit(cls, samples: Sequence[Sample]) -> CostModel:
        """Started from measured `(tokens, sum of squared lengths, seconds)`."""
        model = cls()
        for tokens, squares, seconds in samples:
            model._add(tokens, squares, seconds, seconds)
        model._seen = _LEAST_SEEN
        model._solve()
        return model

    def predict(self, tokens: int, squares: int) -> float:
        """Seconds of a batch."""
        a, b, c = self._seconds
        return a + b * tokens + c * squares

    def bound(self, tokens: int, squares: int) -> float:
        """Seconds that a batch hardly ever exceeds, as far as was seen."""
        return self._headroom * self.predict(tokens, squares)

    def tokens_within(self, seconds: float, squares_per_token: float) -> float:
        """Tokens of a batch that ends within `seconds` by `bound`.

        But never so few that what a batch costs besides its tokens is more than a fifth of it.
        """
        batch_s, token_s, square_s = self._seconds
        per_token_s = token_s + square_s * squares_per_token
        if per_token_s == 0:
            return math.inf
        return max(seconds / self._headroom - batch_s, _LEAST_WORK * batch_s) / per_token_s

    def relax(self) -> None:
        """Promise a little less time. For when the model refuses what an idle server could try: it learns from batches
        only, so a bad hour must not leave it refusing everything for ever.
        """
        if self._headroom > 1.0:
            self._headroom = max(1.0, 0.9 * self._headroom)
        elif self._products.any():
            self._targets *= self._forgetting
            self._solve()

    def observe(self, tokens: int, squares: int, seconds: float) -> None:
        """Learn from a batch that has run. What cannot be a time is ignored."""
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
        # By what was expected: by what it took, of two batches alike the quick one would count more, a hundred times more where
        # its text was known, and the model would hardly hear of the slow ones.
        weight = 1.0 / max(expected_s, _LEAST_S) ** 2
        self._products += weight * np.outer(features, features)
        self._targets += weight * seconds * features

    def _solve(self) -> None:
        """Least squares over the features whose coefficient is not negative."""
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
