"""Texts in portions: a tokenizer takes a hundred times their size while it works on them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
SOME_CHARACTERS = 1 << 20


def some_at_a_time(
    items: Iterable[Item], characters: Callable[[Item], int], most: int = sys.maxsize
) -> Iterator[list[Item]]:
    """In lists of `SOME_CHARACTERS` or an item more, and of at most `most` items."""
    some, size = list[Item](), 0
    for item in items:
        some.append(item)
        size += characters(item)
        if len(some) == most or size >= SOME_CHARACTERS:
            yield some
            some, size = [], 0
    if some:
        yield some
