"""Logits to labels, scores and character spans."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hplm.wire import LabelledSpan

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]


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


def decode_tagging(logits: Logits, labels: Sequence[str], tokens: Tokens) -> list[LabelledSpan]:
    """`logits` `[T, labels]` over B-, I- and O tags -> entities.

    A word's tag is its first token's; an I- tag that does not go on with its type opens an entity of its own, as the
    CoNLL scorer reads it.
    """
    probabilities = softmax(logits)
    entities: list[LabelledSpan] = []
    open_type, scores, start, end = "", [0.0], 0, 0

    def close() -> None:
        if open_type:
            entities.append(LabelledSpan(open_type, float(np.mean(scores)), start, end))

    for first, last in word_ranges(tokens):
        best = int(probabilities[first].argmax())
        prefix, _, kind = labels[best].partition("-")
        score = float(probabilities[first, best])
        if prefix == "I" and kind == open_type:
            scores.append(score)
        else:
            close()
            open_type, scores, start = kind, [score], int(tokens[first, 0])
        end = int(tokens[last - 1, 1])
    close()
    return entities


# By the task of a tenant's card.
DECODERS: Mapping[str, Callable[[Logits, Sequence[str], Tokens], list[LabelledSpan]]] = {
    "classification": decode_classification,
    "regression": decode_regression,
    "tagging": decode_tagging,
}


def word_ranges(tokens: Tokens) -> list[tuple[int, int]]:
    """First and one past the last token of each word of `[T, 3]` tokens; special tokens are no words."""
    words = tokens[:, 2]
    edges = np.flatnonzero(np.diff(words, prepend=-2, append=-2))
    return [(int(a), int(b)) for a, b in itertools.pairwise(edges) if words[a] >= 0]


def _end(tokens: Tokens) -> int:
    """One past the last character that was read."""
    return int(tokens[:, 1].max(initial=0))
