"""Texts of exact lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hplm_loadtest.workloads.lengths import texts_of_lengths

from hplm.core.text import TextEncoder
from hplm.errors import DataError
from hplm.models.base import Base
from tests import tiny


def test_each_text_has_the_wanted_number_of_tokens(tiny_base: Base) -> None:
    encoder = TextEncoder(tiny_base.tokenizer_path, 256)
    wanted = [3, 4, 17, 50, 100, 3]
    texts = texts_of_lengths(wanted, tiny.sentences(30), encoder, np.random.default_rng(0))
    assert [len(one.ids) for one in encoder.encode(texts)] == wanted


def test_sentences_without_a_text_of_the_wanted_length_are_refused(tiny_base: Base) -> None:
    encoder = TextEncoder(tiny_base.tokenizer_path, 256)
    with pytest.raises(DataError, match="no text of 98 tokens"):
        texts_of_lengths([100], ["the red cat"], encoder, np.random.default_rng(0))
