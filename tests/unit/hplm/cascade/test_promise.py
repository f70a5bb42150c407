"""The bound of a promise."""

from __future__ import annotations

import numpy as np
import pytest

from hplm.cascade.promise import examples_needed, proved_accuracy, right_needed


def test_the_bound_is_the_accuracy_at_which_so_many_right_answers_have_a_chance_of_five_percent() -> None:
    from scipy.stats import binom

    bound = float(proved_accuracy(540, 600))
    assert binom.sf(539, 600, bound) == pytest.approx(0.05, abs=1e-6)
    assert bound == pytest.approx(0.8776, abs=1e-3)


def test_no_right_answer_proves_nothing() -> None:
    assert float(proved_accuracy(0, 10)) == 0.0


def test_the_right_answers_that_are_needed_are_the_fewest_that_prove_the_accuracy() -> None:
    needed = right_needed(0.9, 600)
    assert needed is not None
    assert proved_accuracy(needed, 600) >= 0.9 > proved_accuracy(needed - 1, 600)
    assert right_needed(0.9, 28) is None
    assert right_needed(0.9, 29) == 29
    assert right_needed(0.9, 0) is None


@pytest.mark.parametrize(("expected", "about"), [(0.92, 600), (0.91, 2400)])
def test_two_points_at_ninety_percent_need_about_600_examples_and_one_point_2400(expected: float, about: int) -> None:
    number = examples_needed(0.9, expected)
    assert number is not None
    assert about * 0.8 < number < about * 1.2


def test_an_accuracy_that_is_not_above_the_target_needs_more_examples_than_there_are() -> None:
    assert examples_needed(0.9, 0.9) is None


def test_at_most_one_in_twenty_promises_is_broken() -> None:
    rng = np.random.default_rng(0)
    right = rng.binomial(300, 0.87, 4000)
    assert np.mean(proved_accuracy(right, 300) > 0.87) <= 0.055
