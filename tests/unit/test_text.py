"""Text in."""

from __future__ import annotations

from pathlib import Path

import pytest

from hplm.errors import (
    CorruptArtifactError,
    EmptyTextError,
    TextCountError,
    TextEncodingError,
    TextTooLargeError,
)
from hplm.nn.base import Base
from hplm.text import TextEncoder, check_not_empty, check_text_count, decode_texts, decode_utf8
from tests import tiny


def test_a_long_text_is_cut_and_says_so(tiny_base: Base) -> None:
    encoder = TextEncoder(tiny_base.tokenizer_path, 6)
    short, long = encoder.encode(["the red cat", "the red cat runs over the river"])
    assert (len(short.ids), short.truncated) == (5, False)
    assert (len(long.ids), long.truncated) == (6, True)
    assert long.ids[-1] == short.ids[-1]  # [SEP] is kept
    assert long.tokens[-1].tolist()[2] == -1


def test_offsets_count_characters_not_bytes(tiny_base: Base) -> None:
    encoded = TextEncoder(tiny_base.tokenizer_path, 40).encode(["ÄÖ cat"])[0]
    assert encoded.tokens[-2].tolist()[:2] == [3, 6]


def pieces(encoder_ids: object) -> list[str]:
    names = {index: piece for piece, index in tiny.tokenizer().get_vocab().items()}
    return [names[int(i)] for i in encoder_ids]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "covered"),
    [
        ("cafe\u0301 cat", ["c", "a", "f", "e\u0301", "cat"]),
        ("cafe\u0301\u0302", ["c", "a", "f", "e\u0301\u0302"]),
        ("the \u0301 cat", ["the", "cat"]),
        ("caf\u00e9 cat", ["c", "a", "f", "\u00e9", "cat"]),
    ],
    ids=["one", "two-at-the-end", "of-nothing", "composed"],
)
def test_a_letter_has_its_combining_accents(tiny_base: Base, text: str, covered: list[str]) -> None:
    encoder = TextEncoder(tiny_base.tokenizer_path, 64)
    single, pair = encoder.encode([text, ("a cat", text)])
    joined = f"a cat {text}"
    for whole, encoded, first in ((text, single, 1), (joined, pair, 4)):
        found = [whole[start:end] for start, end, _ in encoded.tokens[first:-1]]
        assert found == covered


def test_a_pair_has_a_separator_between_its_texts_and_counts_characters_and_words_on(tiny_base: Base) -> None:
    (encoded,) = TextEncoder(tiny_base.tokenizer_path, 40).encode([("Äx cat", "dog")])
    assert pieces(encoded.ids) == ["[CLS]", "a", "##x", "cat", "[SEP]", "dog", "[SEP]"]
    both = "Äx cat dog"
    assert [both[start:end] for start, end, word in encoded.tokens.tolist() if word >= 0] == ["Ä", "x", "cat", "dog"]
    assert encoded.tokens[:, 2].tolist() == [-1, 0, 0, 1, -1, 2, -1]
    assert not encoded.truncated


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [(8, 2, (3, 2)), (2, 8, (2, 3)), (8, 8, (3, 2)), (3, 3, (3, 2)), (3, 2, (3, 2)), (20, 1, (4, 1))],
)
def test_of_a_pair_that_is_too_long_the_longer_text_is_cut_first(
    tiny_base: Base, first: int, second: int, kept: tuple[int, int]
) -> None:
    (encoded,) = TextEncoder(tiny_base.tokenizer_path, 8).encode([("cat " * first, "dog " * second)])
    assert pieces(encoded.ids) == ["[CLS]", *["cat"] * kept[0], "[SEP]", *["dog"] * kept[1], "[SEP]"]
    assert encoded.truncated == (first + second > 5)


def test_singles_and_pairs_of_one_batch_are_as_each_alone(tiny_base: Base) -> None:
    encoder = TextEncoder(tiny_base.tokenizer_path, 10)
    texts = ["the red cat", ("a dog", "the river runs"), "cat " * 30, ("cat " * 30, "dog")]
    for text, together in zip(texts, encoder.encode(texts), strict=True):
        (alone,) = encoder.encode([text])
        assert (together.ids == alone.ids).all()
        assert (together.tokens == alone.tokens).all()
        assert together.truncated == alone.truncated


def test_a_pair_is_empty_where_one_of_its_texts_is(tiny_base: Base) -> None:
    encoder = TextEncoder(tiny_base.tokenizer_path, 40)
    for pair in (("\x01", "cat"), ("cat", "\x01")):
        with pytest.raises(EmptyTextError):
            check_not_empty(encoder.encode([pair])[0])


def test_a_tokenizer_without_a_form_for_pairs_says_so(tiny_base: Base, tmp_path: Path) -> None:
    plain = tiny.tokenizer()
    plain.post_processor = None
    plain.save(str(tmp_path / "tokenizer.json"))
    assert not TextEncoder(tmp_path / "tokenizer.json", 40).takes_pairs
    assert TextEncoder(tiny_base.tokenizer_path, 40).takes_pairs


@pytest.mark.parametrize(
    ("raw", "error"),
    [((), TextCountError), ((b"a", b"b", b"c"), TextCountError), ((b"x" * 600, b"x" * 600), TextTooLargeError)],
)
def test_bad_texts_of_a_request_get_their_own_error(raw: tuple[bytes, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        decode_texts(raw, 1000)


def test_one_text_stays_a_text_and_two_become_a_pair() -> None:
    assert decode_texts((b"a",), 10) == "a"
    assert decode_texts((b"a", "ö".encode()), 10) == ("a", "ö")
    for given, wanted in (("a", 2), (("a", "b"), 1)):
        with pytest.raises(TextCountError):
            check_text_count(given, wanted)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"", EmptyTextError),
        (b" \n\t", EmptyTextError),
        (b"caf\xe9", TextEncodingError),
        (b"x" * 1001, TextTooLargeError),
    ],
)
def test_bad_bytes_get_their_own_error(raw: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode_utf8(raw, 1000)


def test_a_text_of_control_characters_is_empty(tiny_base: Base) -> None:
    encoder = TextEncoder(tiny_base.tokenizer_path, 40)
    with pytest.raises(EmptyTextError):
        check_not_empty(encoder.encode(["\x01\x02"])[0])


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(CorruptArtifactError, match=r"tokenizer\.json"):
        TextEncoder(path, 40)
