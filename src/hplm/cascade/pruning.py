"""Word pruning: the next level reads only the words that the level before it attended to (Tabi, section 4.2, eq. 5)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

TextOrPair = str | tuple[str, str]
_TO_SPACE = re.compile(r"\A\S+")


class _Word(NamedTuple):
    """A word of one text: its first character, its end, and its importance divided by the mean importance of a token."""

    start: int
    end: int
    ratio: float


def prune(text: TextOrPair, importance: npt.NDArray[Any], alpha: float) -> TextOrPair:
    """Return the text or pair without its unimportant words.

    `importance` `[words, 3]` has each word in order: its first character, its end, and the largest importance of its tokens
    divided by the mean importance of a token. Characters of a pair are those of `hplm.core.text`. A word stays if its ratio is
    above `alpha`. With `alpha` 0 every word stays.

    No text becomes empty: of a text without such a word the word of the highest ratio stays. Characters behind the last
    word stay, because the level has cut the text there and has not read them. Words that stay keep their order. The white
    space between two words that stay is kept. Where words between them are gone, there is white space between the two, so
    that no new word appears.
    """
    if alpha <= 0:
        return text
    words = [_Word(int(start), int(end), ratio) for start, end, ratio in importance.tolist() if start < end]
    if isinstance(text, str):
        return _prune_one(text, words, alpha)
    second_from = len(text[0]) + 1
    first = [word for word in words if word.start < second_from]
    second = [_Word(start - second_from, end - second_from, ratio) for start, end, ratio in words[len(first) :]]
    return _prune_one(text[0], first, alpha), _prune_one(text[1], second, alpha)


def _prune_one(text: str, words: Sequence[_Word], alpha: float) -> str:
    stays = [word.ratio > alpha for word in words]
    if all(stays):
        return text
    if not any(stays):
        stays[max(range(len(words)), key=lambda index: words[index].ratio)] = True
    parts: list[str] = []
    # The end of the words so far, and whether the last of them stays.
    end, follows_kept = 0, True
    for word, is_kept in zip(words, stays, strict=True):
        if is_kept:
            if follows_kept:
                parts.append(text[end : word.end])
            else:
                parts += [_space_before(text[end : word.start]) if parts else "", text[word.start : word.end]]
        end, follows_kept = max(end, word.end), is_kept
    rest = text[end:]
    if not follows_kept:
        # The level's cut may go through the word that is gone, whose end then goes too.
        rest = _TO_SPACE.sub("", rest, count=1)
    return "".join([*parts, rest if follows_kept or rest.strip() else ""])


def _space_before(gap: str) -> str:
    """Return the white space before a word that stays and follows a word that is gone. `gap` stands between the two."""
    return gap if any(map(str.isspace, gap)) else " "
