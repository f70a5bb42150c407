"""A domain's corpus made ready: cut into passages, tokenised, counted, a little of it held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from hplm.errors import CorpusTooSmallError, DataError
from hplm.nn.base import Base
from hplm.progress import Report
from hplm_builder.convert import Ids, PackedText
from hplm_builder.corpora import passages
from hplm_builder.masking import Vocabulary, vocabulary
from hplm_builder.plots import CHUNK, Counted, count_packed

HELD_OUT_SHARE = 0.05
MOST_HELD_OUT_TOKENS = 10_000
READING = "read the corpus"


@dataclass(frozen=True)
class DomainCorpus:
    """A corpus ready to train on. `tokens` counts those of the text, without special ones; `held` is not trained on."""

    text: PackedText
    held: PackedText
    known: Vocabulary
    grams: Counted
    token_counts: Ids
    documents: int
    tokens: int

    def about(self) -> dict[str, int]:
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "held_out_tokens": self.held.num_tokens,
            "distinct_ngrams": len(self.grams.grams),
        }


def prepare_corpus(documents: Sequence[str], base: Base, least_tokens: int, seed: int, report: Report) -> DomainCorpus:
    """Cut, tokenise and count a corpus, and hold a twentieth of its passages out.

    Raises CorpusTooSmallError below `least_tokens`, DataError for a single passage.
    """
    tokenizer = Tokenizer.from_file(str(base.tokenizer_path))
    known = vocabulary(tokenizer, base.config)
    rng = np.random.default_rng(seed)
    parts = []
    for number, part in enumerate(_encoded(documents, tokenizer, base.config.max_tokens, rng)):
        parts.append(part)
        # How many chunks come is not known before they have: this only shows that it goes on.
        report(READING, 1 - 0.9**number)
    report(READING, 1.0)
    texts = [text for part in parts for text in part]
    packed = _packed(texts)
    tokens = int(np.isin(packed.ids, known.special, invert=True).sum())
    if tokens < least_tokens:
        raise CorpusTooSmallError(
            f"the corpus has {tokens:,} tokens, a domain needs {least_tokens:,}: {least_tokens - tokens:,} more"
        )
    if len(texts) < 2:
        raise DataError("the corpus is a single passage: none can be held out to measure on")
    order = rng.permutation(len(texts))
    wanted = min(MOST_HELD_OUT_TOKENS, packed.num_tokens * HELD_OUT_SHARE)
    held = 1 + int(np.searchsorted(np.cumsum(packed.lengths[order[:-1]]), wanted))
    held = min(held, len(texts) - 1)
    return DomainCorpus(
        text=_packed([texts[i] for i in np.sort(order[held:])]),
        held=_packed([texts[i] for i in np.sort(order[:held])]),
        known=known,
        grams=count_packed(((p.ids, p.lengths.tolist()) for p in map(_packed, parts) if p.num_tokens), base.config),
        token_counts=np.bincount(packed.ids, minlength=base.config.vocab_size),
        documents=len(documents),
        tokens=tokens,
    )


def _encoded(
    documents: Sequence[str], tokenizer: Tokenizer, max_tokens: int, rng: np.random.Generator
) -> Iterator[list[Ids]]:
    """Ids of the documents' passages, some thousand documents at a time; what is longer than a text may be is several."""
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    for start in range(0, len(documents), CHUNK):
        encodings = tokenizer.encode_batch_fast(list(passages(list(documents[start : start + CHUNK]), rng)))
        yield [np.array(part.ids, dtype=np.int64) for one in encodings for part in (one, *one.overflowing)]


def _packed(texts: Sequence[Ids]) -> PackedText:
    ids = np.concatenate([np.zeros(0, dtype=np.int64), *texts])
    return PackedText(ids, np.array([len(text) for text in texts], dtype=np.int64))
