"""A second form of lower encoder, as another package would bring it: one vector for the token in the centre of an n-gram."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hplm.core.settings import BaseConfig
from hplm.models.layers import OriginalEncoder
from hplm.models.lower import LowerEncoder


class CentreToken(LowerEncoder):
    """The weighted mean of an n-gram's word embeddings, then one small residual layer."""

    form = "centre"

    def __init__(self, config: BaseConfig) -> None:
        super().__init__(config)
        self.place_weights = nn.Parameter(torch.ones(config.window, config.hidden_size))
        self.embedding_norm = nn.LayerNorm(config.hidden_size)
        self.inner = nn.Linear(config.hidden_size, config.hidden_size)
        self.outer = nn.Linear(config.hidden_size, config.hidden_size)
        self.layer_norm = nn.LayerNorm(config.hidden_size)

    @staticmethod
    def vectors_per_ngram(n: int) -> int:
        return 1

    def compute(self, ngrams: Tensor) -> Tensor:
        mean = (self.word_embeddings(ngrams) * self.place_weights).mean(1)
        hidden = self.embedding_norm(mean)
        changed: Tensor = self.layer_norm(hidden + self.outer(F.gelu(self.inner(hidden))))
        return changed.unsqueeze(1)

    def start_from(self, original: OriginalEncoder) -> None:
        self.embedding_norm.load_state_dict(original.embedding_norm.state_dict())
