"""Filling adapter slots: from host memory to a layer's slots (HMI 6.2)."""

# No `from __future__ import annotations`, see `hplm.engine.kernels.scripted`.

import torch
from torch import Tensor


def fill_slots(parts: list[Tensor], layer: int, weights: list[Tensor], slots: list[int]) -> None:
    """Copy one layer of adapters: `weights[i]` `[A, P]`, as PackedAdapter has them, to slot `slots[i]` of a pool's `parts`."""
    for i in range(len(weights)):
        row = weights[i][layer]
        start = 0
        for part in parts:
            place = part[layer, slots[i]]
            end = start + place.numel()
            place.copy_(row[start:end].view_as(place))
            start = end


def place_for(weights: list[Tensor], device: torch.device) -> Tensor:
    """Make the tensor `staged` of `fill_slots_from_pinned`, in the finest format among the weights."""
    dtype = weights[0].dtype
    for adapter in weights:
        dtype = torch.promote_types(dtype, adapter.dtype)
    return torch.empty((len(weights), *weights[0].shape), dtype=dtype, device=device)


def pieces(layers: int) -> list[tuple[int, int]]:
    """Return the ranges of layers that go to a GPU's slots together: the first, so that computing can begin, then the rest."""
    return [(first, last) for first, last in ((0, 1), (1, layers)) if first < last]


def fill_slots_from_pinned(
    parts: list[Tensor], first: int, last: int, weights: list[Tensor], places: Tensor, staged: Tensor
) -> None:
    """Copy layers `first` to before `last` to the slots `places` of a GPU, through `staged` `[n, A, P]`, made by `place_for`.

    One copy for each tenant, because a copy's fixed cost outweighs its bytes. The copies read `weights` after this returns.
    """
    for i in range(len(weights)):
        staged[i, first:last].copy_(weights[i][first:last], non_blocking=True)
    start = 0
    for part in parts:
        slots = part[first:last]
        end = start + part[0, 0].numel()
        rows = staged[:, first:last, start:end].to(part.dtype).transpose(0, 1)
        slots.index_copy_(1, places, rows.unflatten(2, part[0, 0].size()))
        start = end
