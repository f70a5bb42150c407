"""Logits to labels, scores and character spans."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from hplm.core.wire import LabelledSpan

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]
Probabilities = npt.NDArray[np.float64]
# Logits, in more digits where they need them.
Scores = Logits | npt.NDArray[np.float64]
FORBIDDEN = -1e4
# Of logits beyond it a probability may leave nothing in float64, whose smallest number is about exp(-745).
LARGEST_LOGIT = 150.0


def softmax(logits: Logits) -> Logits:
    """Probabilities over the last axis."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities: Logits = shifted / shifted.sum(axis=-1, keepdims=True)
    return probabilities


def decode_classification(logits: Logits, labels: Sequence[str], tokens: Tokens) -> list[LabelledSpan]:
    """`logits` `[1, labels]` -> the most probable class over the characters that were read."""
    probabilities = softmax(logits[0])
    best = int(probabilities.argmax())
    return [LabelledSpan(labels[best], float(probabilities[best]), 0, _end(tokens))]


def decode_regression(logits: Logits, labels: Sequence[str], tokens: Tokens) -> list[LabelledSpan]:
    """`logits` `[1, 1]` -> the value itself as the score of the only label, over the characters that were read."""
    return [LabelledSpan(labels[0], float(logits[0, 0]), 0, _end(tokens))]


def decode_tagging(
    logits: Logits, labels: Sequence[str], tokens: Tokens, transitions: Logits | None = None
) -> list[LabelledSpan]:
    """`logits` `[T, labels]` over B-, I- and O tags -> entities.

    A word's logits are its first token's. Of all sequences of tags in which entities begin with their B- tag, the best by the
    sum of logits and `transitions` (`[1 + labels, labels]`: of the first word's tag, then from each tag to each; None is no
    preference) is taken. An entity's score is the mean over its words of the tag's probability among all sequences.
    """
    words = word_ranges(tokens)
    if not words:
        return []
    emissions = logits[[first for first, _ in words]]
    if not _are_moderate(emissions):
        # Sums of the largest would be infinite.
        emissions = emissions.astype(np.float64)
    moves = beginnings(tuple(labels)) + (0.0 if transitions is None else transitions)
    path = best_path(emissions, moves)
    if not any("-" in labels[tag] for tag in path):
        return []
    probabilities = marginals(emissions, moves)
    entities: list[LabelledSpan] = []
    open_type, scores, start, end = "", [0.0], 0, 0

    def close() -> None:
        if open_type:
            entities.append(LabelledSpan(open_type, float(np.mean(scores)), start, end))

    for word, ((first, last), tag) in enumerate(zip(words, path, strict=True)):
        prefix, _, kind = labels[tag].partition("-")
        score = float(probabilities[word, tag])
        if prefix == "I" and kind == open_type:
            scores.append(score)
        else:
            close()
            open_type, scores, start = kind, [score], int(tokens[first, 0])
        end = int(tokens[last - 1, 1])
    close()
    return entities


@lru_cache(maxsize=64)
def beginnings(labels: tuple[str, ...]) -> Logits:
    """Transitions `[1 + labels, labels]` that forbid an I- tag unless its B- or itself is before it; 0 elsewhere.

    An I- tag of a type that has no B- tag may stand anywhere.
    """
    moves = np.zeros((1 + len(labels), len(labels)), np.float32)
    for to, label in enumerate(labels):
        prefix, _, kind = label.partition("-")
        if prefix == "I" and f"B-{kind}" in labels:
            moves[:, to] = FORBIDDEN
            moves[[1 + labels.index(before) for before in (f"B-{kind}", label)], to] = 0.0
    moves.flags.writeable = False
    return moves


def best_path(emissions: Scores, moves: Logits) -> list[int]:
    """The sequence of tags of the highest sum (Viterbi): `emissions` `[words, labels]`, `moves` `[1 + labels, labels]`."""
    to_from = np.ascontiguousarray(moves[1:].T)
    tags = np.arange(len(to_from))
    best = emissions[0] + moves[0]
    came_from = []
    for emission in emissions[1:]:
        sums = to_from + best
        came_from.append(sums.argmax(1))
        best = sums[tags, came_from[-1]] + emission
    path = [int(best.argmax())]
    for before in reversed(came_from):
        path.append(int(before[path[-1]]))
    return path[::-1]


def marginals(emissions: Scores, moves: Logits) -> Probabilities:
    """Probability `[words, labels]` of each word's tag, summed over all sequences (forward-backward)."""
    # Several times as fast as with logarithms, which hardly any tagging needs.
    if _are_moderate(emissions):
        with np.errstate(invalid="ignore"):
            probabilities = _marginals_of_exponents(emissions, moves)
        if np.isfinite(probabilities).all():
            return probabilities
    return marginals_in_logarithms(emissions, moves)


