"""The weighted answer of several levels."""

from __future__ import annotations

import numpy as np
import pytest

from hplm.cascade.weighting import log_probabilities, weighted
from hplm.tasks.task import softmax


def test_the_answer_is_the_weighted_mean_of_the_levels_calibrated_probabilities() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 5)).astype(np.float32)
    found = weighted(list(logits), [1.0, 2.0, 0.5], [0.2, 0.3, 0.5])
    wanted = 0.2 * softmax(logits[0]) + 0.3 * softmax(logits[1] / 2) + 0.5 * softmax(logits[2] / 0.5)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert found.sum() == pytest.approx(1)


def test_logits_of_any_size_give_finite_logarithms() -> None:
    found = log_probabilities(weighted([np.array([[1e30, -1e30]], np.float32)], [1.0], [1.0]))
    assert np.isfinite(found).all()
    assert found[0] == 0
