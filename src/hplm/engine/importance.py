"""Importance of tokens: the attention that a token receives in all computed layers and heads (Tabi, section 4.2).

A batch keeps its queries and keys until its heads have answered. Only then is it known which texts are re-routed, and only
their attention is computed once more, now with its weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hplm.engine.kernels.attention_received import AttentionReceived
from hplm.engine.kernels.scripted import scripted
from hplm.models.layers import equal_runs

# Of a text: float32 `[T]`, the sum of the weights with which its tokens attend to each token.
Importance = npt.NDArray[np.float32]

_attention_received = scripted(AttentionReceived())


class KeptAttention:
    """The queries and keys of a batch's texts, in every computed layer.

    `qkv[i]` are those of layer i, `[N, 3 * H]`. Text `i` has `lengths[i]` tokens from `starts[i]` on. `relative` as in
    RunLayers.
    """

    def __init__(
        self,
        qkv: list[Tensor],
        starts: Sequence[int],
        lengths: Sequence[int],
        num_heads: int,
        relative: Tensor | None,
    ) -> None:
        self._qkv = qkv
        self._starts = starts
        self._lengths = lengths
        self._num_heads = num_heads
        self._relative = relative

    def importances(self, texts: Sequence[int]) -> list[Importance]:
        """Return the importance of each token of these texts, in their order: `[T]` each."""
        if not texts:
            return []
        # Texts of equal length are computed together. Neighbours in the batch need not be gathered.
        order = sorted(range(len(texts)), key=lambda i: (self._lengths[texts[i]], self._starts[texts[i]]))
        lengths = [self._lengths[texts[i]] for i in order]
        ends = np.cumsum(lengths)
        starts = [self._starts[texts[i]] for i in order]
        counts, sizes = (list(column) for column in zip(*equal_runs(lengths), strict=True))
        with torch.inference_mode():
            received = _attention_received(
                self._qkv,
                starts,
                counts,
                sizes,
                self._num_heads,
                self._relative,
            )
        parts = np.split(received.cpu().numpy(), ends[:-1])
        found: list[Importance] = [parts[0]] * len(texts)
        for place, part in zip(order, parts, strict=True):
            found[place] = part
        return found
