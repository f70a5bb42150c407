"""Logits to labels."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.core.wire import LabelledSpan
from hplm.engine import reference
from hplm.tasks.tag_sequences import best_path, forbidden_transitions, marginals, marginals_in_logarithms
from hplm.tasks.tagging import entities_in
from hplm.tasks.task_loader import TASKS
from hplm.tasks.words import word_logits, word_ranges

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
    return [(span.label, span.start, span.end) for span in entities_in(logits_of(*tags), TAGS, TOKENS)]


def test_words_of_one_entity_are_one_span_of_characters() -> None:
    assert spans("B-PER", "I-PER", "O", "O", "B-LOC") == [("PER", 0, 8), ("LOC", 18, 22)]


def test_an_entity_begins_with_its_beginning_tag_however_sure_the_inside_tag_is() -> None:
    logits = logits_of("I-PER", "I-PER", "O", "O", "O")
    logits[1, TAGS.index("B-PER")] = 15.0
    assert [(s.label, s.start, s.end) for s in entities_in(logits, TAGS, TOKENS)] == [("PER", 0, 8)]


def test_an_inside_tag_without_a_beginning_tag_among_the_labels_opens_an_entity() -> None:
    tags = ("O", "I-PER")
    logits = np.zeros((len(TOKENS), 2), np.float32)
    logits[[1, 3], 1] = 5.0
    logits[4:, 0] = 5.0
    assert [(s.start, s.end) for s in entities_in(logits, tags, TOKENS)] == [(0, 8)]


def test_transitions_move_what_words_alone_would_say() -> None:
    logits = logits_of("B-PER", "O", "O", "O", "O")
    logits[3, TAGS.index("I-PER")] = 19.0
    moves = np.zeros((6, 5), np.float32)
    assert [s.end for s in entities_in(logits, TAGS, TOKENS, moves)] == [4]
    moves[1 + TAGS.index("B-PER"), TAGS.index("I-PER")] = 2.0
    (entity,) = entities_in(logits, TAGS, TOKENS, moves)
    assert (entity.start, entity.end) == (0, 8)
    # The second word's tag: 19 + 2 against 20, and nothing else is near.
    assert entity.score == pytest.approx((1 + 1 / (1 + np.exp(-1))) / 2, abs=1e-4)


def test_a_score_is_no_surer_than_all_sequences_together_make_it() -> None:
    tags, tokens = ("O", "B-X", "I-X"), np.array([(0, 1, 0), (2, 3, 1), (4, 5, 2)], dtype=np.int32)
    logits = np.array([[3, 0, 0], [0, 0, 3.05], [3, 0, 0]], dtype=np.float32)
    (entity,) = entities_in(logits, tags, tokens)
    assert (entity.start, entity.end) == (0, 3)
    # Of all sequences that may be: tag 2 only after 1 or 2.
    every = itertools.product(range(3), repeat=3)
    paths = [p for p in every if all(b != 2 or a in (1, 2) for a, b in zip((0, *p), p, strict=False))]
    likely = np.array([np.exp(sum(logits[t, tag] for t, tag in enumerate(p))) for p in paths])
    of_word = [sum(x for x, p in zip(likely, paths, strict=True) if p[t] == tag) for t, tag in ((0, 1), (1, 2))]
    assert entity.score == pytest.approx(np.mean(of_word) / likely.sum(), abs=1e-5)
    assert entity.score < 0.4


@given(st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_the_probability_of_a_tag_is_that_of_all_sequences_with_it(words: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    emissions = rng.normal(0, 3, (words, len(TAGS))).astype(np.float32)
    moves = rng.normal(0, 2, (1 + len(TAGS), len(TAGS))).astype(np.float32) + forbidden_transitions(TAGS)
    wanted = np.zeros((words, len(TAGS)))
    for path in itertools.product(range(len(TAGS)), repeat=words):
        places = zip([0, *(1 + tag for tag in path)], path, strict=False)
        total = sum(emissions[t, tag] for t, tag in enumerate(path)) + sum(moves[place] for place in places)
        wanted[np.arange(words), path] += np.exp(np.float64(total))
    wanted /= wanted.sum(1, keepdims=True)
    for of_all in (marginals, marginals_in_logarithms):
        np.testing.assert_allclose(of_all(emissions, moves), wanted, atol=1e-5)


# As an error, numpy takes it back and makes an array after all: a test of the rest would pass where a server fails.
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
@pytest.mark.parametrize(
    ("label", "found"),
    [("O", []), ("I-X", [(0, 22)]), ("B-X", [(0, 4), (5, 8), (9, 14), (15, 17), (18, 22)])],
)
def test_a_tagging_of_one_label_is_sure_of_it(label: str, found: list[tuple[int, int]]) -> None:
    answer = entities_in(np.ones((len(TOKENS), 1), np.float32), (label,), TOKENS)
    assert answer == [LabelledSpan("X", 1.0, start, end) for start, end in found]


def test_very_sure_logits_have_probabilities_too() -> None:
    emissions = np.zeros((40, len(TAGS)), np.float32)
    emissions[::2, 0], emissions[1::2, 2] = 120.0, 120.0
    found = marginals(emissions, forbidden_transitions(TAGS))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found.sum(1), 1.0)


@given(st.sampled_from([1.0, 100.0, 150.0, 400.0, 1e4, 1e30, 1e37]), st.integers(0, 2**32 - 1), st.booleans())
def test_no_finite_logits_have_scores_that_are_no_numbers(scale: float, seed: int, has_transitions: bool) -> None:
    rng = np.random.default_rng(seed)
    tokens = np.array([(2 * word, 2 * word + 1, word) for word in range(20)], np.int32)
    logits = (rng.normal(size=(20, len(TAGS))) * scale).astype(np.float32)
    moves = (rng.normal(size=(1 + len(TAGS), len(TAGS))) * min(scale, 1e4)).astype(np.float32)
    for entity in entities_in(logits, TAGS, tokens, moves if has_transitions else None):
        assert 0 <= entity.score <= 1 + 1e-6


def test_a_text_without_words_has_no_entities() -> None:
    assert entities_in(np.ones((2, 5), np.float32), TAGS, np.full((2, 3), -1, np.int32)) == []


@given(st.integers(1, 4), st.integers(0, 2**32 - 1), st.booleans())
def test_the_best_path_is_the_best_of_all(words: int, seed: int, constrained: bool) -> None:
    rng = np.random.default_rng(seed)
    emissions = rng.normal(0, 3, (words, len(TAGS))).astype(np.float32)
    moves = rng.normal(0, 2, (1 + len(TAGS), len(TAGS))).astype(np.float32)
    if constrained:
        moves = moves + forbidden_transitions(TAGS)

    def total(path: tuple[int, ...]) -> float:
        places = zip([0, *(1 + tag for tag in path)], path, strict=False)
        return float(sum(emissions[t, tag] for t, tag in enumerate(path)) + sum(moves[place] for place in places))

    best = max(itertools.product(range(len(TAGS)), repeat=words), key=total)
    assert total(tuple(best_path(emissions, moves))) == pytest.approx(total(best), abs=1e-3)


def test_a_beginning_tag_starts_a_new_entity_of_the_same_type() -> None:
    assert spans("B-PER", "B-PER", "O", "O", "O") == [("PER", 0, 4), ("PER", 5, 8)]


def test_no_entity_is_an_empty_answer() -> None:
    assert spans("O", "O", "O", "O", "O") == []


def test_a_classification_is_one_label_over_what_was_read() -> None:
    answer, _ = TASKS["classification"].decode(np.array([[0.0, 2.0]], dtype=np.float32), ("no", "yes"), TOKENS)
    assert answer == [LabelledSpan("yes", answer[0].score, 0, 22)]
    assert abs(answer[0].score - 1 / (1 + np.exp(-2))) < 1e-6


def test_a_regression_is_its_value_over_what_was_read() -> None:
    answer, _ = TASKS["regression"].decode(np.array([[-3.5]], dtype=np.float32), ("score",), TOKENS)
    assert answer == [LabelledSpan("score", -3.5, 0, 22)]


@pytest.mark.parametrize("task", TASKS)
def test_each_task_has_an_answer_of_its_own(task: str) -> None:
    found = np.array([[0.0, 2.0, 0.0]] * (len(TOKENS) if task == "tagging" else 1), np.float32)
    spans, _ = TASKS[task].decode(found, TAGS[:3], TOKENS)
    read = {"classification": (TAGS[1], 0, 22), "regression": (TAGS[0], 0, 22)}
    assert (spans[0].label, spans[0].start, spans[0].end) == read.get(task, ("PER", 0, 4))


@st.composite
def texts(draw: st.DrawFn) -> np.ndarray:
    """Tokens of words of some pieces each, special ones before and behind."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=6))
    words = [number for number, size in enumerate(sizes) for _ in range(size)]
    return np.array([(0, 0, -1), *((i, i + 1, word) for i, word in enumerate(words)), (0, 0, -1)], np.int32)


