"""Scores with their chance: the standard error of a difference, and which differences are clear."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hplm_builder.tenants.dev_scores import MOST_GROUPS, DevScore


def accuracy_of(right: Sequence[bool]) -> DevScore:
    return DevScore.of(lambda numbers: float(np.mean([right[i] for i in numbers])), len(right))


def answers(both: int, only: int, neither: int) -> list[bool]:
    return [True] * both + [True] * only + [False] * neither


def test_the_error_of_a_difference_of_accuracies_is_that_of_a_paired_comparison() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.random(40) < 0.8, rng.random(40) < 0.6
    error = accuracy_of(first.tolist()).error_beside(accuracy_of(second.tolist()))
    assert error == pytest.approx(np.std(first.astype(float) - second, ddof=1) / math.sqrt(40))


def test_groups_of_examples_estimate_nearly_the_same_error() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.random(2030) < 0.8, rng.random(2030) < 0.6
    score = accuracy_of(first.tolist())
    assert len(score.without) == MOST_GROUPS
    expected = np.std(first.astype(float) - second, ddof=1) / math.sqrt(2030)
    assert score.error_beside(accuracy_of(second.tolist())) == pytest.approx(expected, rel=0.3)


def test_examples_on_which_models_agree_make_no_error() -> None:
    score = accuracy_of(answers(both=20, only=0, neither=20))
    assert score.error_beside(score) == 0.0
    assert not score.is_clearly_above(score)


@pytest.mark.parametrize("count", [10, 57, 75, 200, 1001])
@pytest.mark.parametrize(("more", "is_clear"), [(1, False), (2, True)])
def test_a_single_example_never_decides_and_two_without_a_counterexample_do(
    count: int, more: int, is_clear: bool
) -> None:
    few = [i % 3 == 0 for i in range(count)]
    missed = [i for i in range(count) if not few[i]]
    for first in (0, 1, len(missed) - more):
        many = [right or i in missed[first : first + more] for i, right in enumerate(few)]
        assert accuracy_of(many).is_clearly_above(accuracy_of(few)) == is_clear
        assert not accuracy_of(few).is_clearly_above(accuracy_of(many))


def test_nothing_is_clear_with_a_single_example() -> None:
    assert not accuracy_of([True]).is_clearly_above(accuracy_of([False]))
