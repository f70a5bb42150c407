"""An encoder of the centre token: a sum of projected word embeddings, then feed-forward blocks, give one vector."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hplm.core.settings import BaseConfig
from hplm.engine.kernels.int8 import Ranges, pack_half
from hplm.engine.kernels.int8_ranges import block_ranges_of, sample_ngrams
from hplm.engine.kernels.scripted import scripted
from hplm.engine.ngram_encoder.run_blocks import RunBlocks
from hplm.models.base import Base
from hplm.models.layers import FeedForward, HalfLayer, OriginalEncoder
from hplm.models.lower import LowerEncoder
from hplm.plot.ngrams import centre

# An n-gram has no absolute position: it starts from the mean of the first positions, without that of [CLS].
MEAN_POSITIONS = slice(1, 64)


class NgramEncoder(LowerEncoder):
    """A projection of each place's word embedding, their sum, and `window_layers` feed-forward blocks.

    `h = LN(sum_i P_i E[x_i] + b)` over the places of the n-gram, then `h = LN(h + W2 gelu(W1 h))` in each block. A place
    beyond the edges of its text adds nothing. A block costs 8 H² products a token and a projection H², whatever n is.
    """

    form = "ngram-encoder"

    def __init__(self, config: BaseConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.places = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(config.window))
        self.bias = nn.Parameter(torch.zeros(size))
        self.embedding_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.blocks = nn.ModuleList(FeedForward(config) for _ in range(config.window_layers))

    @staticmethod
    def vectors_per_ngram(n: int) -> int:
        return 1

    def embed(self, ngrams: Tensor) -> Tensor:
        """Compute the input of the first block `[W, H]` from n-grams `[W, n]`."""
        is_token = ngrams != self.config.pad_id
        is_token[:, centre(self.config.window)] = True
        words = self.word_embeddings(ngrams) * is_token.unsqueeze(-1)
        hidden = self.bias
        for place, projection in enumerate(self.places):
            hidden = hidden + projection(words[:, place])
        normed: Tensor = self.embedding_norm(hidden)
        return normed

    def compute(self, ngrams: Tensor) -> Tensor:
        hidden = self.embed(ngrams)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.unsqueeze(1)

    def start_from(self, original: OriginalEncoder) -> None:
        self.embedding_norm.load_state_dict(original.embedding_norm.state_dict())
        for block, layer in zip(self.blocks, original.layers, strict=False):
            theirs = layer.state_dict()
            block.load_state_dict({name: theirs[name] for name in block.state_dict()})
        with torch.no_grad():
            # The token itself passes through, its neighbours add nothing yet.
            for place, projection in enumerate(self.places):
                share = float(place == centre(self.config.window))
                projection.load_state_dict({"weight": share * torch.eye(self.config.hidden_size)})
            self.bias.copy_(original.token_types[0] + original.position_embeddings.weight[MEAN_POSITIONS].mean(0))

    def make_packed(self, dtype: torch.dtype, int8_base: Base | None) -> nn.Module | None:
        int8 = []
        if int8_base is not None:
            ranges = self.measure_ranges(int8_base)
            int8 = [pack_half(*pair) for pair in zip(self._halves(), ranges, strict=True)]
        weights = torch.cat([projection.state_dict()["weight"] for projection in self.places], 1)
        packed: nn.Module = scripted(
            RunBlocks(
                self.word_embeddings.weight,
                weights,
                self.bias,
                self.embedding_norm,
                self._halves(),
                self.config.pad_id,
                centre(self.config.window),
                dtype,
                int8,
            )
        )
        # The packed module has its own matrices.
        self.places, self.blocks = nn.ModuleList(), nn.ModuleList()
        return packed

    def measure_ranges(self, base: Base) -> list[Ranges]:
        """Measure the ranges of each block's products on sample n-grams of the encoder's base."""
        grams = sample_ngrams(base)
        return block_ranges_of(self.blocks, lambda: self.compute(grams))

    def _halves(self) -> list[HalfLayer]:
        return [block for block in self.blocks if isinstance(block, HalfLayer)]