@given(texts(), st.sampled_from([3, 5, 9]), st.integers(1, 4), st.integers(0, 99))
def test_logits_of_words_are_those_of_the_slow_twin(tokens: np.ndarray, window: int, labels: int, seed: int) -> None:
    found = np.random.default_rng(seed).normal(0, 3, (len(tokens), window * labels)).astype(np.float32)
    got = word_logits(found, labels, tokens)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, reference.word_logits(found, labels, tokens), atol=1e-5)


def test_a_tag_is_told_from_the_words_beside_it_and_all_tokens_of_its_own() -> None:
    found = np.zeros((len(TOKENS), 3, len(TAGS)), np.float32)
    found[:, 1, 0] = 1.0
    # The second piece of the first word alone says that a person begins, and the second word that a place begins behind it.
    found[2, 1, TAGS.index("B-PER")] = 8.0
    found[3, 0, TAGS.index("B-LOC")] = 8.0
    spans, logits = TASKS["tagging"].decode(found.reshape(len(TOKENS), -1), TAGS, TOKENS)
    assert [(one.label, one.start, one.end) for one in spans] == [("PER", 0, 4), ("LOC", 9, 14)]
    assert logits.shape == (len(TOKENS), len(TAGS))
    # A client that asks for logits finds a word's at each of its tokens.
    for first, last in word_ranges(TOKENS):
        np.testing.assert_array_equal(logits[first:last], np.broadcast_to(logits[first], (last - first, len(TAGS))))
    assert not logits[[0, -1]].any()
