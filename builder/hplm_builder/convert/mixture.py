"""The text that a conversion trains on: a share of each of several sources, with a little of each held out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.progress import Progress

from hplm.core.text import load_tokenizer
from hplm.errors import DataError
from hplm.plot.ngrams import Ids
from hplm_builder.convert.distillation import PackedText
from hplm_builder.data.corpus_file import read_corpus
from hplm_builder.data.evaluated_texts import is_evaluated
from hplm_builder.data.text_sources import SOURCES, passages
from hplm_builder.data.tokenising import tokenise_in_batches

# Share of each named source's passages; a share of 3 takes each passage three times. With shares of 1 PubMed and film reviews
# would outweigh the rest. Passages of under 12 tokens (questions, entities, titles) have about a tenth of all tokens.
SHARES: Mapping[str, float] = {
    "pubmed": 0.7,
    "titles": 1.0,
    "subjects": 2.0,
    "drugs": 1.0,
    "wikipedia": 1.0,
    "films": 0.5,
    "dialog": 1.0,
    "chat": 1.0,
    "sentences": 1.0,
    "messages": 1.0,
    "snippets": 1.0,
    "machine-learning": 3.0,
    "phenotypes": 1.0,
    "phenotype-names": 1.0,
    "icd": 1.0,
    "icd-names": 1.0,
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
    """Return tokenised passages of all sources: to train on, and held out.

    A share below 1 chooses passages at random. A share above 1 repeats passages: 2.5 takes half of them twice, half thrice.
    """
    tokenizer = load_tokenizer(tokenizer_json)
    cutting, choosing = np.random.default_rng(0), np.random.default_rng(1)
    train: list[Ids] = []
    held_out: list[Ids] = []
    for name, share in progress.track(shares.items(), description="read text"):
        texts = passages(read_source(name), cutting)
        if name in SOURCES:
            texts = (text for text in texts if not is_evaluated(text))
        for ids, lengths in tokenise_in_batches(texts, tokenizer, max_tokens):
            draws = choosing.random(len(lengths))
            copies = np.floor(share + choosing.random(len(lengths))).astype(int).tolist()
            for part, draw, count in zip(np.split(ids, np.cumsum(lengths)[:-1]), draws, copies, strict=True):
                if draw > 1 - HELD_OUT:
                    held_out.append(part)
                else:
                    train += [part] * count
    return _packed(train), _packed(held_out)


def _packed(passages: list[Ids]) -> PackedText:
    if not passages:
        raise DataError("the text is too small to hold some of it out: give at least a few thousand passages")
    return PackedText(np.concatenate(passages), np.array([len(p) for p in passages], dtype=np.int64))