def marginals_in_logarithms(emissions: Scores, moves: Logits) -> Probabilities:
    """As `marginals`, of all that is finite."""
    each, between = emissions.astype(np.float64), moves[1:].astype(np.float64)
    forward, backward = np.empty_like(each), np.zeros_like(each)
    forward[0] = each[0] + moves[0]
    for t in range(1, len(each)):
        forward[t] = _log_sum(forward[t - 1][:, None] + between, 0) + each[t]
    for t in range(len(each) - 2, -1, -1):
        backward[t] = _log_sum(between + each[t + 1] + backward[t + 1], 1)
    both = forward + backward
    probabilities: Probabilities = np.exp(both - _log_sum(both, 1)[:, None])
    return probabilities


def _log_sum(logarithms: Probabilities, axis: int) -> Probabilities:
    """Of each row or column the logarithm of the sum; `np.logaddexp.reduce` takes five times as long."""
    most = logarithms.max(axis, keepdims=True)
    total: Probabilities = np.log(np.exp(logarithms - most).sum(axis)) + most.squeeze(axis)
    return total


def _are_moderate(emissions: Scores) -> bool:
    return bool(np.abs(emissions).max() <= LARGEST_LOGIT)


def _marginals_of_exponents(emissions: Scores, moves: Logits) -> Probabilities:
    # Not by np.float64(): of an array of one element that makes a number.
    likely = np.exp((emissions - emissions.max(1, keepdims=True)).astype(np.float64))
    between = np.exp((moves[1:] - moves.max()).astype(np.float64))
    forward = np.empty_like(likely)
    forward[0] = likely[0] * np.exp((moves[0] - moves.max()).astype(np.float64))
    # Only ratios matter: sums of 1 keep what is multiplied up from vanishing.
    forward[0] /= forward[0].sum()
    for t in range(1, len(likely)):
        forward[t] = (forward[t - 1] @ between) * likely[t]
        forward[t] /= forward[t].sum()
    backward = np.ones_like(likely)
    for t in range(len(likely) - 2, -1, -1):
        backward[t] = between @ (likely[t + 1] * backward[t + 1])
        backward[t] /= backward[t].sum()
    both = forward * backward
    probabilities: Probabilities = both / both.sum(1, keepdims=True)
    return probabilities


def word_logits(found: Logits, num_labels: int, tokens: Tokens) -> Logits:
    """What a tagging's head gives for tokens -> logits of words, at each of their tokens: `[T, n * labels]` -> `[T, labels]`.

    With n 1, `found` as it is. Else a head has outputs for n words, the word's own in the middle: each is the mean over that
    word's tokens, and they are summed up; beyond an end of the text there is nothing to add. Tokens of no word have zeros.
    """
    window = found.shape[1] // num_labels
    if window == 1:
        return found
    logits = np.zeros((len(found), num_labels), np.float32)
    words = np.array(word_ranges(tokens), np.int64).reshape(-1, 2)
    if not len(words):
        return logits
    sizes = words[:, 1] - words[:, 0]
    # Sums from each word's first token to behind its last, and from there to the next word, which nobody wants; the row of
    # zeros is what lies behind the last token.
    sums = np.add.reduceat(np.concatenate([found, np.zeros_like(found[:1])]), words.ravel())[::2]
    means: Logits = sums / np.float32(sizes[:, None])
    logits[tokens[:, 2] >= 0] = np.repeat(sum_around(means.reshape(len(words), window, num_labels)), sizes, axis=0)
    return logits


def sum_around(means: Logits) -> Logits:
    """Of each word what its neighbours' outputs say of it and its own: `[words, n, labels]` -> `[words, labels]`."""
    count, window = means.shape[:2]
    total = np.zeros_like(means[:, 0])
    for place, away in enumerate(range(-(window // 2), window // 2 + 1)):
        first, end = max(0, -away), count - max(0, away)
        if first < end:
            total[first:end] += means[first + away : end + away, place]
    return total


def answer_of(
    task: str, found: Logits, labels: Sequence[str], tokens: Tokens, transitions: Logits | None = None
) -> tuple[list[LabelledSpan], Logits]:
    """What a head gave for a text -> its answer, and the logits `[1 or T, labels]` that it is read from.

    `transitions` are a tagging's, see `decode_tagging`.
    """
    if task == "tagging":
        logits = word_logits(found, len(labels), tokens)
        return decode_tagging(logits, labels, tokens, transitions), logits
    decode = decode_regression if task == "regression" else decode_classification
    return decode(found, labels, tokens), found


def word_ranges(tokens: Tokens) -> list[tuple[int, int]]:
    """First and one past the last token of each word of `[T, 3]` tokens; special tokens are no words."""
    words = tokens[:, 2]
    edges = np.flatnonzero(np.diff(words, prepend=-2, append=-2))
    return [(int(a), int(b)) for a, b in itertools.pairwise(edges) if words[a] >= 0]


def _end(tokens: Tokens) -> int:
    """One past the last character that was read."""
    return int(tokens[:, 1].max(initial=0))
