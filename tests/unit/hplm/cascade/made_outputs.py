"""Outputs of made-up levels, whose answers and calibration are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hplm.cascade.level_outputs import LevelOutputs, PartOutputs

# A level's logits are those of calibrated probabilities, times its temperature.
TEMPERATURES = (1.5, 0.8, 1.2)


def made_level(
    gold: np.ndarray, skill: float, temperature: float, rng: np.random.Generator, labels: int, tokens: np.ndarray
) -> LevelOutputs:
    """A level whose confidences are calibrated; with more `skill` it is right more often."""
    sure = rng.beta(skill, 1.0, len(gold)) * (1 - 1 / labels) + 1 / labels
    is_right = rng.random(len(gold)) < sure
    answered = np.where(is_right, gold, (gold + rng.integers(1, labels, len(gold))) % labels)
    probabilities = np.repeat(((1 - sure) / (labels - 1))[:, None], labels, 1)
    probabilities[np.arange(len(gold)), answered] = sure
    logits = (np.log(probabilities) * temperature).astype(np.float32)
    confidence = probabilities.max(1).astype(np.float32)
    right = logits.argmax(1) == gold
    return LevelOutputs(logits, confidence, right, tokens, np.zeros((len(gold), 0), np.int64))


def made_part(
    count: int, seed: int = 0, skills: Sequence[float] = (4.0, 12.0), labels: int = 3, alphas: Sequence[float] = ()
) -> PartOutputs:
    """The answers of levels with these skills to `count` texts of 10 to 40 tokens; pruned texts have half of them."""
    rng = np.random.default_rng(seed)
    gold = rng.integers(0, labels, count)
    tokens = rng.integers(10, 41, count)
    whole = [made_level(gold, skill, TEMPERATURES[level], rng, labels, tokens) for level, skill in enumerate(skills)]
    pruned = {
        (by, reader, alpha): made_level(gold, skills[reader], TEMPERATURES[reader], rng, labels, tokens // 2)
        for by in range(len(skills))
        for reader in range(by + 1, len(skills))
        for alpha in alphas
    }
    return PartOutputs(tuple(whole), gold, rng.random((count, len(skills))), pruned)
