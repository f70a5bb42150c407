"""Masking tokens for masked language modelling: 15 % of them, in BERT's way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from hplm.core.settings import BaseConfig
from hplm.errors import DataError
from hplm.plot.windows import Ids

MASKED_SHARE, MASK_SHARE, RANDOM_SHARE = 0.15, 0.8, 0.1


@dataclass(frozen=True)
class Vocabulary:
    """What masking needs of a tokenizer: `mask_id`, ids that are never masked, and ids that may stand in for another."""

    mask_id: int
    special: Ids
    ordinary: Ids


@dataclass(frozen=True)
class Masked:
    """`ids` `[N]` with some changed, the `places` `[M]` to predict, and what stood there: `targets` `[M]`."""

    ids: Ids
    places: Ids
    targets: Ids


def vocabulary(tokenizer: Tokenizer, config: BaseConfig) -> Vocabulary:
    """Of a base's tokenizer. Raises DataError where it knows no mask."""
    found = (tokenizer.token_to_id(name) for name in ("[MASK]", "<mask>"))
    mask_id = next((one for one in found if one is not None), None)
    if mask_id is None:
        raise DataError(f"the tokenizer of {config.name} knows no [MASK]: masked language modelling needs one")
    special = np.unique([config.pad_id, mask_id, *tokenizer.encode("").ids])
    return Vocabulary(mask_id, special, np.setdiff1d(np.arange(config.vocab_size), special))


def mask_tokens(ids: Ids, known: Vocabulary, rng: np.random.Generator) -> Masked:
    """Choose 15 % of the ordinary tokens; of those 80 % become [MASK], 10 % another token, 10 % stay."""
    candidates = np.flatnonzero(~np.isin(ids, known.special))
    chosen = rng.permutation(candidates)[: round(len(candidates) * MASKED_SHARE)]
    hidden, changed = round(len(chosen) * MASK_SHARE), round(len(chosen) * (MASK_SHARE + RANDOM_SHARE))
    masked = ids.copy()
    masked[chosen[:hidden]] = known.mask_id
    masked[chosen[hidden:changed]] = rng.choice(known.ordinary, changed - hidden)
    return Masked(masked, chosen, ids[chosen])
