"""The attention that each token of a batch receives. The slow twin is `hplm.engine.reference.importance`."""

# No `from __future__ import annotations`, see `hplm.engine.kernels.scripted`.

from typing import Final

import torch
from torch import Tensor, nn


class AttentionReceived(nn.Module):
    """Attention weights of texts, summed for each token as a key.

    `most_weights` are computed at once: 4 MB stay in a core's cache, and long texts take no more memory. A row of exponents
    whose sum is between `least_sum` and `most_sum` has neither overflowed nor lost digits, as float32 ends at 1e-38 and 3e38.
    """

    most_weights: Final[int]
    least_sum: Final[float]
    most_sum: Final[float]

    def __init__(self) -> None:
        super().__init__()
        self.most_weights = 1_000_000
        self.least_sum = 1e-30
        self.most_sum = 1e30
        self.nothing = torch.empty(0)

    def forward(
        self,
        qkv: list[Tensor],
        starts: list[int],
        counts: list[int],
        lengths: list[int],
        num_heads: int,
        relative: Tensor | None,
    ) -> Tensor:
        """Sum the attention weights over layers, heads and queries of a token's text: float32 `[M]`.

        `starts` are the texts' first places in the layers' `qkv` `[N, 3 * H]`: `counts[i]` texts of `lengths[i]` tokens one
        after another. `relative` `[heads, L, L]` are scores to add.
        """
        size = qkv[0].size(1) // 3
        head = size // num_heads
        device, dtype = qkv[0].device, qkv[0].dtype
        parts: list[Tensor] = []
        text = 0
        for i in range(len(counts)):
            length = lengths[i]
            step = max(1, self.most_weights // (len(qkv) * num_heads * length * length))
            for first in range(0, counts[i], step):
                count = min(step, counts[i] - first)
                own_starts = starts[text : text + count]
                text += count
                begin = own_starts[0]
                are_neighbours = True
                for place in range(count):
                    are_neighbours = are_neighbours and own_starts[place] == begin + place * length
                places = self.nothing
                if not are_neighbours:
                    steps = torch.arange(length)
                    places = (torch.tensor(own_starts)[:, None] + steps).flatten().to(device)
                # In the layers' own format first: one copy that also converts takes half as long again.
                both = torch.empty([2, len(qkv), count, num_heads, length, head], dtype=dtype, device=device)
                for layer in range(len(qkv)):
                    rows = qkv[layer][:, : 2 * size]
                    own = rows[begin : begin + count * length] if are_neighbours else rows.index_select(0, places)
                    both[:, layer].copy_(own.view(count, length, 2, num_heads, head).permute(2, 0, 3, 1, 4))
                parts.append(self._received(both.float(), relative))
        return torch.cat(parts)

    def _received(self, both: Tensor, relative: Tensor | None) -> Tensor:
        """Compute texts of one length: queries and keys `[2, layers, texts, heads, length, head]` -> `[texts * length]`."""
        layers, texts, heads, length = both.size(1), both.size(2), both.size(3), both.size(4)
        rows = layers * texts
        weights = self._scores(both, relative)
        if both.is_cuda:
            # A look at the sums would wait for the GPU.
            is_safe = False
            sums = weights
        else:
            # Without the usual shift by the largest score, because a softmax of short rows takes several times as long.
            sums = weights.exp_().sum(-1)
            least, most = sums.aminmax()
            is_safe = bool(least > self.least_sum) and bool(most < self.most_sum)
        if not is_safe:
            if not both.is_cuda:
                weights = self._scores(both, relative)
            weights = weights.sub_(weights.amax(-1, keepdim=True)).exp_()
            sums = weights.sum(-1)
        inverse = sums.reciprocal_().view(rows, 1, heads * length)
        summed = torch.bmm(inverse, weights.view(rows, heads * length, length))
        return summed.view(layers, texts * length).sum(0)

    def _scores(self, both: Tensor, relative: Tensor | None) -> Tensor:
        """Compute the scores of queries and keys: `[layers * texts * heads, length, length]`."""
        heads, length, head = both.size(3), both.size(4), both.size(5)
        query, key = both[0].flatten(0, 2), both[1].flatten(0, 2)
        scores = torch.empty([query.size(0), length, length], device=both.device)
        torch.baddbmm(scores, query, key.transpose(1, 2), beta=0.0, alpha=head**-0.5, out=scores)
        if relative is not None:
            scores.view(-1, heads, length, length).add_(relative[:, :length, :length])
        return scores
