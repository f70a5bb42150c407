"""Adapters over a batch's tokens, as an adapter plan says (HMI 6.3). The slow twin is `AdapterSlots.reference_adapt`."""

# No `from __future__ import annotations`, see `hplm.engine.kernels.scripted`.

from typing import NamedTuple

import torch
from torch import Tensor

# Least tokens of a product: MKL rounds a token otherwise in a product of fewer.
LEAST_TOKENS = 4


class AdapterPlan(NamedTuple):
    """How the adapters of a batch are applied, in one of two ways, chosen by measurement (`hplm bench adapters`).

    Text by text: `own_sizes` has the number of tokens of each of `own_slots`, one after another. Each slot has a product over
    its tokens in place, with its weights in place. Fewer than LEAST_TOKENS tokens are computed beside their neighbours.

    Gathered, if `own_sizes` is empty: few products a layer serve all tenants, which is faster if a product has a high fixed
    cost. Tokens are gathered by slot. A slot with many tokens, in `own_slots`, has a product over its `own_places`; if there
    are no `own_places`, over all tokens. Tokens of other slots are cut into chunks of one length. Each pool in `chunk_pools`
    has one batched product (HMI's baddbmm): chunk g of pool i has slot `chunk_slots[i][g]` and the tokens `chunk_gather[i]`.
    Fillers repeat a token. The outputs stand one after another, and `back` has the place of each token of the batch in them.
    `back` is None if all tokens have one slot.
    """

    own_slots: list[int]
    own_sizes: list[int]
    own_places: list[Tensor]
    chunk_pools: list[int]
    chunk_slots: list[Tensor]
    chunk_gather: list[Tensor]
    back: Tensor | None


# The plan that changes no token.
UNCHANGED = AdapterPlan([0], [], [], [], [], [], None)


def adapt_planned(tokens: Tensor, parts: list[Tensor], plan: AdapterPlan) -> Tensor:
    """Apply each text's adapter (HMI eq. 1) to its `tokens` `[N, H]`. `parts` are one layer's, four for each pool.

    It may return `tokens` itself.
    """
    if len(plan.own_sizes) > 0:
        return _adapt_by_text(tokens, parts, plan.own_slots, plan.own_sizes)
    adapted: list[Tensor] = []
    for i in range(len(plan.own_slots)):
        own = tokens.index_select(0, plan.own_places[i]) if len(plan.own_places) > 0 else tokens
        slot = plan.own_slots[i]
        if slot != 0:
            change = torch.empty_like(own)
            _change(own, parts, slot, change)
            own = change.add_(own)
        adapted.append(own)
    for i in range(len(plan.chunk_pools)):
        of_pool = 4 * plan.chunk_pools[i]
        down, down_bias, up, up_bias = parts[of_pool], parts[of_pool + 1], parts[of_pool + 2], parts[of_pool + 3]
        slots = plan.chunk_slots[i]
        chunks = tokens.index_select(0, plan.chunk_gather[i]).view(slots.size(0), -1, tokens.size(1))
        reduced = torch.baddbmm(
            down_bias.index_select(0, slots).unsqueeze(1), chunks, down.index_select(0, slots)
        ).relu_()
        changes = torch.baddbmm(up_bias.index_select(0, slots).unsqueeze(1), reduced, up.index_select(0, slots))
        adapted.append(changes.add_(chunks).flatten(0, 1))
    outputs = adapted[0] if len(adapted) == 1 else torch.cat(adapted)
    back = plan.back
    return outputs if back is None else outputs.index_select(0, back)


def _adapt_by_text(
    tokens: Tensor, parts: list[Tensor], slots: list[int], sizes: list[int], least: int = LEAST_TOKENS
) -> Tensor:
    change = torch.empty_like(tokens)
    start = 0
    for i in range(len(sizes)):
        end = start + sizes[i]
        if slots[i] == 0:
            change[start:end] = 0
        elif sizes[i] < least:
            # Computed beside its neighbours, whose results are not used.
            first = max(0, min(start, tokens.size(0) - least))
            some = tokens[first : first + least]
            some_change = torch.empty_like(some)
            _change(some, parts, slots[i], some_change)
            change[start:end] = some_change[start - first : end - first]
        else:
            _change(tokens[start:end], parts, slots[i], change[start:end])
        start = end
    # Fillers stay unchanged.
    change[start:] = 0
    return change.add_(tokens)


def _change(tokens: Tensor, parts: list[Tensor], slot: int, change: Tensor) -> None:
    """Write to `change` the vectors that the adapter in `slot` adds to `tokens` `[n, H]`.

    It uses the product of chunks, `baddbmm`. TorchScript splits `addmm` into a product and a sum that are rounded separately.
    A text's answer would then depend on the number of its tenant's texts in the batch.
    """
    pool = slot // parts[0].size(0)
    place = slot % parts[0].size(0)
    down, down_bias, up, up_bias = (
        parts[4 * pool][place],
        parts[4 * pool + 1][place],
        parts[4 * pool + 2][place],
        parts[4 * pool + 3][place],
    )
    reduced = torch.baddbmm(down_bias.view(1, 1, -1), tokens.unsqueeze(0), down.unsqueeze(0)).relu_()
    torch.baddbmm(up_bias.view(1, 1, -1), reduced, up.unsqueeze(0), out=change.unsqueeze(0))


def with_fillers(plan: AdapterPlan, fillers: int) -> AdapterPlan:
    """Return the plan for a batch with `fillers` more tokens at its end, which get the first output."""
    back = plan.back
    if fillers == 0 or back is None:
        return plan
    back = torch.cat([back, torch.zeros(fillers, dtype=torch.int64)])
    return AdapterPlan(
        plan.own_slots, plan.own_sizes, plan.own_places, plan.chunk_pools, plan.chunk_slots, plan.chunk_gather, back
    )
