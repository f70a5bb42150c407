"""The policies that a cascade is compared with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hplm_builder.evaluation.cascade.answered import LevelAnswers, policy_row
from hplm_builder.evaluation.cascade.policies import (
    ExitAnswers,
    cocktail,
    early_exit,
    infaas,
    single,
    vote,
    vote_weights,
)


def level(base: str, answers: list[int], latency_ms: float, gold: list[int]) -> LevelAnswers:
    probabilities = np.eye(3)[answers] * 0.8 + 0.1
    return LevelAnswers(base, probabilities, np.array(gold), np.full(len(gold), latency_ms))


GOLD = [0, 1, 2, 0]
SMALL = level("small", [0, 1, 0, 1], 4.0, GOLD)
MIDDLE = level("middle", [0, 1, 0, 0], 10.0, GOLD)
LARGE = level("large", [0, 1, 2, 0], 40.0, GOLD)


@pytest.mark.parametrize(("target", "base"), [(0.5, "small"), (0.6, "middle"), (0.9, "large"), (1.1, "large")])
def test_infaas_takes_the_fastest_level_that_meets_the_target_else_the_best(target: float, base: str) -> None:
    levels = [SMALL, MIDDLE, LARGE]
    answered = infaas(levels, levels, target)
    assert answered.chosen == base
    assert answered.accuracy == {"small": 0.5, "middle": 0.75, "large": 1.0}[base]


def test_a_level_votes_with_its_weight_for_the_answer_that_it_gave() -> None:
    weights = np.array([[0.9, 0.2], [0.5, 0.5], [0.3, 0.6]])
    answers = np.array([[0, 1], [1, 0], [1, 1]])
    # 0.9 against 0.5 + 0.6, and 0.5 against 0.2 + 0.6.
    assert vote(answers, weights).tolist() == [1, 1]


def test_a_rare_answer_weighs_as_much_as_the_level_is_accurate() -> None:
    weights = vote_weights([SMALL])
    # 0 was given twice and was right once, 1 likewise, 2 was never given.
    assert weights[0] == pytest.approx([1.5 / 3, 1.5 / 3, 0.5])


def test_cocktail_takes_as_long_as_its_slowest_level_and_costs_as_much_as_all() -> None:
    levels = [SMALL, MIDDLE, LARGE]
    answered = cocktail(levels, levels)
    assert answered.latency_ms.tolist() == [40.0] * 4
    assert answered.cost({"small": 2, "middle": 2, "large": 1}) == pytest.approx(4 / 2 + 10 / 2 + 40)


def exits() -> ExitAnswers:
    """Return two layers: the first is sure and right about half of the texts, and unsure and wrong about the rest."""
    answers = np.array([[0, 1, 0, 1], [0, 1, 1, 0]])
    confidence = np.array([[0.9, 0.9, 0.55, 0.55], [0.9, 0.9, 0.8, 0.8]])
    latency_ms = np.array([[10.0] * 4, [20.0] * 4])
    return ExitAnswers("large", answers, confidence, np.array([0, 1, 1, 0]), latency_ms)


def test_a_text_leaves_after_the_first_layer_that_is_surer_than_the_threshold() -> None:
    assert exits().left_after(0.8).tolist() == [0, 0, 1, 1]
    assert exits().left_after(1.0).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(("target", "mean_ms", "accuracy"), [(0.5, 10.0, 0.5), (0.9, 15.0, 1.0), (1.5, 15.0, 1.0)])
def test_an_early_exit_leaves_at_the_fastest_threshold_that_meets_the_target(
    target: float, mean_ms: float, accuracy: float
) -> None:
    answered = early_exit(exits(), exits(), target)
    assert (answered.latency_ms.mean(), answered.accuracy) == (mean_ms, accuracy)


def test_a_row_has_the_mean_of_the_seeds() -> None:
    slower = replace(single(SMALL, "single small"), latency_ms=np.full(4, 6.0))
    row = policy_row("colours", [single(SMALL, "single small"), slower], {"small": 2.0})
    assert (row["accuracy"], row["mean_ms"], row["cost"]) == (50.0, 5.0, 2.0)
