"""The benchmark `hplm bench adapters`: ways to apply many tenants' adapters to one packed batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hplm.adapters.packed import PackedAdapter, Place, packed_width, to_bfloat16
from hplm.adapters.tenant import Head, Tenant, TenantCard
from hplm.core.settings import BaseConfig
from hplm.engine.adapter_plan import gathers, own_product_tokens, plan_adapters
from hplm.engine.adapter_slots import AdapterSlots, AssignedSlots
from hplm.engine.kernels.adapt import adapt_planned
from hplm.engine.kernels.scripted import scripted
from hplm.models.device import choose_device, choose_dtype, use_threads
from hplm.models.layers import Adapt
from hplm.reporting.benchmark_result import Report
from hplm.reporting.progress import progress_bars
from hplm_loadtest.benchmarks.timing import time_interleaved
from hplm_loadtest.workloads.lengths import NormalLengths

BATCH = 64
REDUCTION_FACTOR = 16
SIZES = {"minilm": 384, "bert-base": 768}


def adapters(rounds: int, num_threads: int, device_name: str) -> Report:
    """Time one layer's adapters for 64 texts of 1, 4, 16 and 64 tenants: the engine's two ways, a loop, and `grouped_mm`."""
    use_threads(num_threads)
    device = choose_device(device_name)
    dtype = choose_dtype("auto", device)
    rng = np.random.default_rng(0)
    rows = []
    with progress_bars() as progress:
        for shape, hidden in SIZES.items():
            lengths = sorted(NormalLengths().draw(BATCH, rng).tolist())
            attended = torch.randn(sum(lengths), hidden, device=device).to(dtype)
            config = BaseConfig("any", 100, hidden, 12, 4 * hidden, 1, 1, 256, 3)
            slots = AdapterSlots(config, BATCH + 1, hidden // REDUCTION_FACTOR, device, dtype)
            for count in (1, 4, 16, 64):
                tenants = [_tenant(i % count, hidden, rng) for i in range(BATCH)]
                with slots.assigned(tenants) as assigned:
                    ways: dict[str, Adapt] = {
                        "batched": planned(slots, assigned, lengths, gathered=True),
                        "text by text": planned(slots, assigned, lengths, gathered=False),
                        "loop": slots.reference_adapt(assigned, lengths),
                    }
                    if dtype == torch.bfloat16:
                        ways["grouped_mm"] = grouped(slots, assigned, lengths)
                    variants: dict[str, Callable[[], object]] = {
                        name: partial(_run, way, attended) for name, way in ways.items()
                    }
                    timed = time_interleaved(variants, rounds, 5, progress, f"{shape}, {count} tenants")
                rows += [
                    {
                        "shape": shape,
                        "tenants": count,
                        "way": name,
                        "ms_per_layer": 1000 * timing.median_s,
                        "over_batched": timing.median_s / timed["batched"].median_s,
                        "spread": timing.spread,
                    }
                    for name, timing in timed.items()
                ]
            slots.close()
    settings = {"batch": BATCH, "mean_length": 20, "threads": num_threads, "dtype": str(dtype), "device": device.type}
    served = "batched" if gathers(device, dtype) else "text by text"
    return Report("adapters", {**settings, "served": served, "rounds": rounds}, rows)


def planned(slots: AdapterSlots, assigned: AssignedSlots, lengths: Sequence[int], *, gathered: bool) -> Adapt:
    """Return the engine's way to apply adapters, see `AdapterPlan`."""
    device = slots.parts[0].device
    own_tokens = own_product_tokens(device)
    plan = plan_adapters(
        assigned.slots, lengths, device, num_slots=slots.num_slots, gathered=gathered, own_tokens=own_tokens
    )
    run = scripted(adapt_planned)

    def adapt(place: Place, layer: int, tokens: Tensor) -> Tensor:
        assigned.wait(layer)
        adapted: Tensor = run(tokens, [part[layer] for part in slots.parts], plan)
        return adapted

    return adapt


def grouped(slots: AdapterSlots, assigned: AssignedSlots, lengths: Sequence[int]) -> Adapt:
    """Return a way that calls `grouped_mm` once per product, with one group per text."""
    device = slots.parts[0].device
    chosen = torch.tensor(assigned.slots, device=device)
    ends = torch.tensor(lengths, device=device).cumsum(0).to(torch.int32)
    text = torch.arange(len(lengths), device=device).repeat_interleave(torch.tensor(lengths, device=device))

    def adapt(place: Place, layer: int, tokens: Tensor) -> Tensor:
        assigned.wait(layer)
        down, down_bias, up, up_bias = (part[layer].index_select(0, chosen) for part in slots.parts)
        reduced = F.grouped_mm(tokens, down, offs=ends).add_(down_bias[text]).relu_()
        return F.grouped_mm(reduced, up, offs=ends).add_(up_bias[text]).add_(tokens)

    return adapt


def _run(way: Adapt, attended: Tensor) -> None:
    with torch.inference_mode():
        way("attention", 0, attended)
    if attended.is_cuda:
        torch.cuda.synchronize()


def _tenant(number: int, hidden: int, rng: np.random.Generator) -> Tenant:
    reduced = hidden // REDUCTION_FACTOR
    weights = rng.normal(0, 0.05, (1, packed_width(hidden, reduced))).astype(np.float32)
    card = TenantCard(f"tenant-{number}", "classification", ("a", "b"), base="")
    head = Head(np.zeros((2, hidden), np.float32), np.zeros(2, np.float32))
    return Tenant(card, PackedAdapter(to_bfloat16(weights), hidden, reduced), head)
