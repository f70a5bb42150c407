"""Labelled examples: what a task is trained on and judged by."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hplm.core.characters import alike
from hplm.core.text import TextOrPair

# The largest value of a label that is a number, because training is in float32.
MOST_VALUE = float(np.finfo(np.float32).max)
# Unicode categories that tokenizers drop: control, format and private characters, and accents without a letter. Unassigned
# characters are not among them, because an emoji may be newer than Python's tables.
DROPPED = ("Cc", "Cf", "Co", "Mn")
# The most names that a sentence has, and the most characters of each.
MOST_NAMED, LONGEST_QUOTED = 5, 40


@dataclass(frozen=True)
class Entity:
    """A typed range of characters; `end` is exclusive."""

    label: str
    start: int
    end: int


@dataclass(frozen=True)
class LabelledText:
    """One example: a `label` for classification, a number in `label` for regression, `entities` for tagging.

    `pair` is the second text of a task over pairs. The rest describes the row that the example was read from:
    `where` is its file and line, for errors. `is_score` says that the label's column is called `score`.
    `is_tagged` says that the row has a list of entities, perhaps an empty one, beside its label.
    `is_literal` says that the label is a JSON number or truth value, which decides how a class of that name is spelled.
    """

    text: str
    label: str | None = None
    entities: tuple[Entity, ...] = ()
    pair: str | None = None
    where: str = field(default="", compare=False, repr=False)
    is_score: bool = field(default=False, compare=False, repr=False)
    is_tagged: bool = field(default=False, compare=False, repr=False)
    is_literal: bool = field(default=False, compare=False, repr=False)

    @property
    def text_or_pair(self) -> TextOrPair:
        """The text, or both texts of a pair, as a request sends them."""
        return self.text if self.pair is None else (self.text, self.pair)

    @property
    def value(self) -> float:
        """The label as a number, for a regression."""
        return float(str(self.label))


Examples = Sequence[LabelledText]
# The data of a task: train, dev and test, by these names. Dev and test may be empty.
Parts = Mapping[str, Examples]


def number_in(label: str | None) -> float | None:
    """Return the number that a label is, or None if the label is no number that float32 holds."""
    try:
        value = float(str(label))
    except ValueError:
        return None
    return value if abs(value) <= MOST_VALUE else None


def may_be_dropped(character: str) -> bool:
    """Return whether tokenizers drop the character; a tokenizer that keeps accents does not drop accents."""
    return character.isspace() or unicodedata.category(character) in DROPPED


def quoted(names: Sequence[str], others: Iterable[str] = ()) -> str:
    """Return the first names in quotes, for a sentence. A name that looks like another one has escapes for other than ASCII."""
    keys = Counter(alike(name) for name in {*names, *others})
    shown = ", ".join((ascii if keys[alike(name)] > 1 else repr)(name[:LONGEST_QUOTED]) for name in names[:MOST_NAMED])
    return shown + ", ..." * (len(names) > MOST_NAMED)
