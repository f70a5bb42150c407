"""Texts of any length, pairs, words and entities with each kind of tokenizer: WordPiece, byte-level BPE and SentencePiece."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hplm.core.long_texts import MOST_CHARACTERS
from hplm.core.text import CHARACTERS_PER_TOKEN, TextEncoder, TextOrPair
from hplm.tasks.examples import Entity, LabelledText
from hplm.tasks.tagging import Tagging
from hplm.tasks.words import word_ranges
from tests.unit.tokenizer_kinds import KINDS

MOST_TOKENS = 40
MEGABYTE = 1_000_000
# Characters without a space between words; repeated, they give few tokens or a single word.
HARD = {"one-word": "q", "ideographs": "\u4e2d", "spaces": " ", "accents": "e\u0301", "bytes": "\U0001f600"}


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextEncoder]:
    folder = tmp_path_factory.mktemp("kinds")
    for name, make in KINDS.items():
        make().save(str(folder / name))
    return {name: TextEncoder(folder / name, MOST_TOKENS) for name in KINDS}


class Counting:
    """A tokenizer that notes how many characters it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.characters = 0

    def encode(self, *texts: str, **options: bool) -> Any:
        self.characters += sum(map(len, texts))
        return self._tokenizer.encode(*texts, **options)

    def encode_batch(self, texts: list[TextOrPair]) -> Any:
        return [self.encode(*((text,) if isinstance(text, str) else text)) for text in texts]


@pytest.fixture
def counting(encoders: dict[str, TextEncoder], monkeypatch: pytest.MonkeyPatch, kind: str) -> Counting:
    tokenizer = Counting(encoders[kind]._tokenizer)
    monkeypatch.setattr(encoders[kind], "_tokenizer", tokenizer)
    return tokenizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_pair", [False, True], ids=["single", "pair"])
def test_of_a_megabyte_of_words_little_more_is_tokenised_than_is_read(
    encoders: dict[str, TextEncoder], counting: Counting, kind: str, is_pair: bool
) -> None:
    text = ("the red cat runs over the river, " * (MEGABYTE // 33 + 1))[:MEGABYTE]
    (encoded,) = encoders[kind].encode([(text, text) if is_pair else text])
    assert encoded.truncated
    assert len(encoded.ids) == MOST_TOKENS
    assert counting.characters <= (1 + is_pair) * 3 * CHARACTERS_PER_TOKEN * MOST_TOKENS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("piece", HARD.values(), ids=HARD)
def test_of_a_megabyte_of_anything_a_bounded_part_is_tokenised(
    encoders: dict[str, TextEncoder], counting: Counting, kind: str, piece: str
) -> None:
    (encoded,) = encoders[kind].encode([piece * (MEGABYTE // len(piece))])
    assert encoded.truncated
    assert len(encoded.ids) <= MOST_TOKENS
    assert counting.characters <= 2 * MOST_CHARACTERS


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_of_a_megabyte_is_read_as_its_beginning_is(encoders: dict[str, TextEncoder], kind: str) -> None:
    text = "the red cat's dog, caf\u00e9  \u4e2d\u6587 and 12 rivers! "
    long, short = encoders[kind].encode([text * 25_000, text * 20])
    assert long.ids.tolist() == short.ids.tolist()
    assert long.tokens.tolist() == short.tokens.tolist()


def words(text: str, encoder: TextEncoder) -> list[str]:
    (encoded,) = encoder.encode([text])
    tokens = encoded.tokens
    return [text[tokens[first, 0] : tokens[last - 1, 1]] for first, last in word_ranges(tokens)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the cat  runs ", ["the", "cat", "runs"]),
        ("  the\tred\n\ncat", ["the", "red", "cat"]),
        ("cat, (red-brown) dog.", ["cat", ",", "(", "red", "-", "brown", ")", "dog", "."]),
        ("\u4e2d\u6587, caf\u00e9", ["\u4e2d", "\u6587", ",", "caf\u00e9"]),
    ],
    ids=["spaces", "white-space", "punctuation", "ideographs"],
)
def test_words_are_those_of_bert_with_each_tokenizer(
    encoders: dict[str, TextEncoder], kind: str, text: str, expected: list[str]
) -> None:
    assert words(text, encoders[kind]) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_has_white_space_at_its_ends(encoders: dict[str, TextEncoder], kind: str) -> None:
    text = " the  red cat\n runs over\u3000the river "
    single, pair = encoders[kind].encode([text, (text, text)])
    for whole, encoded in ((text, single), (f"{text} {text}", pair)):
        for start, end, _ in encoded.tokens.tolist():
            assert whole[start:end] == whole[start:end].strip()


@pytest.mark.parametrize("kind", KINDS)
def test_entities_come_back_with_the_characters_they_were_learned_with(
    encoders: dict[str, TextEncoder], kind: str
) -> None:
    text = " Anna's red cat, (Rex-Dog) runs over  \u4e2d\u6587 and caf\u00e9. "
    marked = {"Anna": "person", "red cat": "animal", "Rex-Dog": "animal", "\u6587": "place", "caf\u00e9": "place"}
    entities = [Entity(label, text.index(name), text.index(name) + len(name)) for name, label in marked.items()]
    example = LabelledText(text, entities=tuple(entities))
    task = Tagging()
    labels = task.labels_of({"train": [example]})
    (encoded,) = encoders[kind].encode([text])
    targets = task.targets(example, encoded.tokens, {label: place for place, label in enumerate(labels)})
    logits = np.zeros((len(encoded.ids), len(labels)), np.float32)
    for place, target in enumerate(targets.tolist()):
        if target >= 0:
            logits[place, target] = 9.0
    spans, _ = task.decode(logits, labels, encoded.tokens)
    assert [(span.label, span.start, span.end) for span in spans] == [(e.label, e.start, e.end) for e in entities]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("times", [1, 30, 3000], ids=["short", "cut", "long"])
def test_a_pair_has_the_special_tokens_of_its_tokenizer(
    encoders: dict[str, TextEncoder], kind: str, times: int
) -> None:
    tokenizer = encoders[kind]._tokenizer
    form = tokenizer.encode("cat", "dog")
    special = [token for token, number in zip(form.ids, form.sequence_ids, strict=True) if number is None]
    (encoded,) = encoders[kind].encode([("cat " * times, "dog " * times)])
    assert encoded.ids[encoded.tokens[:, 2] < 0].tolist() == special
    assert encoded.types.max() == max(form.type_ids)
    assert encoded.truncated == (times > 1)
