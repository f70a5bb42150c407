"""A domain's corpus prepared for training: cut into passages, tokenised, counted, a little of it held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hplm.core.text import load_tokenizer
from hplm.errors import CorpusTooSmallError, DataError
from hplm.models.base import Base
from hplm.plot.ngrams import Ids
from hplm.reporting.progress import Report
from hplm_builder.convert.distillation import PackedText
from hplm_builder.data import tokenising
from hplm_builder.data.languages import language_warnings
from hplm_builder.data.text_sources import passages
from hplm_builder.data.tokenising import tokenise_in_batches
from hplm_builder.domains.masking import Vocabulary, read_vocabulary
from hplm_builder.tables.plot_tables import Counted, count_packed

HELD_OUT_SHARE = 0.05
MOST_HELD_OUT_TOKENS = 10_000
READING = "read the corpus"


@dataclass(frozen=True)
class DomainCorpus:
    """A prepared corpus. `tokens` counts the tokens without special ones; `held_out` is not trained on.

    `warnings` are about the language.
    """

    text: PackedText
    held_out: PackedText
    vocabulary: Vocabulary
    grams: Counted
    token_counts: Ids
    documents: int
    tokens: int
    warnings: list[str]

    def summary(self) -> dict[str, int]:
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "held_out_tokens": self.held_out.num_tokens,
            "distinct_ngrams": len(self.grams.grams),
        }


def prepare_corpus(documents: Sequence[str], base: Base, least_tokens: int, seed: int, report: Report) -> DomainCorpus:
    """Cut, tokenise and count a corpus, and hold out a twentieth of its passages.

    Raises CorpusTooSmallError if the corpus has fewer than `least_tokens` tokens, or none; DataError for a single passage.
    """
    tokenizer = load_tokenizer(base.tokenizer_path)
    vocabulary = read_vocabulary(tokenizer, base.config)
    rng = np.random.default_rng(seed)
    size, parts = max(1, sum(map(len, documents))), []
    report(READING, 0.0)
    for ids, lengths in tokenise_in_batches(passages(documents, rng), tokenizer, base.config.max_tokens):
        parts.append(PackedText(ids, lengths))
        report(READING, min(1.0, len(parts) * tokenising.BATCH_CHARACTERS / size))
    report(READING, 1.0)
    tokens = sum(int(np.isin(part.ids, vocabulary.special, invert=True).sum()) for part in parts)
    if tokens < (least := max(1, least_tokens)):
        raise CorpusTooSmallError(
            f"the corpus has {tokens:,} tokens, a domain needs {least:,}: {least - tokens:,} more"
        )
    if sum(len(part.lengths) for part in parts) < 2:
        raise DataError("the corpus is a single passage: none can be held out to measure on")
    grams = count_packed(((part.ids, part.lengths.tolist()) for part in parts), base.config)
    packed = PackedText(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "lengths")))
    del parts
    count = len(packed.lengths)
    order = rng.permutation(count)
    wanted = min(MOST_HELD_OUT_TOKENS, packed.num_tokens * HELD_OUT_SHARE)
    held_out = 1 + int(np.searchsorted(np.cumsum(packed.lengths[order[:-1]]), wanted))
    is_held_out = np.zeros(count, dtype=bool)
    is_held_out[order[: min(held_out, count - 1)]] = True
    return DomainCorpus(
        text=_chosen(packed, ~is_held_out),
        held_out=_chosen(packed, is_held_out),
        vocabulary=vocabulary,
        grams=grams,
        token_counts=np.bincount(packed.ids, minlength=base.config.vocab_size),
        documents=len(documents),
        tokens=tokens,
        warnings=language_warnings(documents, base.load_text_encoder()),
    )


def _chosen(text: PackedText, chosen: npt.NDArray[np.bool_]) -> PackedText:
    return PackedText(text.ids[np.repeat(chosen, text.lengths)], text.lengths[chosen])
