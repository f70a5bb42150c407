"""Word pruning: which words of a text or pair the next level reads."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.cascade.pruning import prune
from tests import tiny


def words_of(text: str, ratios: Sequence[float], offset: int = 0) -> npt.NDArray[np.float32]:
    """The importance `[words, 3]` of a text whose words are runs of letters and single other characters."""
    found = [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]
    assert len(found) == len(ratios)
    return np.array([(a + offset, b + offset, r) for (a, b), r in zip(found, ratios, strict=True)], np.float32).reshape(
        -1, 3
    )


@pytest.mark.parametrize(
    ("text", "ratios", "wanted"),
    [
        ("the red cat sleeps", [0.2, 2, 0.2, 2], "red sleeps"),
        ("the red  cat", [2, 0.2, 2], "the  cat"),
        ("red, blue", [2, 0.2, 2], "red blue"),
        ("don't stop", [2, 0.2, 2, 2], "don t stop"),
        ("one\ntwo\nthree", [2, 0.1, 2], "one\nthree"),
        (" the cat ", [0.1, 2], "cat "),
        ("the cat \n", [2, 0.1], "the"),
        ("the cat", [2, 2], "the cat"),
        ("Zoë naïve 😀 wörld", [2, 0.1, 2, 0.1], "Zoë 😀"),
    ],
)
def test_words_at_or_below_alpha_go_and_the_others_stay_whole(text: str, ratios: list[float], wanted: str) -> None:
    assert prune(text, words_of(text, ratios), 0.5) == wanted


def test_a_ratio_that_equals_alpha_is_not_enough() -> None:
    assert prune("red cat", words_of("red cat", [0.5, 0.75]), 0.5) == "cat"


def test_alpha_0_prunes_nothing() -> None:
    assert prune("red cat", words_of("red cat", [0, 0]), 0.0) == "red cat"


def test_a_text_is_never_emptied() -> None:
    assert prune("red cat runs", words_of("red cat runs", [0.1, 0.3, 0.3]), 0.9) == "cat"


def test_neither_text_of_a_pair_is_emptied_and_both_are_pruned() -> None:
    first, second = "the red cat", "a dog"
    importance = np.concatenate([words_of(first, [0.1, 3, 0.2]), words_of(second, [0.2, 0.1], len(first) + 1)])
    assert prune((first, second), importance, 0.5) == ("red", "a")


def test_what_the_level_has_not_read_stays() -> None:
    text = "the red cat sleeps today"
    assert prune(text, words_of("the red cat", [0.1, 2, 0.1]), 0.5) == "red sleeps today"
    # The cut goes through `cat` and through `sleeps`.
    assert prune(text, words_of("the red ca", [0.1, 2, 0.1]), 0.5) == "red sleeps today"
    assert prune(text, words_of("the red cat sl", [0.1, 2, 0.1, 2]), 0.5) == "red sleeps today"


def test_a_text_without_a_word_is_left_as_it_is() -> None:
    assert prune("\u200b \u200b", np.empty((0, 3), np.float32), 0.5) == "\u200b \u200b"


@given(st.text(min_size=1, max_size=40), st.data(), st.floats(0.1, 2.0))
def test_the_kept_words_are_the_words_of_the_pruned_text(text: str, data: st.DataObject, alpha: float) -> None:
    tokenizer = tiny.tokenizer()
    words = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    ratios = [data.draw(st.floats(0, 3, width=32)) for _ in words]
    importance = np.array([(*span, ratio) for (_, span), ratio in zip(words, ratios, strict=True)], np.float32)
    pruned = prune(text, importance.reshape(-1, 3), alpha)
    assert isinstance(pruned, str)
    kept = [word for (word, _), ratio in zip(words, ratios, strict=True) if ratio > alpha]
    if not kept and words:
        kept = [words[int(np.argmax(ratios))][0]]
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(pruned)] == kept
