"""Scores against counts by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from hplm.core.text import TextEncoder
from hplm.core.wire import LabelledSpan
from hplm.tasks.classification import accuracy, confusion, macro_f1
from hplm.tasks.entity_scores import entity_f1, entity_types
from hplm.tasks.examples import Entity, LabelledText
from hplm.tasks.regression import pearson, spearman
from hplm.tasks.task_loader import TASKS
from hplm.tasks.words import word_ranges
from tests import tiny

GOLD = [[Entity("X", 0, 3), Entity("Y", 4, 6)], [Entity("X", 1, 2)]]
FOUND = [[LabelledSpan("X", 0.9, 0, 3), LabelledSpan("Y", 0.9, 4, 7)], [LabelledSpan("Z", 0.9, 1, 2)]]


def test_accuracy_and_f1_of_classes() -> None:
    assert accuracy(["a", "b", "b"], ["a", "b", "a"]) == pytest.approx(2 / 3)
    assert macro_f1(["a", "b", "b"], ["a", "b", "a"]) == pytest.approx((2 / 3 + 2 / 3) / 2)


def test_a_confusion_counts_what_happened_and_nothing_else() -> None:
    found = confusion(["a", "b", "b", "c"], ["a", "b", "a", "c"])
    assert found == {"a": {"a": 1}, "b": {"a": 1, "b": 1}, "c": {"c": 1}}


def test_f1_of_entities_is_over_type_and_both_ends() -> None:
    assert entity_f1(GOLD, FOUND) == pytest.approx(2 * 1 / (3 + 3))
    assert entity_f1([[]], [[]]) == 1.0


@pytest.mark.parametrize(
    ("text", "start", "end", "words", "score"),
    [
        ("a cafe\u0301 b", 2, 7, (1, 1), 1.0),
        ("\u200bAnna sings \ufeff", 0, 13, (0, 1), 1.0),
        ("the cat", 0, 3, (0, 0), 1.0),
        ("the cats", 4, 7, (1, 1), 0.0),
        ("the cat " * 30, 0, 239, (0, 37), 0.0),
        ("the \u0301 cat", 4, 5, (1, 1), 0.0),
    ],
    ids=["accent", "around", "plain", "within-a-word", "cut", "of-nothing"],
)
def test_an_entity_is_found_whatever_the_tokenizer_drops_at_its_ends(
    tmp_path: Path, text: str, start: int, end: int, words: tuple[int, int], score: float
) -> None:
    tiny.tokenizer().save(str(tmp_path / "tokenizer.json"))
    (encoded,) = TextEncoder(tmp_path / "tokenizer.json", 40).encode([text])
    gold = LabelledText(text, entities=(Entity("X", start, end),))
    ranges = word_ranges(encoded.tokens)
    first, last = ranges[words[0]][0], ranges[words[1]][1] - 1
    answer = LabelledSpan("X", 0.9, int(encoded.tokens[first, 0]), int(encoded.tokens[last, 1]))
    assert TASKS["tagging"].scores([gold], [encoded.tokens], [[answer]]) == {"f1": score}


def test_each_entity_type_has_its_own_figures() -> None:
    types = entity_types(GOLD, FOUND)
    assert types["X"] == {"precision": 1.0, "recall": 0.5, "f1": pytest.approx(2 / 3), "gold": 2, "found": 1}
    assert types["Y"]["f1"] == 0.0
    assert types["Z"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "gold": 0, "found": 1}


def test_correlations_of_values_and_of_ranks() -> None:
    assert pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1.0)
    assert pearson([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert spearman([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1.0)
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert pearson([1, 1, 1], [1, 2, 3]) == 0.0
