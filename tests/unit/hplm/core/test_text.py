"""Texts become tokens with exact offsets, long texts are cut, and bad texts are refused."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from hplm.core.long_texts import MOST_CHARACTERS
from hplm.core.text import (
    CHARACTERS_PER_TOKEN,
    TextEncoder,
    TextOrPair,
    check_not_empty,
    check_text_count,
    decode_texts,
    decode_utf8,
    load_tokenizer,
    text_key,
)
from hplm.core.words import find_words
from hplm.errors import (
    CorruptArtifactError,
    EmptyTextError,
    HplmError,
    TextCountError,
    TextEncodingError,
    TextTooLargeError,
)
from hplm.models.base import Base
from tests import tiny
from tests.unit.hplm.core.characters import characters_that_hide_words
from tests.unit.tokenizer_kinds import KINDS


def test_a_long_text_is_cut_and_says_so(tiny_base: Base) -> None:
    encoder = TextEncoder(tiny_base.tokenizer_path, 6)
    short, long = encoder.encode(["the red cat", "the red cat runs over the river"])
    assert (len(short.ids), short.truncated) == (5, False)
    assert (len(long.ids), long.truncated) == (6, True)
    assert long.ids[-1] == short.ids[-1]  # [SEP] is kept
    assert long.tokens[-1].tolist()[2] == -1


@pytest.mark.parametrize(
    ("text", "copy"),
    [
        ("the red cat", " The\u00a0RED\n\tcat "),
        ("caf\u00e9 na\u00efve", "CAFE\u0301 nai\u0308ve"),
        ("\uff30\uff32\uff29\uff23\uff25 \uff15", "price 5"),
        ("stra\u00dfe", "STRASSE"),
        ("a\u200bcat\u00ad", "acat\ufeff"),
        ("\u03c3\u03bf\u03c6\u03cc\u03c2", "\u03a3\u039f\u03a6\u038c\u03a3"),
        (("One", "two "), ("one", "TWO")),
    ],
)
def test_near_copies_of_a_text_have_one_key(text: TextOrPair, copy: TextOrPair) -> None:
    assert text_key(text) == text_key(copy) == text_key(text_key(text))


@pytest.mark.parametrize(
    ("text", "other"), [("a cat", "acat"), ("3.5", "35"), (("a", "b"), ("b", "a")), ("caf\u00e9", "cafe")]
)
def test_texts_that_say_something_else_have_another_key(text: TextOrPair, other: TextOrPair) -> None:
    assert text_key(text) != text_key(other)


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
    assert encoded.types.tolist() == [0, 0, 0, 0, 0, 1, 1]
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


def test_of_a_pair_of_very_long_texts_the_one_of_more_characters_keeps_the_odd_token(tiny_base: Base) -> None:
    encoder = TextEncoder(tiny_base.tokenizer_path, 8)
    for first, second, kept in ((900, 800, 3), (800, 900, 2), (800, 800, 3)):
        (encoded,) = encoder.encode([("cat " * first, "dog " * second)])
        assert pieces(encoded.ids).count("cat") == kept
        assert len(encoded.ids) == 8


def bert(**options: bool) -> Tokenizer:
    made = tiny.tokenizer()
    made.normalizer = normalizers.BertNormalizer(**options)
    made.add_special_tokens(["[CLS]", "[SEP]", "[MASK]"])
    return made


def like_mpnet() -> Tokenizer:
    made = bert()
    made.post_processor = processors.RobertaProcessing(sep=("[SEP]", 3), cls_token=("[CLS]", 2), add_prefix_space=False)
    made.add_special_tokens([AddedToken("<mask>", lstrip=True), AddedToken("the cat", rstrip=True, normalized=True)])
    return made


def single_words() -> Tokenizer:
    made = bert()
    made.add_tokens([AddedToken("a,b", single_word=True)])
    return made


def in_one_piece() -> Tokenizer:
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "##\u2581": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    return made


def of_more_letters() -> Tokenizer:
    """Return a tokenizer whose letters and symbols may continue a word, only begin a word, or be in longer pieces."""
    vocabulary = tiny.tokenizer().get_vocab()
    more = ("\u03b2", "##\u03b2", "\u03c9", "\u2665", "##\u2665", "\u00b0", "##\u00b0", "\u00b0c", "\u20bf", "\u20bf5")
    more += ("\u1100", "##\u1161", "\u4e2d")
    made = bert()
    made.model = models.WordPiece(
        {**vocabulary, **{piece: len(vocabulary) + place for place, piece in enumerate(more)}}, unk_token="[UNK]"
    )
    return made


TOKENIZERS = {
    "uncased": bert(),
    "accents-kept": bert(strip_accents=False),
    "more-letters": of_more_letters(),
    "cased": bert(lowercase=False, strip_accents=False),
    "with-controls": bert(clean_text=False, handle_chinese_chars=False),
    "like-mpnet": like_mpnet(),
    "single-words": single_words(),
    "no-words": in_one_piece(),
    **{name: make() for name, make in KINDS.items() if name != "bert"},
}


@st.composite
def long_texts(draw: st.DrawFn) -> str:
    """Return texts of repeated pieces with others between them: with and without white space, of few and of many tokens."""
    letters = (
        "abcxyz ,.\n\t\u00e9\u0130\u00df\ufb01\u0301\u200d\x01\u00a0\u3000\u3002\u4e2d\U0001f469\U0001f3fd\U00020000"
        "\u03b2\u03c9\u2665\u00b0\u20bf5\uac00\uac01\u1100\u1161"
    )
    words = (
        "cat",
        "the cat",
        "the dog's ",
        " 12",
        "  cat",
        " ",
        "q" * 99,
        "q" * 101,
        "\U0001f469\u200d\U0001f680",
        "a\u0301\u0302",
        "\x01" * 50,
    )
    added = ("[MASK]", "[MASK", "<mask>", " <mask>", "[SEP]", "the  cat", "a,b", "xa,b")
    piece = st.one_of(st.sampled_from(words + added), st.text(letters, min_size=1, max_size=6), st.text(max_size=4))
    repeated = st.tuples(piece, st.integers(1, 60)).map(lambda pair: pair[0] * pair[1])
    return "".join(draw(st.lists(st.one_of(piece, repeated), max_size=30)))[:MOST_CHARACTERS]


def told_by_the_whole(
    tokenizer: Tokenizer, text: TextOrPair, max_tokens: int, *, has_berts_words: bool
) -> tuple[list[int], list[list[int]], list[int], bool]:
    """Encode slowly: tokenise everything, then cut token by token at the end of the longer text."""
    texts = text if isinstance(text, tuple) else (text,)
    encoding = tokenizer.encode(*texts)
    of_text = encoding.sequence_ids
    left, room = [of_text.count(0), of_text.count(1)], max_tokens - of_text.count(None)
    lengths = [len(texts[0]), len(texts[-1])] if min(left) > room else left
    shorter = int(lengths[0] >= lengths[1])
    left = [min(count, room) for count in left]
    while sum(left) > room:
        left[shorter if left[0] == left[1] else int(left[0] < left[1])] -= 1
    kept = [
        place for place, number in enumerate(of_text) if number is None or of_text[:place].count(number) < left[number]
    ]
    tokens, last_word = [], -1
    found = [
        [*span, -1 if word is None else word] for span, word in zip(encoding.offsets, encoding.word_ids, strict=True)
    ]
    if not has_berts_words:
        for number, text_of_number in enumerate(texts):
            places = [place for place, other in enumerate(of_text) if other == number]
            rows = np.array([found[place] for place in places], np.int32).reshape(-1, 3)
            for place, row in zip(places, find_words(text_of_number, rows).tolist(), strict=True):
                found[place] = row
    for place in kept:
        start, end, word = found[place]
        number = of_text[place]
        if number is not None and word >= 0:
            spans = [span[:2] for span, other in zip(found, of_text, strict=True) if other == number]
            until = min((a for a, b in spans if b > a >= end), default=len(texts[number]))
            while start < end < until and unicodedata.category(texts[number][end]) == "Mn":
                end += 1
            if number == 1:
                start, end, word = start + len(texts[0]) + 1, end + len(texts[0]) + 1, word + last_word + 1
            else:
                last_word = word
        tokens.append([start, end, word])
    ids, types = ([all_of_them[place] for place in kept] for all_of_them in (encoding.ids, encoding.type_ids))
    return ids, tokens, types, len(of_text) > max_tokens


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, tokenizer in TOKENIZERS.items():
        tokenizer.save(str(folder / name))
    return {name: folder / name for name in TOKENIZERS}


@pytest.fixture(scope="module")
def encoders(saved: dict[str, Path]) -> dict[str, tuple[TextEncoder, Tokenizer]]:
    """Return each encoder that reads 12 tokens, with the tokenizer of its slow twin."""
    return {name: (TextEncoder(path, 12), load_tokenizer(path)) for name, path in saved.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(texts=st.lists(st.one_of(long_texts(), st.tuples(long_texts(), long_texts())), min_size=1, max_size=3))
def test_what_is_read_of_a_long_text_is_what_the_whole_would_tell(
    encoders: dict[str, tuple[TextEncoder, Tokenizer]], name: str, texts: list[TextOrPair]
) -> None:
    encoder, whole = encoders[name]
    for text, encoded in zip(texts, encoder.encode(texts), strict=True):
        is_bert = name not in KINDS and name != "no-words"
        ids, tokens, types, truncated = told_by_the_whole(whole, text, 12, has_berts_words=is_bert)
        assert encoded.ids.tolist() == ids
        assert encoded.types.tolist() == types
        assert encoded.tokens.tolist() == tokens
        assert encoded.truncated == truncated


@pytest.mark.parametrize("name", ["uncased", "cased", "accents-kept"])
def test_no_known_word_is_hidden_by_a_character_beside_it(saved: dict[str, Path], name: str) -> None:
    assert characters_that_hide_words(saved[name], joined_symbols="") == []


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("cat\U0001f44e", ["cat", "[UNK]"]),
        ("\U0001f44e\U0001f44e\U0001f3fdcat", ["[UNK]", "cat"]),
        ("cat\U0001f468\u200d\U0001f469\u200d\U0001f467\u2764\ufe0fdog", ["cat", "[UNK]", "dog"]),
        ("cat\u0442\u0435\u0441\u0442", ["cat", "[UNK]"]),
        ("\u0442\u0435\u0441\u0442, cat", ["[UNK]", ",", "cat"]),
        ("cat\u2665\u2665\U0001f44edog", ["cat", "\u2665", "\u2665", "[UNK]", "dog"]),
        ("5\u00b0 \u00b0c", ["5", "##\u00b0", "\u00b0c"]),
        ("cat\u03b2", ["cat", "##\u03b2"]),
        ("cat\u03c9x\u03c9 dog", ["cat", "\u03c9", "##x", "\u03c9", "dog"]),
        ("cat\u20bf5\u20bf", ["cat", "\u20bf5", "\u20bf"]),
        ("cat\u4e2ddog", ["cat", "\u4e2d", "dog"]),
    ],
    ids=ascii,
)
def test_unknown_characters_and_symbols_are_words_of_their_own(
    saved: dict[str, Path], text: str, read: list[str]
) -> None:
    names = {number: piece for piece, number in TOKENIZERS["more-letters"].get_vocab().items()}
    (encoded,) = TextEncoder(saved["more-letters"], 40).encode([text])
    assert [names[number] for number in encoded.ids.tolist()[1:-1]] == read


def test_unknown_characters_that_stand_together_have_the_offsets_of_all_of_them(tiny_base: Base) -> None:
    text = "cat\U0001f468\u200d\U0001f469\U0001f3fddog"
    (encoded,) = TextEncoder(tiny_base.tokenizer_path, 40).encode([text])
    assert encoded.tokens.tolist()[1:-1] == [[0, 3, 0], [3, 7, 1], [7, 10, 2]]


def of_bytes() -> Tokenizer:
    made = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    return made


def of_probabilities() -> Tokenizer:
    made = Tokenizer(models.Unigram([("<unk>", 0.0), ("\u2581cat", -1.0)], unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    return made


@pytest.mark.parametrize("made", [of_bytes(), of_probabilities(), in_one_piece()], ids=["bpe", "unigram", "no-words"])
def test_another_tokenizer_than_berts_is_left_as_it_is(tmp_path: Path, made: Tokenizer) -> None:
    made.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "tokenizer.json").to_str() == made.to_str()


@pytest.mark.parametrize("after", [" ", ",", "\u3002"])
@pytest.mark.parametrize("is_pair", [False, True], ids=["single", "pair"])
def test_of_a_long_text_little_more_is_tokenised_than_is_read(
    tiny_base: Base, monkeypatch: pytest.MonkeyPatch, after: str, is_pair: bool
) -> None:
    encoder = TextEncoder(tiny_base.tokenizer_path, 40)
    portions: list[str] = []
    really = encoder._tokenizer.encode

    class Counting:
        def encode(self, *texts: Any, **options: bool) -> object:
            portions.extend(texts)
            return really(*texts, **options)

        def encode_batch(self, texts: list[str]) -> list[object]:
            return [self.encode(text) for text in texts]

    monkeypatch.setattr(encoder, "_tokenizer", Counting())
    text = ("q" * 99 + after) * 600
    asked: TextOrPair = (text, text) if is_pair else text
    (encoded,) = encoder.encode([asked])
    assert encoded.truncated
    assert len(encoded.ids) == 40
    assert sum(map(len, portions)) < (2 if is_pair else 1) * 2 * CHARACTERS_PER_TOKEN * 40


def test_singles_and_pairs_of_one_batch_are_as_each_alone(tiny_base: Base) -> None:
    encoder = TextEncoder(tiny_base.tokenizer_path, 10)
    texts: list[TextOrPair] = ["the red cat", ("a dog", "the river runs"), "cat " * 30, ("cat " * 30, "dog")]
    texts += ["cat " * 300, ("a dog", "cat " * 300)]
    for text, together in zip(texts, encoder.encode(texts), strict=True):
        (alone,) = encoder.encode([text])
        assert (together.ids == alone.ids).all()
        assert (together.tokens == alone.tokens).all()
        assert (together.types == alone.types).all()
        assert together.truncated == alone.truncated


def test_a_pair_is_empty_where_one_of_its_texts_is(tiny_base: Base) -> None:
    encoder = TextEncoder(tiny_base.tokenizer_path, 40)
    for pair in (("\x01", "cat"), ("cat", "\x01"), ("\u0301", "cat"), ("cat", "\u0301")):
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


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ((b"",), "the text is empty"),
        ((b"", b"a"), "the first text of the pair is empty"),
        ((b"a", b" "), "the second text of the pair is empty"),
        ((b"a", b"\xff"), "the second text of the pair is not valid UTF-8 at byte 0"),
    ],
)
def test_an_error_says_which_text_of_a_pair_it_is_about(raw: tuple[bytes, ...], words: str) -> None:
    with pytest.raises(HplmError, match=words):
        decode_texts(raw, 1000)


def test_one_text_stays_a_text_and_two_become_a_pair() -> None:
    assert decode_texts((b"a",), 10) == "a"
    assert decode_texts((b"a", "ö".encode()), 10) == ("a", "ö")
    assert check_text_count("a", 1) == "a"
    assert check_text_count(("a", "b"), 2) == ("a", "b")


def test_a_wrong_number_of_texts_is_refused_with_what_came_and_the_shapes_to_send() -> None:
    shapes = r": n texts have the shape \[n, 1\], n pairs \[n, 2\], and TENANT \[n, 1\]"
    with pytest.raises(TextCountError, match=f"trained on single texts, and two texts came in one row of TEXT{shapes}"):
        check_text_count(("a", "b"), 1)
    with pytest.raises(TextCountError, match=f"trained on pairs, and one text came in one row of TEXT{shapes}"):
        check_text_count("a", 2)
    with pytest.raises(TextCountError, match=f"^3 texts came in one row of TEXT{shapes}"):
        decode_texts((b"a", b"b", b"c"), 1000)


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


@pytest.mark.parametrize("text", ["\x01\x02", "\u200b", "\u0301"])
def test_a_text_of_control_characters_or_lone_accents_is_empty_and_the_error_says_so(
    tiny_base: Base, text: str
) -> None:
    encoder = TextEncoder(tiny_base.tokenizer_path, 40)
    with pytest.raises(EmptyTextError, match="control characters or lone accents"):
        check_not_empty(encoder.encode([text])[0])


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(CorruptArtifactError, match=r"tokenizer\.json"):
        TextEncoder(path, 40)
