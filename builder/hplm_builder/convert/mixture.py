"""The text a conversion trains on: several sources, a share of each, a little of all held out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.progress import Progress

from hplm.core.text import load_tokenizer
from hplm.errors import DataError
from hplm_builder.convert.training import Ids, PackedText
from hplm_builder.data.corpus_file import read_corpus
from hplm_builder.data.text_sources import SOURCES, passages
from hplm_builder.data.tokenising import tokenise_in_batches

# Film reviews would outweigh the rest otherwise.
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
    """The documents of a corpus file, see `read_corpus`, or of a named source. Raises DataError."""
    if (path := Path(name)).is_file():
        # Of whoever builds: their own file, and their own memory.
        return read_corpus(path, most_bytes=1 << 40, most_documents=1 << 40, most_lines=1 << 40)
    if name in SOURCES:
        return list(SOURCES[name]())
    raise DataError(f"{name!r} is neither a text file nor one of {', '.join(SOURCES)}")


def read_to_count(name: str) -> list[str]:
    """As `read_source`, but a file's documents are cut: texts that are served are shorter, and a table knows their ends."""
    documents = read_source(name)
    return documents if name in SOURCES else list(passages(documents, np.random.default_rng(0)))


def mixture(
    shares: Mapping[str, float], tokenizer_json: Path, max_tokens: int, progress: Progress
) -> tuple[PackedText, PackedText]:
    """Tokenised passages of all sources: to train on, and held out."""
    tokenizer = load_tokenizer(tokenizer_json)
    cutting, choosing = np.random.default_rng(0), np.random.default_rng(1)
    train: list[Ids] = []
    held: list[Ids] = []
    for name, share in progress.track(shares.items(), description="read text"):
        for ids, lengths in tokenise_in_batches(passages(read_source(name), cutting), tokenizer, max_tokens):
            draws = choosing.random(len(lengths))
            kept = choosing.random(len(lengths)) < share
            for part, draw, keep in zip(np.split(ids, np.cumsum(lengths)[:-1]), draws, kept, strict=True):
                if draw > 1 - HELD_OUT:
                    held.append(part)
                elif keep:
                    train.append(part)
    return _packed(train), _packed(held)


def _packed(passages: list[Ids]) -> PackedText:
    if not passages:
        raise DataError("the text is too small to hold some of it out: give at least a few thousand passages")
    return PackedText(np.concatenate(passages), np.array([len(p) for p in passages], dtype=np.int64))
