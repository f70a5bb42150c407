"""Resamples of the contract."""

from __future__ import annotations

import numpy as np
import pytest
from hplm_builder.evaluation.cascade.answered import Booleans, Integers
from hplm_builder.evaluation.cascade.contract import Parts, Resample, contract_row, resample
from scipy.stats import beta

POOL = np.random.default_rng(0).random(3000) < 0.9
PARTS = Parts(seen=600, proof=400)


def clopper_pearson(right: int, examples: int) -> float:
    return float(beta.ppf(0.05, right, examples - right + 1))


def resamples(target: float) -> list[Resample]:
    rng = np.random.default_rng(1)
    return [resample(len(POOL), PARTS, rng, lambda seen: POOL, clopper_pearson, target) for _ in range(400)]


def test_a_bound_of_95_percent_is_kept_in_95_percent_of_resamples() -> None:
    row = contract_row("coins", None, PARTS, len(POOL), resamples(0.0))
    assert row["promised"] == 400
    assert 94 <= row["kept"] <= 99
    assert row["broken"] == pytest.approx(100 - row["kept"])
    # The judge's 2,000 examples have their own chance.
    assert 90 <= row["kept_on_judge"] <= 99


def test_a_target_above_the_truth_is_nearly_always_refused() -> None:
    row = contract_row("coins", 0.92, PARTS, len(POOL), resamples(0.92))
    assert row["promised"] <= 8
    assert row["broken"] <= 2


def test_what_selects_neither_proves_nor_judges() -> None:
    """A choice that answers only the examples that selected it proves nothing and is right about nothing."""

    def choose(seen: Integers) -> Booleans:
        right = np.zeros(1000, np.bool_)
        right[seen] = True
        return right

    found = resample(1000, Parts(500, 200), np.random.default_rng(0), choose, lambda right, count: right / count, 0.0)
    assert found == Resample(0.0, 0.0, 0.0, 0.0)


def test_a_choice_that_is_refused_promises_nothing() -> None:
    found = resample(100, Parts(50, 20), np.random.default_rng(0), lambda seen: None, clopper_pearson, 0.0)
    row = contract_row("coins", 0.99, Parts(50, 20), 100, [found])
    assert (row["promised"], row["broken"]) == (0, 0)
    assert np.isnan(row["kept"])
