"""Texts in portions: a tokenizer takes a hundred times their size while it works on them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer

from hplm.plot.windows import Ids

Item = TypeVar("Item")
BATCH_CHARACTERS = 1 << 20


def in_batches(
    items: Iterable[Item], characters: Callable[[Item], int], most: int = sys.maxsize
) -> Iterator[list[Item]]:
    """In lists of `BATCH_CHARACTERS` or an item more, and of at most `most` items."""
    some, size = list[Item](), 0
    for item in items:
        some.append(item)
        size += characters(item)
        if len(some) == most or size >= BATCH_CHARACTERS:
            yield some
            some, size = [], 0
    if some:
        yield some


def tokenise_in_batches(texts: Iterable[str], tokenizer: Tokenizer, max_tokens: int) -> Iterator[tuple[Ids, Ids]]:
    """All of the texts in portions: packed ids `[N]`, and lengths of at most `max_tokens` that sum to N.

    A text that is longer is several: in a script without our sentence ends a whole document may be one.
    """
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    for some in in_batches(texts, len):
        found = [part.ids for one in tokenizer.encode_batch_fast(some) for part in (one, *one.overflowing)]
        ids = np.fromiter(itertools.chain.from_iterable(found), dtype=np.int64)
        yield ids, np.array([len(one) for one in found], dtype=np.int64)
