"""The n-grams of texts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hplm.plot.ngrams import centre, fragment, text_ngrams, vectors_of
from tests import tiny

PAD = tiny.config().pad_id
TEXTS = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=12), min_size=1, max_size=5)


@given(TEXTS, st.integers(2, 8))
def test_an_ngram_holds_its_token_in_the_centre_and_never_another_texts(texts: list[list[int]], n: int) -> None:
    ids = np.array([token for text in texts for token in text])
    grams, exists = text_ngrams(ids, [len(text) for text in texts], tiny.config(window=n, form="windows"))
    row = 0
    for text in texts:
        for t, token in enumerate(text):
            wanted = [text[p] if 0 <= (p := t + i - centre(n)) < len(text) else PAD for i in range(n)]
            assert grams[row].tolist() == wanted
            assert exists[row].tolist() == [w != PAD for w in wanted]
            assert grams[row, centre(n)] == token
            row += 1


@given(TEXTS, st.integers(2, 8), st.data())
def test_vectors_around_the_centre_exist_if_their_tokens_do(
    texts: list[list[int]], n: int, data: st.DataObject
) -> None:
    v = data.draw(st.integers(1, n))
    ids, lengths = np.array([token for text in texts for token in text]), [len(text) for text in texts]
    _, exists = text_ngrams(ids, lengths, replace(tiny.config(window=n, form="windows"), vectors_per_ngram=v))
    wanted = [[0 <= t + i - centre(v) < length for i in range(v)] for length in lengths for t in range(length)]
    assert exists.tolist() == wanted


def test_a_shorter_ngram_has_vectors_for_its_own_tokens_alone() -> None:
    windows, centre_token = tiny.config(form="windows"), replace(tiny.config(), vectors_per_ngram=1)
    assert [vectors_of(size, windows) for size in (3, 2, 1)] == [3, 2, 1]
    assert [vectors_of(size, centre_token) for size in (3, 2, 1)] == [1, 1, 1]


def test_a_fragment_keeps_the_centre_and_its_right_neighbour() -> None:
    assert fragment(np.array([[1, 2, 3, 4, 5]]), 2, PAD).tolist() == [[0, 0, 3, 4, 0]]
    assert fragment(np.array([[1, 2, 3]]), 2, PAD).tolist() == [[0, 2, 3]]
    assert fragment(np.array([[1, 2, 3]]), 1, PAD).tolist() == [[0, 2, 0]]
