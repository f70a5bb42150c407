"""Windows that overlap: transformer layers over each n-gram give a vector for each of its tokens (SkipBERT, HMI 3.2.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hplm.core.settings import BaseConfig
from hplm.engine.kernels.scripted import scripted
from hplm.engine.windows.int8_windows import measure_window_ranges, quantise_window_layer
from hplm.engine.windows.run_windows import RunWindows
from hplm.models.base import Base
from hplm.models.layers import OriginalEncoder, TransformerLayer, relative_bias
from hplm.models.lower import LowerEncoder
from hplm.plot.ngrams import centre

# A window has no absolute position: it starts from the mean of the first positions, without that of [CLS].
MEAN_POSITIONS = slice(1, 64)


class WindowEncoder(LowerEncoder):
    """BERT layers over windows of n tokens without absolute positions, and a learned gate for each vector.

    No token attends to the padding of its window, so padding does not change the vectors of the tokens that a window holds.
    """

    form = "windows"

    def __init__(self, config: BaseConfig) -> None:
        super().__init__(config)
        self.window_position = nn.Parameter(torch.zeros(config.window, config.hidden_size))
        self.embedding_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.relative = relative_bias(config)
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.window_layers))
        # The gate is elementwise, one for each place in the window. Zeros make it 1: an unconverted base passes through.
        self.gate_weight = nn.Parameter(torch.zeros(config.window, config.hidden_size, config.hidden_size))
        self.gate_bias = nn.Parameter(torch.zeros(config.window, config.hidden_size))

    @staticmethod
    def vectors_per_ngram(n: int) -> int:
        return n

    def compute(self, ngrams: Tensor) -> Tensor:
        config = self.config
        is_token = ngrams != config.pad_id
        is_token[:, centre(config.window)] = True
        bias = torch.zeros(ngrams.shape, device=ngrams.device).masked_fill_(~is_token, float("-inf"))[:, None, :, None]
        if self.relative is not None:
            bias = bias + self.relative(config.window).permute(1, 2, 0)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            # Products of 3 x 3 are too small for a matrix kernel: elementwise is a fifth faster on a CPU.
            heads = (len(ngrams), config.window, config.num_heads, -1)
            query, key, value = query.view(heads), key.view(heads), value.view(heads)
            scores = (query[:, :, None] * key[:, None]).sum(-1) * query.shape[-1] ** -0.5
            weights = (scores + bias.to(scores.dtype)).softmax(2)
            # A sum place by place takes half the time of one sum over all places.
            context = weights[:, :, 0, :, None] * value[:, None, 0]
            for place in range(1, config.window):
                context = context.addcmul_(weights[:, :, place, :, None], value[:, None, place])
            return context.flatten(2)

        hidden: Tensor = self.embedding_norm(self.word_embeddings(ngrams) + self.window_position)
        for layer in self.layers:
            hidden = layer(hidden, attend)
        gate = torch.einsum("wnh,nkh->wnk", hidden, self.gate_weight)
        return 2 * torch.sigmoid(gate + self.gate_bias) * hidden

    def start_from(self, original: OriginalEncoder) -> None:
        self.embedding_norm.load_state_dict(original.embedding_norm.state_dict())
        for mine, theirs in zip(self.layers, original.layers, strict=False):
            mine.load_state_dict(theirs.state_dict())
        if self.relative is not None:
            assert original.relative is not None
            self.relative.load_state_dict(original.relative.state_dict())
        with torch.no_grad():
            positions = original.position_embeddings.weight[MEAN_POSITIONS].mean(0)
            self.window_position.add_(original.token_types[0] + positions)

    def make_packed(self, dtype: torch.dtype, int8_base: Base | None) -> nn.Module | None:
        int8 = []
        if int8_base is not None:
            ranges = measure_window_ranges(int8_base, self)
            int8 = [quantise_window_layer(*pair) for pair in zip(self.layers, ranges, strict=True)]
        packed: nn.Module = scripted(RunWindows(self, dtype, int8))
        # The packed module has its own matrices.
        self.layers = nn.ModuleList()
        return packed
