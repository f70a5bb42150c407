"""Words of a text whose tokenizer does not split as BERT's does, with the characters of each token."""

from __future__ import annotations

import unicodedata
from functools import lru_cache

import numpy as np
import numpy.typing as npt

# Ideographs, which BERT's tokenizer takes for words of one character each: the Unicode blocks as BERT names them.
IDEOGRAPHS = (
    range(0x3400, 0x4DC0),
    range(0x4E00, 0xA000),
    range(0xF900, 0xFB00),
    range(0x20000, 0x2A6E0),
    range(0x2A700, 0x2CEB0),
    range(0x2F800, 0x2FA20),
)


def find_words(text: str, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return a text's tokens `[T, 3]` without the white space at their ends, and with words like those of BERT.

    `tokens` have the first character, the end, and the number of the tokenizer's word: -1 of a special token, which stays.
    A word of SentencePiece ends at white space alone, so `cat,` is one word. Here a word also begins and ends at punctuation,
    at a symbol and at an ideograph, if tokens do. Tokens that share a character belong to one word.
    A token of white space alone has no character. Such a token belongs to the next word, or to the last word of the text.
    """
    found = tokens.copy()
    blank: list[int] = []
    word, last_end, last_number = -1, 0, -1
    for place, (start, end, number) in enumerate(tokens.tolist()):
        if number < 0:
            continue
        while start < end and text[start].isspace():
            start += 1
        while start < end and text[end - 1].isspace():
            end -= 1
        if start == end:
            blank.append(place)
            continue
        if word < 0 or (start >= last_end and (number != last_number or _is_seam(text, last_end, start))):
            word += 1
        found[blank] = (start, start, word)
        found[place] = (start, end, word)
        blank, last_end, last_number = [], max(end, last_end), number
    found[blank] = (last_end, last_end, max(word, 0))
    return found


def _is_seam(text: str, end: int, start: int) -> bool:
    """Return whether words meet between a token that ends at `end` and the next, which starts at `start`."""
    return text[start - 1].isspace() or _is_word(text[start]) or _is_word(text[end - 1])


@lru_cache(maxsize=4096)
def _is_word(character: str) -> bool:
    """Return whether a character is a word: punctuation, a symbol or an ideograph."""
    number = ord(character)
    return unicodedata.category(character)[0] in "PS" or any(number in block for block in IDEOGRAPHS)
