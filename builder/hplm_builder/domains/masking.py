"""Masking tokens for masked language modelling: 15 % of them, as BERT does it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from hplm.core.settings import BaseConfig
from hplm.errors import DataError
from hplm.models.architectures import find_architecture
from hplm.plot.ngrams import Ids

MASKED_SHARE, MASK_SHARE, RANDOM_SHARE = 0.15, 0.8, 0.1


@dataclass(frozen=True)
class Vocabulary:
    """The ids of a tokenizer that masking uses: `mask_id`, `special` ids that are never masked, `ordinary` ids that may replace
    others.
    """

    mask_id: int
    special: Ids
    ordinary: Ids


@dataclass(frozen=True)
class Masked:
    """Masked token ids `[N]`, the `places` `[M]` to predict, and the ids that stood there: `targets` `[M]`."""

    ids: Ids
    places: Ids
    targets: Ids


def read_vocabulary(tokenizer: Tokenizer, config: BaseConfig) -> Vocabulary:
    """Return the vocabulary of a base's tokenizer. Raises DataError if the tokenizer has no mask token."""
    mask_token = find_architecture(config.architecture).mask_token
    mask_id = tokenizer.token_to_id(mask_token)
    if mask_id is None:
        raise DataError(f"the tokenizer of {config.name} knows no {mask_token}: masked language modelling needs it")
    special = np.unique([config.pad_id, mask_id, *tokenizer.encode("").ids])
    return Vocabulary(mask_id, special, np.setdiff1d(np.arange(config.vocab_size), special))


def mask_tokens(ids: Ids, vocabulary: Vocabulary, rng: np.random.Generator) -> Masked:
    """Choose 15 % of the ordinary tokens: 80 % of these become the mask token, 10 % another token, 10 % stay."""
    candidates = np.flatnonzero(~np.isin(ids, vocabulary.special))
    chosen = rng.permutation(candidates)[: round(len(candidates) * MASKED_SHARE)]
    masked_count, changed_count = (round(len(chosen) * share) for share in (MASK_SHARE, MASK_SHARE + RANDOM_SHARE))
    masked = ids.copy()
    masked[chosen[:masked_count]] = vocabulary.mask_id
    masked[chosen[masked_count:changed_count]] = rng.choice(vocabulary.ordinary, changed_count - masked_count)
    return Masked(masked, chosen, ids[chosen])
