"""The text that a conversion trains on: a share of each of several sources, with a little of each held out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.progress import Progress

from hplm.core.text import load_tokenizer
from hplm.errors import DataError
from hplm.plot.ngrams import Ids
from hplm_builder.convert.training import PackedText
from hplm_builder.data.corpus_file import read_corpus
from hplm_builder.data.text_sources import SOURCES, passages
from hplm_builder.data.tokenising import tokenise_in_batches

# Shares of the named sources. With a share of 1 film reviews would outweigh the rest.
SHARES: Mapping[str, float] = {
    "pubmed": 1.0,
    "wikipedia": 1.0,
    "films": 0.5,
    "dialog": 1.0,
    "snippets": 1.0,
    "phenotypes": 1.0,
    "icd": 1.0,
}
HELD_OUT = 0.003


def read_source(name: str) -> list[str]:
    """Return the documents of a corpus file, see `read_corpus`, or of a named source. Raises DataError."""
    if (path := Path(name)).is_file():
        # No limits: users who build a base read their own file into their own memory.
        return read_corpus(path, most_bytes=1 << 40, most_documents=1 << 40, most_lines=1 << 40)
    if name in SOURCES:
        return list(SOURCES[name]())
    raise DataError(f"{name!r} is neither a text file nor one of {', '.join(SOURCES)}")


def read_to_count(name: str) -> list[str]:
    """Return documents as `read_source` does, but cut a file's documents into passages.

    Served texts are shorter than documents, and a table should hold the n-grams at their ends.
    """
    documents = read_source(name)
    return documents if name in SOURCES else list(passages(documents, np.random.default_rng(0)))


def mixture(
    shares: Mapping[str, float], tokenizer_json: Path, max_tokens: int, progress: Progress
) -> tuple[PackedText, PackedText]:
    """Return tokenised passages of all sources: to train on, and held out."""
    tokenizer = load_tokenizer(tokenizer_json)
    cutting, choosing = np.random.default_rng(0), np.random.default_rng(1)
    train: list[Ids] = []
    held_out: list[Ids] = []
    for name, share in progress.track(shares.items(), description="read text"):
        for ids, lengths in tokenise_in_batches(passages(read_source(name), cutting), tokenizer, max_tokens):
            draws = choosing.random(len(lengths))
            kept = choosing.random(len(lengths)) < share
            for part, draw, keep in zip(np.split(ids, np.cumsum(lengths)[:-1]), draws, kept, strict=True):
                if draw > 1 - HELD_OUT:
                    held_out.append(part)
                elif keep:
                    train.append(part)
    return _packed(train), _packed(held_out)


def _packed(passages: list[Ids]) -> PackedText:
    if not passages:
        raise DataError("the text is too small to hold some of it out: give at least a few thousand passages")
    return PackedText(np.concatenate(passages), np.array([len(p) for p in passages], dtype=np.int64))
