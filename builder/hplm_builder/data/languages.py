"""Whether a base's vocabulary knows the language of texts: foreign words fall into many pieces, or are unknown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from hplm.core.text import EncodedText, TextEncoder
from hplm.tasks.words import word_ranges
from hplm_builder.data.tokenising import in_batches

SAMPLED_TEXTS = 1000
SAMPLED_CHARACTERS = 1000  # of each text
# A text counts as foreign if more than this share of its words is in pieces or unknown, and so many of its short words. The
# jargon of a science is in pieces too, but the short words around it are whole. A text of fewer words says little.
MOST_SPLIT = 0.4
SHORT_LETTERS, LEAST_SHORT = 5, 2
LEAST_WORDS = 3
# A warning needs this share of foreign texts. With MiniLM's vocabulary it is 6 % in ChemProt, the most of 13 English sources,
# 73 % in 40 German tickets, 36 % if English texts are added to them until half are German, and 50 % in French tickets.
MOST_FOREIGN = 0.1
EXAMPLES = 5


def language_warnings(texts: Sequence[str], encoder: TextEncoder) -> list[str]:
    """Return a sentence if many texts are in a language that the base's vocabulary hardly knows."""
    step = max(1, len(texts) // SAMPLED_TEXTS)
    sample = [text[:SAMPLED_CHARACTERS] for text in texts[::step]]
    of_texts = [*_words_of(sample, encoder)]
    long = [words for words in of_texts if len(words) >= LEAST_WORDS]
    foreign = [words for words in long if _is_foreign(words)]
    if not foreign or len(foreign) < MOST_FOREIGN * len(long):
        return []
    words = [word for text in foreign for word in text]
    unknown = sum(not count for _, count in words)
    pieces = sum(count or 1 for _, count in words) / len(words)
    often = Counter(word for word in words if word[1] != 1)
    worst = sorted(often, key=lambda word: (-often[word], word[1] and -word[1]))[:EXAMPLES]
    named = ", ".join(
        f"{word[:30]!r} in {count} pieces" if count else f"{word[:30]!r} unknown" for word, count in worst
    )
    return [
        f"about {len(foreign) / len(long):.0%} of the texts seem to be in a language that the base hardly knows: their words "
        f"have {pieces:.1f} pieces each, and {unknown / len(words):.0%} are unknown (such as {named}). The bases that hplm "
        "ships read English; for other languages take another base (docs/own-base.md)"
    ]


def _is_foreign(words: list[tuple[str, int]]) -> bool:
    split = [word for word, count in words if count != 1]
    return len(split) > MOST_SPLIT * len(words) and sum(len(word) <= SHORT_LETTERS for word in split) >= LEAST_SHORT


def _words_of(texts: Iterable[str], encoder: TextEncoder) -> Iterable[list[tuple[str, int]]]:
    """Yield the words of letters of each text that is read, each with its number of pieces: 0 for an unknown word."""
    for batch in in_batches(texts, len, most=64):
        for text, encoded in zip(batch, encoder.encode(batch), strict=True):
            yield [*_pieces(text, encoded, encoder.unknown_id)]


def _pieces(text: str, encoded: EncodedText, unknown_id: int | None) -> Iterable[tuple[str, int]]:
    for first, last in word_ranges(encoded.tokens):
        word = text[encoded.tokens[first, 0] : encoded.tokens[last - 1, 1]]
        if word.isalpha():
            yield word, 0 if np.any(encoded.ids[first:last] == unknown_id) else last - first
