"""One upper layer as a function that runs without Python's interpreter lock.

A serving stub has threads that read, load and answer beside the one that computes. Each operation of torch lets go of the
lock and has to get it back, behind whatever another thread is doing: two hundred operations a layer made a busy server's
layer take two to four times as long as alone. TorchScript runs a whole function under one release of the lock. It is
deprecated, but what replaces it wants a C++ compiler where the server runs; where torch has it no more, the plain module
below does the same, slower.

The same computation, readable, is `TransformerLayer.forward` with `AdapterSlots.reference_adapt`.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def adapt_planned(
    attended: Tensor,
    parts: list[Tensor],
    own_slots: list[int],
    own_places: list[Tensor],
    chunk_slots: Tensor | None,
    chunk_gather: Tensor | None,
    chunk_real: Tensor | None,
    back: Tensor | None,
) -> Tensor:
    """Each text's adapter (HMI eq. 1) over its tokens, `attended` `[N, H]`, as an AdapterPlan says; `parts` of one layer."""
    adapted: list[Tensor] = []
    for i in range(len(own_slots)):
        tokens = attended.index_select(0, own_places[i]) if len(own_places) > 0 else attended
        slot = own_slots[i]
        if slot != 0:
            reduced = torch.addmm(parts[1][slot], tokens, parts[0][slot]).relu_()
            tokens = torch.addmm(parts[3][slot], reduced, parts[2][slot]).add_(tokens)
        adapted.append(tokens)
    if chunk_slots is not None and chunk_gather is not None:
        padded = attended.index_select(0, chunk_gather).view(chunk_slots.size(0), -1, attended.size(1))
        reduced = torch.baddbmm(
            parts[1].index_select(0, chunk_slots).unsqueeze(1), padded, parts[0].index_select(0, chunk_slots)
        ).relu_()
        tokens = torch.baddbmm(
            parts[3].index_select(0, chunk_slots).unsqueeze(1), reduced, parts[2].index_select(0, chunk_slots)
        )
        tokens = tokens.add_(padded).flatten(0, 1)
        adapted.append(tokens if chunk_real is None else tokens.index_select(0, chunk_real))
    together = adapted[0] if len(adapted) == 1 else torch.cat(adapted)
    return together if back is None else together.index_select(0, back)


class RunLayers(nn.Module):
    """The upper layers, with weights and slots' parts inside: a tensor that crosses from Python takes the lock to count.

    `weights[i]` are those of upper layer i (see `layer_weights`), `parts` those of AdapterSlots, which it fills in place.
    """

    def __init__(self, weights: list[list[Tensor]], parts: list[Tensor], eps: float, num_heads: int) -> None:
        super().__init__()
        self.weights = weights
        self.parts = [[part[layer] for part in parts] for layer in range(len(weights))]
        self.eps = eps
        self.num_heads = num_heads

    def forward(
        self,
        layer: int,
        hidden: Tensor,
        counts: list[int],
        lengths: list[int],
        mask: Tensor | None,
        own_slots: list[int],
        own_places: list[Tensor],
        chunk_slots: Tensor | None,
        chunk_gather: Tensor | None,
        chunk_real: Tensor | None,
        back: Tensor | None,
    ) -> Tensor:
        """One layer: `hidden` `[N, H]` -> `[N, H]`. See `Attention` and `AdapterPlan` for what the others are."""
        weights = self.weights[layer]
        size = hidden.size(1)
        qkv = F.linear(hidden, weights[0], weights[1])
        context = torch.empty_like(hidden)
        start = 0
        for i in range(len(counts)):
            end = start + counts[i] * lengths[i]
            run = (
                qkv[start:end]
                .view(counts[i], lengths[i], 3, self.num_heads, size // self.num_heads)
                .permute(2, 0, 3, 1, 4)
            )
            found = F.scaled_dot_product_attention(run[0], run[1], run[2], attn_mask=mask)
            context[start:end] = found.transpose(1, 2).reshape(end - start, size)
            start = end
        attended = F.linear(context, weights[2], weights[3])
        attended = adapt_planned(
            attended, self.parts[layer], own_slots, own_places, chunk_slots, chunk_gather, chunk_real, back
        )
        hidden = F.layer_norm(hidden + attended, [size], weights[4], weights[5], self.eps)
        inner = F.gelu(F.linear(hidden, weights[6], weights[7]))
        return F.layer_norm(
            hidden + F.linear(inner, weights[8], weights[9]), [size], weights[10], weights[11], self.eps
        )


def scripted(module: RunLayers) -> Any:
    """The module in TorchScript, or as it is where torch has that no more."""
    script = getattr(torch.jit, "script", None)
    if script is None:
        return module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return script(module)
