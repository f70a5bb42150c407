"""The warning about texts whose language the base's vocabulary hardly knows."""

from __future__ import annotations

import string

import pytest
from hplm_builder.data.languages import language_warnings
from tokenizers import BertWordPieceTokenizer

from hplm.core.text import TextEncoder

ENGLISH = ("the parcel was due on monday", "where is my parcel", "i was charged twice for the order", "is it late")
GERMAN = ("das paket sollte am montag kommen", "wo ist mein paket", "mir wurde die rechnung zweimal berechnet")
JARGON = ("the acanthamoebiasis of keratoconjunctivitis", "i was due for pneumonoultramicroscopic silicovolcano")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    letters = [*string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase)]
    words = sorted({word for text in ENGLISH for word in text.split()} | {"of"} - set(letters))
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(word for word in words if len(word) > 1)]
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    BertWordPieceTokenizer({word: number for number, word in enumerate(vocabulary)}).save(str(path))
    return TextEncoder(path, 64)


def test_texts_of_the_bases_language_give_no_warning(encoder: TextEncoder) -> None:
    assert language_warnings(ENGLISH, encoder) == []
    assert language_warnings([*ENGLISH, *JARGON], encoder) == []


def test_texts_of_another_language_are_counted_with_their_words(encoder: TextEncoder) -> None:
    (said,) = language_warnings([*ENGLISH[:3], *GERMAN], encoder)
    assert said.startswith("about 50% of the texts seem to be in a language that the base hardly knows")
    assert "'paket' in 5 pieces" in said
    assert "0% are unknown" in said
    assert language_warnings([*ENGLISH * 20, GERMAN[0]], encoder) == []


def test_words_that_the_vocabulary_lacks_are_called_unknown(encoder: TextEncoder) -> None:
    (said,) = language_warnings(["где моя посылка", "счёт был списан дважды"], encoder)
    assert "100% are unknown" in said
    assert "'где' unknown" in said
