"""The policies that Tabi is compared with (section 7), as functions of what levels answered.

Each policy chooses its configuration on the texts `seen`, by the same target accuracy, and is judged on the texts `test`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hplm_builder.evaluation.cascade.answered import Answered, Floats, Integers, LevelAnswers

SINGLE_SMALL, SINGLE_LARGE = "single small", "single large"
INFAAS, COCKTAIL, EARLY_EXIT, CASCADE = "INFaaS", "Cocktail", "early exit", "cascade"
# Thresholds of an early exit that are tried: from leaving after the first layer to leaving after the last.
THRESHOLDS = np.linspace(0.0, 1.0, 101)


def single(level: LevelAnswers, policy: str) -> Answered:
    """Answer every text by one level."""
    return Answered(policy, level.base, level.right, level.latency_ms, {level.base: level.latency_ms})


def infaas(seen: Sequence[LevelAnswers], test: Sequence[LevelAnswers], target: float) -> Answered:
    """Answer every text by the fastest single level that meets the target, or by the most accurate one."""
    meeting = [i for i, level in enumerate(seen) if level.accuracy >= target]
    best = (
        min(meeting, key=lambda i: float(seen[i].latency_ms.mean()))
        if meeting
        else max(range(len(seen)), key=lambda i: seen[i].accuracy)
    )
    return single(test[best], INFAAS)


def cocktail(seen: Sequence[LevelAnswers], test: Sequence[LevelAnswers]) -> Answered:
    """Answer every text by a vote of all levels, which compute at the same time: a text takes as long as the slowest level.

    A level's vote weighs as much as the level was right among `seen` when it gave this answer, see `vote_weights`.
    """
    answers = vote(np.stack([level.answers for level in test]), vote_weights(seen))
    return Answered(
        COCKTAIL,
        "+".join(level.base for level in test),
        answers == test[0].gold,
        np.max([level.latency_ms for level in test], axis=0),
        {level.base: level.latency_ms for level in test},
    )


def vote_weights(seen: Sequence[LevelAnswers]) -> Floats:
    """Return `[levels, labels]`: the share of right answers among each level's answers with each label (Cocktail).

    The level's accuracy counts as the result of one further example, so that a rare label has a weight.
    """
    weights = []
    for level in seen:
        labels = level.probabilities.shape[1]
        given = np.bincount(level.answers, minlength=labels)
        right = np.bincount(level.answers[level.right], minlength=labels)
        weights.append((right + level.accuracy) / (given + 1))
    return np.array(weights)


def vote(answers: Integers, weights: Floats) -> Integers:
    """Return for each text the label with the largest sum of weights: `answers` `[levels, N]`, `weights` `[levels, labels]`."""
    sums = np.zeros((answers.shape[1], weights.shape[1]))
    for level, given in zip(weights, answers, strict=True):
        sums[np.arange(len(given)), given] += level[given]
    return sums.argmax(1)


@dataclass(frozen=True)
class ExitAnswers:
    """The answers of a head on each computed layer of one level to N texts, and how sure the heads are: `[layers, N]`.

    `latency_ms` `[layers, N]` is the time of a request that leaves after the layer. The last layer's head is the served one.
    """

    base: str
    answers: Integers
    confidence: Floats
    gold: Integers
    latency_ms: Floats

    def left_after(self, threshold: float) -> Integers:
        """Return the layer after which each text leaves: the first that is surer than `threshold`, else the last."""
        sure = self.confidence > threshold
        sure[-1] = True
        return sure.argmax(0)

    def at(self, threshold: float) -> Answered:
        """Answer every text after the first layer that is surer than `threshold`."""
        layers = self.left_after(threshold)
        texts = np.arange(len(self.gold))
        latency_ms = self.latency_ms[layers, texts]
        right = self.answers[layers, texts] == self.gold
        chosen = f"{self.base}, threshold {threshold:.2f}"
        return Answered(EARLY_EXIT, chosen, right, latency_ms, {self.base: latency_ms})


def early_exit(seen: ExitAnswers, test: ExitAnswers, target: float) -> Answered:
    """Leave at the threshold with the lowest mean latency that meets the target on `seen`, or with the highest accuracy."""
    tried = [(threshold, seen.at(threshold)) for threshold in THRESHOLDS.tolist()]
    meeting = [pair for pair in tried if pair[1].accuracy >= target]
    if meeting:
        threshold, _ = min(meeting, key=lambda pair: float(pair[1].latency_ms.mean()))
    else:
        threshold, _ = max(tried, key=lambda pair: (pair[1].accuracy, -pair[0]))
    return test.at(threshold)
