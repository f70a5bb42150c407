"""Puts every kind of character beside known words, to see whether the words are still read."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterator
from pathlib import Path

from tokenizers import Tokenizer

from hplm.core.text import TextEncoder

# Scripts of thousands of similar characters, and private characters: every 61st of these is tried.
SAMPLED = (
    range(0x3400, 0xA000),
    range(0xAC00, 0xD7A4),
    range(0xE000, 0xF900),
    range(0x17000, 0x18D00),
    range(0x20000, 0x40000),
    range(0xF0000, 0x110000),
)


def assigned() -> Iterator[str]:
    """Return all assigned characters of the Unicode blocks, but only samples of the largest blocks."""
    for number in range(0x110000):
        sampled = any(number in block for block in SAMPLED)
        if not (sampled and number % 61) and unicodedata.category(chr(number)) not in ("Cn", "Cs"):
            yield chr(number)


def characters_that_hide_words(tokenizer_json: Path, joined_symbols: Collection[str]) -> list[str]:
    """Return the characters beside which `the`, `cat`, `red` or `dog` is not read as that word with its exact offsets.

    Two classes are exempt, both by their normal form. A letter, mark or number of the vocabulary makes another word of the
    word beside it. So does a symbol that longer pieces of the vocabulary contain: `joined_symbols`. A character that the
    normalizer drops joins the words at both its sides: there the tokens must be those of the text without that character.
    """
    plain, encoder = Tokenizer.from_file(str(tokenizer_json)), TextEncoder(tokenizer_json, 40)
    vocabulary = plain.get_vocab()
    found = []
    for one in assigned():
        normalised = plain.normalizer.normalize_str(one)
        kinds = [(each in vocabulary, unicodedata.category(each)[0] in "LMN") for each in normalised]
        if set(normalised) & set(joined_symbols) or (True, True) in kinds:
            continue
        texts = [f"the{one}", f"{one}cat", f"red{one}dog", "reddog"]
        before, after, between, without = encoder.encode(texts)
        expected = [(before, texts[0], ["the"]), (after, texts[1], ["cat"]), (between, texts[2], ["red", "dog"])]
        if not normalised:
            expected[2:] = []
        is_read = all(
            (vocabulary[word], word)
            in [
                (number, text[start:end].replace(one, ""))
                for number, (start, end, _) in zip(encoded.ids.tolist(), encoded.tokens.tolist(), strict=True)
            ]
            for encoded, text, words in expected
            for word in words
        )
        if not is_read or (not normalised and between.ids.tolist() != without.ids.tolist()):
            found.append(f"U+{ord(one):04X}")
    return found
