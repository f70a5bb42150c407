"""The attention that each token of a batch receives. The slow twin is `hplm.engine.reference.importance`."""

# No `from __future__ import annotations`, see `hplm.engine.kernels.scripted`.

import torch
from torch import Tensor


def attention_received(
    qkv: list[Tensor], places: Tensor, counts: list[int], lengths: list[int], num_heads: int, relative: Tensor | None
) -> Tensor:
    """Sum the attention weights of each token as a key, over layers, heads and queries of the token's text: float32 `[M]`.

    `places` int64 `[M]` are the tokens' places in the layers' `qkv` `[N, 3 * H]`: `counts[i]` texts of `lengths[i]` tokens one
    after another. `relative` `[heads, L, L]` are scores to add.
    """
    layers = len(qkv)
    size = qkv[0].size(1) // 3
    head = size // num_heads
    gathered = [layer[:, : 2 * size].index_select(0, places) for layer in qkv]
    received = torch.empty([places.size(0)], device=places.device)
    start = 0
    for i in range(len(counts)):
        length = lengths[i]
        end = start + counts[i] * length
        rows = torch.cat([layer[start:end] for layer in gathered]).float()
        both = rows.view(layers * counts[i], length, 2, num_heads, head).permute(2, 0, 3, 1, 4)
        # A million weights at once, 4 MB: a core's cache holds them, and long texts take no more memory.
        step = max(1, int(1_000_000 / (num_heads * length * length)))
        sums = torch.empty([layers * counts[i], length], device=places.device)
        for first in range(0, layers * counts[i], step):
            query = both[0, first : first + step] * head**-0.5
            scores = torch.matmul(query, both[1, first : first + step].transpose(-1, -2))
            if relative is not None:
                scores += relative[:, :length, :length]
            weights = torch.softmax(scores, dim=-1)
            sums[first : first + step] = weights.flatten(1, 2).sum(1)
        received[start:end] = sums.view(layers, counts[i] * length).sum(0)
        start = end
    return received
