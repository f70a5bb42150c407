"""Planning the adapters of a batch: the products in which tokens go through adapters, for all tenants together (HMI 6.3)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import itemgetter

import numpy as np
import numpy.typing as npt
import torch

from hplm.adapters.slots import IDENTITY
from hplm.engine.kernels.adapt import UNCHANGED, AdapterPlan
from hplm.engine.kernels.onednn import rounded

# Tokens of one tenant in a chunk of the batched product. Longer runs are cut into chunks, shorter ones are filled up.
CHUNK_WIDTHS = (8, 16, 32)
CHUNK_STEP = 2  # the number of chunks is filled up to a multiple of this, see `rounded`
# Tokens from which a tenant's own product is faster than chunks, on a CPU that gathers tokens (`hplm bench adapters`).
OWN_PRODUCT_TOKENS = 64


def gathers(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether adapters are applied faster to tokens gathered by tenant than text by text.

    In float32 on one core of a CPU, gathering weights and tokens costs more than it saves. In bfloat16 and on CUDA each product
    has a high fixed cost. With several threads neither way wins clearly. Call it after torch has its number of threads.
    """
    return device.type != "cpu" or dtype != torch.float32 or torch.get_num_threads() > 1


def plan_adapters(
    slots: Sequence[int],
    lengths: Sequence[int],
    device: torch.device,
    *,
    num_slots: int,
    gathered: bool,
    own_tokens: int | None,
) -> AdapterPlan:
    """Plan the adapters of texts one after another, each with its slot and its length: `gathered`, or text by text.

    See AdapterPlan for both ways. `own_tokens` comes from `own_product_tokens`. `num_slots` is a pool's.
    """
    if len(set(slots)) == 1:
        return UNCHANGED._replace(own_slots=[slots[0]])
    if gathered:
        return _plan_gathered(slots, lengths, device, num_slots, own_tokens)
    neighbours = [list(own) for _, own in itertools.groupby(zip(slots, lengths, strict=True), key=itemgetter(0))]
    return UNCHANGED._replace(
        own_slots=[own[0][0] for own in neighbours],
        own_sizes=[sum(length for _, length in own) for own in neighbours],
    )


def _plan_gathered(
    slots: Sequence[int], lengths: Sequence[int], device: torch.device, num_slots: int, own_tokens: int | None
) -> AdapterPlan:
    starts = np.cumsum([0, *lengths])
    places: dict[int, list[npt.NDArray[np.int64]]] = {}
    for slot, start, end in zip(slots, starts, starts[1:], strict=False):
        places.setdefault(slot, []).append(np.arange(start, end))
    by_slot = {slot: np.concatenate(texts) for slot, texts in places.items()}
    own: dict[int, npt.NDArray[np.int64]] = {}
    if own_tokens is not None:
        own = {
            slot: tokens if slot == IDENTITY else _filled(tokens, rounded(len(tokens)))
            for slot, tokens in by_slot.items()
            if slot == IDENTITY or len(tokens) >= own_tokens
        }
    chunked: dict[int, dict[int, npt.NDArray[np.int64]]] = {}
    for slot, tokens in by_slot.items():
        if slot not in own:
            pool, place = divmod(slot, num_slots)
            chunked.setdefault(pool, {})[place] = tokens
    chunk_slots: list[npt.NDArray[np.int64]] = []
    chunk_gather: list[npt.NDArray[np.int64]] = []
    for tokens_of_pool in chunked.values():
        slots_of_chunks, chunks = _chunks(tokens_of_pool)
        chunk_slots.append(np.array(slots_of_chunks, np.int64))
        chunk_gather.append(np.concatenate(chunks))
    # The first place of each token, because fillers repeat a token that came before.
    _, back = np.unique(np.concatenate([*own.values(), *chunk_gather]), return_index=True)
    # One copy to the device for all parts.
    parts = [*own.values(), *chunk_slots, *chunk_gather, back]
    on_device = list(torch.from_numpy(np.concatenate(parts)).to(device).split([len(part) for part in parts]))
    pools = len(chunked)
    return AdapterPlan(
        list(own),
        [],
        on_device[: len(own)],
        list(chunked),
        on_device[len(own) : len(own) + pools],
        on_device[len(own) + pools : len(own) + 2 * pools],
        on_device[-1],
    )


def own_product_tokens(device: torch.device) -> int | None:
    """Return the least tokens of a tenant that have a product of their own if tokens are gathered; fewer go in chunks.

    On a GPU it is None: all tokens go in chunks, those without an adapter too. 16 tenants with a product each took 2.0 ms a
    layer, 64 tenants in chunks 0.4 ms (`hplm bench adapters`, H100, texts of 20 tokens; more tokens a tenant were not tried).
    """
    return OWN_PRODUCT_TOKENS if device.type == "cpu" else None


def _filled(places: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    """Return `size` places: the given ones, then the last one repeated."""
    return places[np.minimum(np.arange(size), len(places) - 1)]


def _chunks(places: dict[int, npt.NDArray[np.int64]]) -> tuple[list[int], list[npt.NDArray[np.int64]]]:
    """Return `chunk_slots` and the parts of `chunk_gather` of an AdapterPlan. Few widths and counts occur, see `rounded`."""
    longest = max(map(len, places.values()))
    width = next(width for width in CHUNK_WIDTHS if width >= min(longest, CHUNK_WIDTHS[-1]))
    slots: list[int] = []
    gather: list[npt.NDArray[np.int64]] = []
    for slot, tokens in places.items():
        for first in range(0, len(tokens), width):
            slots.append(slot)
            gather.append(_filled(tokens[first : first + width], width))
    fillers = rounded(len(slots), CHUNK_STEP) - len(slots)
    return slots + slots[-1:] * fillers, gather + gather[-1:] * fillers
