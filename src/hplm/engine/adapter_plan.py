"""Which tokens of a batch go through which adapter, and in which products: one computation for all tenants (HMI 6.3)."""

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

# Tokens of one tenant that go through one product of the batched form: more are cut, fewer filled up.
CHUNK_WIDTHS = (8, 16, 32)
CHUNK_STEP = 2
# Where a CPU gathers tokens, from this many of a tenant on a product of its own is faster than chunks (`hplm bench adapters`).
OWN_PRODUCT_TOKENS = 64


def gathers(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether adapters are applied faster to tokens brought together by tenant than text by text.

    In float32 on a core of a CPU bringing weights and tokens together costs more than it saves; oneDNN in bfloat16 and CUDA ask
    much for each product, and with several threads neither way wins clearly. To be asked once torch has its number of threads.
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
    """For texts one after another, each with its slot and its length, `gathered` or else text by text, see AdapterPlan.

    `own_tokens` by `own_product_tokens`; `num_slots` of a pool.
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
    together = {slot: np.concatenate(found) for slot, found in places.items()}
    own: dict[int, npt.NDArray[np.int64]] = {}
    if own_tokens is not None:
        own = {
            slot: found if slot == IDENTITY else _filled(found, rounded(len(found)))
            for slot, found in together.items()
            if slot == IDENTITY or len(found) >= own_tokens
        }
    chunked: dict[int, dict[int, npt.NDArray[np.int64]]] = {}
    for slot, found in together.items():
        if slot not in own:
            pool, place = divmod(slot, num_slots)
            chunked.setdefault(pool, {})[place] = found
    chunk_slots: list[npt.NDArray[np.int64]] = []
    chunk_gather: list[npt.NDArray[np.int64]] = []
    for found_of_pool in chunked.values():
        in_slots, chunks = _chunks(found_of_pool)
        chunk_slots.append(np.array(in_slots, np.int64))
        chunk_gather.append(np.concatenate(chunks))
    # The first place of each: fillers repeat a token that came before.
    _, back = np.unique(np.concatenate([*own.values(), *chunk_gather]), return_index=True)
    # In one copy to the device.
    parts = [*own.values(), *chunk_slots, *chunk_gather, back]
    there = list(torch.from_numpy(np.concatenate(parts)).to(device).split([len(part) for part in parts]))
    pools = len(chunked)
    return AdapterPlan(
        list(own),
        [],
        there[: len(own)],
        list(chunked),
        there[len(own) : len(own) + pools],
        there[len(own) + pools : len(own) + 2 * pools],
        there[-1],
    )


def own_product_tokens(device: torch.device) -> int | None:
    """From how many tokens on a tenant's, gathered, have a product of their own; fewer go in chunks with others'.

    None on a GPU, where all go in chunks, those without an adapter too: 16 tenants with a product each took 2.0 ms a layer, 64
    in chunks 0.4 (`hplm bench adapters`, H100, texts of 20 tokens; fewer tenants with more tokens were not tried).
    """
    return OWN_PRODUCT_TOKENS if device.type == "cpu" else None


def _filled(places: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    """`size` places, the last one repeated."""
    return places[np.minimum(np.arange(size), len(places) - 1)]


def _chunks(places: dict[int, npt.NDArray[np.int64]]) -> tuple[list[int], list[npt.NDArray[np.int64]]]:
    """`chunk_slots` and the parts of `chunk_gather` of an AdapterPlan: few lengths and numbers of chunks, see `rounded`."""
    longest = max(map(len, places.values()))
    width = next(width for width in CHUNK_WIDTHS if width >= min(longest, CHUNK_WIDTHS[-1]))
    slots: list[int] = []
    gather: list[npt.NDArray[np.int64]] = []
    for slot, own in places.items():
        for first in range(0, len(own), width):
            slots.append(slot)
            gather.append(_filled(own[first : first + width], width))
    more = rounded(len(slots), CHUNK_STEP) - len(slots)
    return slots + slots[-1:] * more, gather + gather[-1:] * more
