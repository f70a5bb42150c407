"""Adapters over a batch's tokens, as a plan says (HMI 6.3). The slow twin is `AdapterSlots.reference_adapt`."""

# No `from __future__ import annotations`, see `hplm.engine.kernels.scripted`.

from typing import NamedTuple

import torch
from torch import Tensor

# In a product of fewer MKL rounds a token otherwise than beside more.
LEAST_TOKENS = 4


class AdapterPlan(NamedTuple):
    """How the adapters of a batch are applied, in one of two ways, chosen by measurement (`hplm bench adapters`).

    Text by text, where `own_sizes` says how many tokens each of `own_slots` has, one after another: a product each over the
    tokens where they lie, fewer than LEAST_TOKENS beside their neighbours, with the slot's weights where they lie.

    Gathered, with no `own_sizes`, for where a product costs much besides its tokens: all tenants in few products a layer.
    Tokens are brought together by slot. Slots with many tokens, `own_slots`, have a product each over `own_places` (all
    tokens where there are none). The others are cut into chunks of one length that go through a batched product with
    their slots' weights (HMI's baddbmm), one for each pool of slots that has some, `chunk_pools[i]`: its chunk g is of
    the pool's slot `chunk_slots[i][g]` and takes the tokens `chunk_gather[i]`. Fillers repeat a token. `back` is where each
    token of the batch is in what comes out of all of these one after another; None where all tokens have one slot.
    """

    own_slots: list[int]
    own_sizes: list[int]
    own_places: list[Tensor]
    chunk_pools: list[int]
    chunk_slots: list[Tensor]
    chunk_gather: list[Tensor]
    back: Tensor | None


# Every token keeps what it has.
UNCHANGED = AdapterPlan([0], [], [], [], [], [], None)


def adapt_planned(given: Tensor, parts: list[Tensor], plan: AdapterPlan) -> Tensor:
    """Each text's adapter (HMI eq. 1) over its tokens, `given` `[N, H]`; `parts` of one layer, four a pool.

    May return `given` itself.
    """
    if len(plan.own_sizes) > 0:
        return _adapt_by_text(given, parts, plan.own_slots, plan.own_sizes)
    adapted: list[Tensor] = []
    for i in range(len(plan.own_slots)):
        tokens = given.index_select(0, plan.own_places[i]) if len(plan.own_places) > 0 else given
        slot = plan.own_slots[i]
        if slot != 0:
            change = torch.empty_like(tokens)
            _change(tokens, parts, slot, change)
            tokens = change.add_(tokens)
        adapted.append(tokens)
    for i in range(len(plan.chunk_pools)):
        of_pool = 4 * plan.chunk_pools[i]
        down, down_bias, up, up_bias = parts[of_pool], parts[of_pool + 1], parts[of_pool + 2], parts[of_pool + 3]
        slots = plan.chunk_slots[i]
        padded = given.index_select(0, plan.chunk_gather[i]).view(slots.size(0), -1, given.size(1))
        reduced = torch.baddbmm(
            down_bias.index_select(0, slots).unsqueeze(1), padded, down.index_select(0, slots)
        ).relu_()
        tokens = torch.baddbmm(up_bias.index_select(0, slots).unsqueeze(1), reduced, up.index_select(0, slots))
        adapted.append(tokens.add_(padded).flatten(0, 1))
    together = adapted[0] if len(adapted) == 1 else torch.cat(adapted)
    back = plan.back
    return together if back is None else together.index_select(0, back)


def _adapt_by_text(
    given: Tensor, parts: list[Tensor], slots: list[int], sizes: list[int], least: int = LEAST_TOKENS
) -> Tensor:
    change = torch.empty_like(given)
    start = 0
    for i in range(len(sizes)):
        end = start + sizes[i]
        if slots[i] == 0:
            change[start:end] = 0
        elif sizes[i] < least:
            # Beside its neighbours, of which nothing is taken.
            first = max(0, min(start, given.size(0) - least))
            some = given[first : first + least]
            found = torch.empty_like(some)
            _change(some, parts, slots[i], found)
            change[start:end] = found[start - first : end - first]
        else:
            _change(given[start:end], parts, slots[i], change[start:end])
        start = end
    # Fillers, which nobody reads.
    change[start:] = 0
    return change.add_(given)


def _change(tokens: Tensor, parts: list[Tensor], slot: int, change: Tensor) -> None:
    """What the adapter in `slot` adds to `tokens` `[n, H]`, into `change`.

    As chunks have it: TorchScript takes `addmm` apart, into a product and a sum that are rounded one after the other, and a
    text's answer would depend on how many of its tenant's are in the batch.
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


def with_fillers(plan: AdapterPlan, more: int) -> AdapterPlan:
    """For a batch with `more` tokens behind its own, which get what comes first of all."""
    back = plan.back
    if more == 0 or back is None:
        return plan
    back = torch.cat([back, torch.zeros(more, dtype=torch.int64)])
    return AdapterPlan(
        plan.own_slots, plan.own_sizes, plan.own_places, plan.chunk_pools, plan.chunk_slots, plan.chunk_gather, back
    )
