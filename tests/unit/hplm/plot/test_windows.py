"""n-gram windows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hplm.plot.windows import centre, fragment, windows

PAD = 0
TEXTS = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=12), min_size=1, max_size=5)


@given(TEXTS, st.integers(2, 8))
def test_a_window_holds_its_token_in_the_centre_and_never_another_texts(texts: list[list[int]], n: int) -> None:
    ids = np.array([token for text in texts for token in text])
    grams, exists = windows(ids, [len(text) for text in texts], n, PAD)
    row = 0
    for text in texts:
        for t, token in enumerate(text):
            wanted = [text[p] if 0 <= (p := t + i - centre(n)) < len(text) else PAD for i in range(n)]
            assert grams[row].tolist() == wanted
            assert exists[row].tolist() == [w != PAD for w in wanted]
            assert grams[row, centre(n)] == token
            row += 1


def test_a_fragment_keeps_the_centre_and_its_right_neighbour() -> None:
    assert fragment(np.array([[1, 2, 3, 4, 5]]), 2, PAD).tolist() == [[0, 0, 3, 4, 0]]
    assert fragment(np.array([[1, 2, 3]]), 2, PAD).tolist() == [[0, 2, 3]]
    assert fragment(np.array([[1, 2, 3]]), 1, PAD).tolist() == [[0, 2, 0]]
