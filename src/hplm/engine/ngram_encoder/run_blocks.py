"""The n-gram encoder as it is served. The same computation, readable, is `NgramEncoder.compute`."""

# No `from __future__ import annotations`, see `hplm.engine.kernels.scripted`.

from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hplm.engine.kernels.int8 import PackedHalf
from hplm.engine.kernels.int8_products import feed_forward
from hplm.engine.kernels.onednn import pack_matrix
from hplm.models.layers import HalfLayer


class RunBlocks(nn.Module):
    """`NgramEncoder.compute` with matrices in oneDNN's order, in one call: n-grams int64 `[W, n]` -> `[W, 1, H]`.

    `projection` `[H, n H]` holds the projections of all places side by side. Products are computed in `dtype`, those of the
    blocks in int8 if `int8` has each block's half.
    """

    is_int8: Final[bool]
    blocks: list[list[Tensor]]
    norms: list[list[Tensor]]
    int8_first: list[list[Tensor]]
    int8_second: list[list[Tensor]]
    int8_scales: list[tuple[float, float]]
    int8_zeros: list[tuple[int, int]]
    int8_apart: list[list[Tensor]]

    def __init__(
        self,
        words: Tensor,
        projection: Tensor,
        bias: Tensor,
        norm: nn.LayerNorm,
        blocks: Sequence[HalfLayer],
        pad_id: int,
        centre: int,
        dtype: torch.dtype,
        int8: Sequence[PackedHalf] = (),
    ) -> None:
        super().__init__()
        # Not converted: all domains of a base share them.
        self.words = words
        self.projection = pack_matrix(projection.to(dtype))
        self.bias = bias.to(dtype)
        self.norm = [norm.weight.detach(), norm.bias.detach()]
        self.is_int8 = len(int8) > 0
        self.blocks = [] if int8 else [_packed_block(block, dtype) for block in blocks]
        self.norms = [[block.ffn_norm.weight.detach(), block.ffn_norm.bias.detach()] for block in blocks]
        self.int8_first = [half.first for half in int8]
        self.int8_second = [half.second for half in int8]
        self.int8_scales = [half.scales for half in int8]
        self.int8_zeros = [half.zeros for half in int8]
        self.int8_apart = [half.apart for half in int8]
        self.dtype = dtype
        self.eps = norm.eps
        self.size = words.size(1)
        self.pad_id = pad_id
        self.centre = centre

    def forward(self, ngrams: Tensor) -> Tensor:
        is_token = ngrams != self.pad_id
        is_token[:, self.centre] = True
        words = (F.embedding(ngrams, self.words) * is_token.unsqueeze(2)).flatten(1).to(self.dtype)
        summed = torch.ops.mkldnn._linear_pointwise(words, self.projection, self.bias, "none", [], "")
        hidden = F.layer_norm(summed.float(), [self.size], self.norm[0], self.norm[1], self.eps)
        for block, norm in enumerate(self.norms):
            outer = self._int8_block(block, hidden) if self.is_int8 else self._block(self.blocks[block], hidden)
            hidden = F.layer_norm(outer, [self.size], norm[0], norm[1], self.eps)
        return hidden.unsqueeze(1)

    def _block(self, weights: list[Tensor], hidden: Tensor) -> Tensor:
        inner = torch.ops.mkldnn._linear_pointwise(hidden.to(self.dtype), weights[0], weights[1], "gelu", [], "none")
        return hidden + torch.ops.mkldnn._linear_pointwise(inner, weights[2], weights[3], "none", [], "")

    def _int8_block(self, block: int, hidden: Tensor) -> Tensor:
        return feed_forward(
            hidden,
            self.int8_first[block],
            self.int8_second[block],
            self.int8_scales[block],
            self.int8_zeros[block],
            self.int8_apart[block],
        )


def _packed_block(block: HalfLayer, dtype: torch.dtype) -> list[Tensor]:
    return [
        tensor
        for linear in (block.ffn_in, block.ffn_out)
        for tensor in (pack_matrix(linear.weight.to(dtype)), linear.bias.detach().to(dtype))
    ]
