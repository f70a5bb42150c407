"""Logits to labels."""

from __future__ import annotations

from typing import get_args

import numpy as np

from hplm.adapters.tenant import Task
from hplm.decode import DECODERS, decode_classification, decode_regression, decode_tagging
from hplm.wire import LabelledSpan

TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
# [CLS] Ann ##a Lee sings in Rome [SEP]
TOKENS = np.array(
    [(0, 0, -1), (0, 3, 0), (3, 4, 0), (5, 8, 1), (9, 14, 2), (15, 17, 3), (18, 22, 4), (0, 0, -1)], dtype=np.int32
)


def logits_of(*tags: str) -> np.ndarray:
    """Sure logits of one tag a word; continuation tokens say something else, which must not matter."""
    rows = np.zeros((len(TOKENS), len(TAGS)), dtype=np.float32)
    rows[:, 0] = 1.0
    for token, tag in zip((1, 3, 4, 5, 6), tags, strict=True):
        rows[token] = 0.0
        rows[token, TAGS.index(tag)] = 20.0
    rows[2, 3] = 30.0
    return rows


def spans(*tags: str) -> list[tuple[str, int, int]]:
    return [(span.label, span.start, span.end) for span in decode_tagging(logits_of(*tags), TAGS, TOKENS)]


def test_words_of_one_entity_are_one_span_of_characters() -> None:
    assert spans("B-PER", "I-PER", "O", "O", "B-LOC") == [("PER", 0, 8), ("LOC", 18, 22)]


def test_an_inside_tag_that_goes_on_with_nothing_opens_an_entity() -> None:
    assert spans("I-PER", "O", "I-LOC", "O", "O") == [("PER", 0, 4), ("LOC", 9, 14)]


def test_a_beginning_tag_starts_a_new_entity_of_the_same_type() -> None:
    assert spans("B-PER", "B-PER", "O", "O", "O") == [("PER", 0, 4), ("PER", 5, 8)]


def test_no_entity_is_an_empty_answer() -> None:
    assert spans("O", "O", "O", "O", "O") == []


def test_a_classification_is_one_label_over_what_was_read() -> None:
    answer = decode_classification(np.array([[0.0, 2.0]], dtype=np.float32), ("no", "yes"), TOKENS)
    assert answer == [LabelledSpan("yes", answer[0].score, 0, 22)]
    assert abs(answer[0].score - 1 / (1 + np.exp(-2))) < 1e-6


def test_a_regression_is_its_value_over_what_was_read() -> None:
    answer = decode_regression(np.array([[-3.5]], dtype=np.float32), ("score",), TOKENS)
    assert answer == [LabelledSpan("score", -3.5, 0, 22)]


def test_every_task_has_a_decoder() -> None:
    assert set(DECODERS) == set(get_args(Task))
