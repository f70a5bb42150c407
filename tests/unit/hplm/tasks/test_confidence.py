"""Confidences and likelihoods of answers, against sums over all answers there are."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from hplm.errors import ConfigError
from hplm.tasks.tag_sequences import best_path, forbidden_transitions
from hplm.tasks.task import IGNORED
from hplm.tasks.task_loader import task_named

LABELS = ("O", "B-city", "I-city")
# [CLS], three words of which the second has two tokens, [SEP].
TOKENS = np.array([(0, 0, -1), (0, 2, 0), (3, 5, 1), (5, 7, 1), (8, 9, 2), (0, 0, -1)], np.int32)
FIRST = [1, 2, 4]


def probabilities(
    outputs: npt.NDArray[np.float32], transitions: npt.NDArray[np.float32], temperature: float
) -> dict[tuple[int, ...], float]:
    """Return every allowed sequence of tags with its probability, by enumeration."""
    allowed = forbidden_transitions(LABELS)
    scores = {}
    for tags in itertools.product(range(3), repeat=3):
        steps = list(zip((0, *(1 + tag for tag in tags)), tags, strict=False))
        if all(allowed[step] == 0 for step in steps):
            score = sum(outputs[place, tag] for place, tag in zip(FIRST, tags, strict=True))
            scores[tags] = np.exp((score + sum(transitions[step] for step in steps)) / temperature)
    return {tags: value / sum(scores.values()) for tags, value in scores.items()}


def test_a_classification_has_the_largest_probability_at_the_temperature() -> None:
    outputs = np.array([[1.0, 3.0, 2.0]], np.float32)
    expected = np.exp(outputs[0] / 2) / np.exp(outputs[0] / 2).sum()
    task = task_named("classification")
    assert task.confidence(outputs, ("a", "b", "c"), TOKENS, temperature=2.0) == pytest.approx(expected[1])
    found = task.log_likelihood(outputs, ("a", "b", "c"), TOKENS, np.array([2]), temperature=2.0)
    assert found == pytest.approx(np.log(expected[2]))


def test_the_largest_logits_have_a_confidence() -> None:
    outputs = np.array([[3e38, -3e38]], np.float32)
    assert task_named("classification").confidence(outputs, ("a", "b"), TOKENS, temperature=0.5) == 1.0
    assert task_named("tagging").confidence(np.tile(outputs, (6, 1)), ("O", "B-a"), TOKENS) == 1.0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("has_transitions", [False, True])
def test_a_tagging_has_the_probability_of_its_whole_sequence(temperature: float, has_transitions: bool) -> None:
    rng = np.random.default_rng(5)
    task = task_named("tagging")
    for _ in range(20):
        outputs = rng.normal(0, 2, (6, 3)).astype(np.float32)
        transitions = rng.normal(0, 2, (4, 3)).astype(np.float32) if has_transitions else np.zeros((4, 3), np.float32)
        given = transitions if has_transitions else None
        expected = probabilities(outputs, transitions, temperature)
        answered = tuple(best_path(outputs[FIRST], forbidden_transitions(LABELS) + transitions))
        assert task.confidence(outputs, LABELS, TOKENS, given, temperature) == pytest.approx(expected[answered])
        for tags, probability in expected.items():
            targets = np.full(6, IGNORED)
            targets[FIRST] = tags
            found = task.log_likelihood(outputs, LABELS, TOKENS, targets, given, temperature)
            assert found == pytest.approx(np.log(probability))


def test_tags_without_forbidden_sequences_multiply_their_probabilities() -> None:
    outputs = np.random.default_rng(6).normal(0, 2, (6, 2)).astype(np.float32)
    each = np.exp(outputs[FIRST]) / np.exp(outputs[FIRST]).sum(1, keepdims=True)
    assert task_named("tagging").confidence(outputs, ("O", "B-a"), TOKENS) == pytest.approx(each.max(1).prod())


def test_a_sentence_without_a_word_is_sure() -> None:
    tokens = np.full((2, 3), -1, np.int32)
    assert task_named("tagging").confidence(np.zeros((2, 3), np.float32), LABELS, tokens) == 1.0


def test_a_regression_has_no_confidence() -> None:
    task = task_named("regression")
    assert not task.has_confidence
    with pytest.raises(ConfigError, match="no confidence"):
        task.confidence(np.zeros((1, 1), np.float32), ("score",), TOKENS)
    with pytest.raises(ConfigError, match="no likelihood"):
        task.log_likelihood(np.zeros((1, 1), np.float32), ("score",), TOKENS, np.array([0]))
