"""Numbers that JSON cannot write, and numbers as people and spreadsheets write them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hplm.core.characters import trimmed


def finite(value: Any) -> Any:
    """Return JSON values with null for infinity and NaN, for example the latency of no request."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class NumberStyle:
    """How the numbers of a column are written: `decimal` before a fraction, one of `groups` between thousands, perhaps a %."""

    decimal: str
    groups: str
    is_percent: bool = False

    @cached_property
    def _form(self) -> re.Pattern[str]:
        decimal, groups = re.escape(self.decimal), re.escape(self.groups)
        grouped = rf"[1-9]\d{{0,2}}(?P<group>[{groups}])\d{{3}}(?:(?P=group)\d{{3}})*"
        percent = r"\s?%" if self.is_percent else ""
        return re.compile(
            rf"([+\-\u2212]?)({grouped}|\d+|(?={decimal}\d))(?:{decimal}(\d+))?(e[+-]?\d+)?{percent}", re.ASCII | re.I
        )

    def plain(self, text: str) -> str | None:
        """Return a number as Python writes it, or None if `text` is no number in this style."""
        if (form := self._form.fullmatch(text)) is None:
            return None
        sign, whole, _, fraction, exponent = form.groups(default="")
        return sign.replace("\u2212", "-") + re.sub(r"\D", "", whole) + (fraction and f".{fraction}") + exponent.lower()

    def __str__(self) -> str:
        marks = {".": "a decimal point", ",": "a decimal comma"}
        return marks[self.decimal] + (" and a percent sign, which is left out" if self.is_percent else "")


# Spaces of thousands: plain, not breaking, thin, narrow and not breaking.
_SPACES = " \u00a0\u2009\u202f"
_STYLES = [
    NumberStyle(decimal, groups, is_percent)
    for is_percent in (False, True)
    for decimal, groups in ((".", ","), (",", "."), (".", _SPACES), (",", _SPACES), (".", "'\u2019"), (",", "'\u2019"))
]


@dataclass(frozen=True)
class NumberColumn:
    """A column of texts as numbers: each distinct text that is a number in `style` -> the number as Python writes it.

    `other` are the texts that are numbers in another style alone. `also` is a text that is another number in a second style,
    which fits the same texts, so that the column does not say which number is meant. It is "" if there is no such text.
    """

    style: NumberStyle
    plain: dict[str, str]
    other: frozenset[str]
    also: str


def read_numbers(texts: Iterable[str]) -> NumberColumn:
    """Read a column in the style in which most of its texts are numbers."""
    distinct = {text: trimmed(text) for text in texts}
    read = {
        style: {text: plain for text, bare in distinct.items() if (plain := style.plain(bare)) is not None}
        for style in _STYLES
    }
    best = max(read, key=lambda style: len(read[style]))
    rivals = [plain for plain in read.values() if plain.keys() == read[best].keys()]
    also = next((text for text, plain in read[best].items() if any(rival[text] != plain for rival in rivals)), "")
    other = frozenset().union(*read.values()) - read[best].keys()
    return NumberColumn(best, read[best], other, also)
