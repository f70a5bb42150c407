"""Tokenising many texts in batches, because a tokenizer needs a hundred times their size in memory while it works."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer

from hplm.plot.ngrams import Ids

Item = TypeVar("Item")
BATCH_CHARACTERS = 1 << 20  # a batch ends with the item that reaches this number: the tokenizer then takes about 100 MB


def in_batches(
    items: Iterable[Item], characters: Callable[[Item], int], most: int = sys.maxsize
) -> Iterator[list[Item]]:
    """Yield lists of at most `most` items; a list ends once it holds `BATCH_CHARACTERS`."""
    batch, size = list[Item](), 0
    for item in items:
        batch.append(item)
        size += characters(item)
        if len(batch) == most or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def tokenise_in_batches(texts: Iterable[str], tokenizer: Tokenizer, max_tokens: int) -> Iterator[tuple[Ids, Ids]]:
    """Yield the packed ids `[N]` of each batch and the lengths of its texts, which sum to N.

    A text of more than `max_tokens` tokens becomes several. A whole document can be one sentence to us, if its script has
    other sentence ends than ours.
    """
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    for batch in in_batches(texts, len):
        encodings = tokenizer.encode_batch_fast(batch)
        parts = [part.ids for encoding in encodings for part in (encoding, *encoding.overflowing)]
        ids = np.fromiter(itertools.chain.from_iterable(parts), dtype=np.int64)
        yield ids, np.array([len(part) for part in parts], dtype=np.int64)
