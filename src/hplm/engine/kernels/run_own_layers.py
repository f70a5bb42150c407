"""Layers that each student has of its own, as they are served. The slow twin is `hplm.engine.reference.own_layers`."""

# No `from __future__ import annotations`, see `hplm.engine.kernels.scripted`.

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hplm.engine.kernels.attention import attend_at_once, attend_by_length, attends_at_once, ends_of
from hplm.engine.kernels.attention import float32_attention_below as below


class OwnPlan(NamedTuple):
    """How a batch's tokens use the slots. Tokens of a slot stand one after another, in the order of slots, with fillers: `[N]`.

    `slots` `[N]` has the slot of each token, and `ends` int32 `[S]` the end of each slot's tokens. `read` has the places of the
    tokens that heads read, with fillers too, and with their `read_slots` and `read_ends`. `answers` `[R]` are the places in
    `read` without the fillers.
    `counts` and `lengths` are rows for attention, see `hplm.engine.layouts.Attention`. `rows` has the places of the rows'
    tokens, and `back` `[N]` the place of each token in the rows. Both are None if the tokens stand as the rows do.
    """

    slots: Tensor
    ends: Tensor
    read: Tensor
    read_slots: Tensor
    read_ends: Tensor
    answers: Tensor
    counts: list[int]
    lengths: list[int]
    rows: Tensor | None
    back: Tensor | None


class RunOwnLayers(nn.Module):
    """Layers with weights for each slot: `parts[i]` are those of layer i, tensors `[S, ...]` in the order of `layer_weights`.

    The owner of `parts` fills them in place. A product of all slots is one grouped product, so the number of calls grows with
    neither students nor tenants. `relative` as in RunLayers.
    """

    relative: Tensor | None

    def __init__(self, parts: list[list[Tensor]], eps: float, num_heads: int, relative: Tensor | None) -> None:
        super().__init__()
        self.parts = parts
        self.eps = eps
        self.num_heads = num_heads
        self.relative = relative
        norm = parts[0][4]
        head_size = norm.size(1) // num_heads
        self.float32_below = below(norm.device, head_size)
        self.attends_at_once = relative is None and attends_at_once(norm.device, norm.dtype, head_size)
        self.last = len(parts) - 1
        kept: list[Tensor] = []
        self.kept = kept

    def forward(self, hidden: Tensor, plan: OwnPlan, keeps_qkv: bool) -> tuple[Tensor, list[Tensor]]:
        """Compute all layers: `[N, H]` with fillers -> `[R, H]`, the tokens that heads read.

        Also return each layer's queries, keys and values `[N, 3 * H]` if `keeps_qkv`, in the order of `hidden`.
        """
        kept: list[Tensor] = []
        ends = torch.empty(0)
        if self.attends_at_once:
            ends = ends_of(plan.counts, plan.lengths, hidden.device)
        rows, back = plan.rows, plan.back
        slots, groups = plan.slots, plan.ends
        for layer in range(len(self.parts)):
            weights = self.parts[layer]
            qkv = self._linear(hidden, weights[0], weights[1], slots, groups)
            if keeps_qkv:
                kept.append(qkv)
            if rows is not None:
                qkv = qkv.index_select(0, rows)
            if self.attends_at_once:
                context = attend_at_once(qkv, ends, max(plan.lengths), self.num_heads)
            else:
                context = attend_by_length(
                    qkv, plan.counts, plan.lengths, self.num_heads, self.float32_below, None, self.relative
                )
            if back is not None:
                context = context.index_select(0, back)
            if layer == self.last:
                context = context.index_select(0, plan.read)
                hidden = hidden.index_select(0, plan.read)
                slots, groups = plan.read_slots, plan.read_ends
            attended = self._linear(context, weights[2], weights[3], slots, groups)
            hidden = self._norm(hidden + attended, weights[4], weights[5], slots)
            inner = F.gelu(self._linear(hidden, weights[6], weights[7], slots, groups))
            outer = self._linear(inner, weights[8], weights[9], slots, groups)
            hidden = self._norm(hidden + outer, weights[10], weights[11], slots)
        return hidden.index_select(0, plan.answers), kept

    def _linear(self, tokens: Tensor, weight: Tensor, bias: Tensor, slots: Tensor, ends: Tensor) -> Tensor:
        """Compute a product of each token with its slot's matrix: `[N, in]`, `[S, out, in]` -> `[N, out]`."""
        products = torch.ops.aten._grouped_mm(tokens, weight.transpose(1, 2), ends)
        return products.add_(bias.index_select(0, slots))

    def _norm(self, tokens: Tensor, weight: Tensor, bias: Tensor, slots: Tensor) -> Tensor:
        normed = F.layer_norm(tokens, [tokens.size(1)], None, None, self.eps)
        return torch.addcmul(bias.index_select(0, slots), normed, weight.index_select(0, slots))
