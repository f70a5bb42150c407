"""The interface of a lower encoder: what a base computes below the cut, once for each n-gram, so that tables can store it.

The n-gram of token t holds the n tokens around t. A form of lower encoder gives `vectors_per_ngram` vectors for an n-gram:
n for windows that overlap (`hplm.engine.windows`), 1 for an encoder of the centre token. Everything else is the same for all
forms. Vector i belongs to token t + i - centre(vectors_per_ngram). A token's hidden state is the mean of its vectors.
So tables, look-up plans and stages know the number of vectors and nothing more of a form.

Shapes: W n-grams, N tokens of all texts packed, H hidden size, n tokens and v vectors of an n-gram.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hplm.core.settings import BaseConfig
from hplm.errors import ConfigError
from hplm.models.base import Base
from hplm.models.layers import OriginalEncoder
from hplm.plot.ngrams import Ids, centre, text_ngrams


class LowerEncoder(nn.Module, ABC):
    """A lower encoder: token ids of n-grams -> the vectors that tables store for them.

    A form is a subclass, named by `form` in a base's config. An n-gram holds `[PAD]` beyond the edges of its text. A bigram or
    unigram of the back-off is an n-gram that holds `[PAD]` beyond its tokens. `word_embeddings` are the base's: conversion and
    further pretraining leave them as they are, and all domains of a base share them.
    """

    form: ClassVar[str]

    def __init__(self, config: BaseConfig) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        # The module that computes for serving, made by `hplm.engine.lower_layers.pack`, and whether its products are in int8.
        self.packed: nn.Module | None = None
        self.is_int8 = False

    @staticmethod
    @abstractmethod
    def vectors_per_ngram(n: int) -> int:
        """Return how many vectors the form gives for an n-gram of `n` tokens: 1 to `n`."""

    @abstractmethod
    def compute(self, ngrams: Tensor) -> Tensor:
        """Compute the vectors `[W, v, H]` of n-grams: int64 `[W, n]` of token ids."""

    @abstractmethod
    def start_from(self, original: OriginalEncoder) -> None:
        """Take the weights that a conversion of `original` starts from, all but the word embeddings."""

    def make_packed(self, dtype: torch.dtype, int8_base: Base | None) -> nn.Module | None:
        """Return a module that computes as `compute` does with matrices in oneDNN's order; None if the form has none.

        Products are computed in `dtype`. With `int8_base`, the base, the layers' products are computed in int8.
        Raises ConfigError if the form cannot.
        """
        if int8_base is not None:
            raise ConfigError(f"a lower encoder of form {self.form!r} has no int8 products: leave quantization out")
        return None

    @property
    def device(self) -> torch.device:
        return self.word_embeddings.weight.device

    def forward(self, ngrams: Tensor) -> Tensor:
        """Compute vectors as `compute` does, by the packed module if there is one."""
        if self.packed is None:
            return self.compute(ngrams)
        with torch.autocast(ngrams.device.type, enabled=False):
            vectors: Tensor = self.packed(ngrams)
            return vectors

    def _save_to_state_dict(self, *args: Any) -> None:
        if self.packed is not None:
            # A packed encoder may have dropped its layers. Its state would lack them silently.
            raise TypeError("matrices in oneDNN's order cannot be saved: save the module before it is packed")
        super()._save_to_state_dict(*args)


def merge(vectors: Tensor, exists: Tensor) -> Tensor:
    """Return each token's mean over its vectors that exist (HMI eq. 2): `[N, v, H]`, `[N, v]` -> `[N, H]`.

    The roll never crosses texts, because a vector that belongs to no token of its text does not exist.
    """
    v = vectors.shape[1]
    kept = vectors * exists.unsqueeze(-1)
    total = sum(torch.roll(kept[:, i], i - centre(v), 0) for i in range(v))
    count = sum(torch.roll(exists[:, i].to(vectors.dtype), i - centre(v), 0) for i in range(v))
    assert isinstance(total, Tensor)
    assert isinstance(count, Tensor)
    return total / count.unsqueeze(-1)


def merged_ngrams(lower: LowerEncoder, ngrams: Tensor, exists: Tensor) -> Tensor:
    """Compute hidden states `[N, H]` of n-grams `[N, n]`, with gradients. `exists` `[N, v]` says which vectors count."""
    # Frequent n-grams occur many times in a batch: each is computed once.
    unique, inverse = torch.unique(ngrams, dim=0, return_inverse=True)
    vectors = F.embedding(inverse, lower(unique).flatten(1)).unflatten(1, (exists.shape[1], -1))
    return merge(vectors, exists)


def merged_texts(lower: LowerEncoder, ids: Ids, lengths: Sequence[int]) -> Tensor:
    """Compute hidden states `[N, H]` of packed texts `ids` `[N]`, with gradients."""
    ngrams, exists = (torch.from_numpy(part).to(lower.device) for part in text_ngrams(ids, lengths, lower.config))
    return merged_ngrams(lower, ngrams, exists)
