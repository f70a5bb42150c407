"""The benchmark `hplm bench upper`: speed of the upper layers, packed and padded, beside the matrix peak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hplm.adapters.packed import widen
from hplm.adapters.tenant import Pooling, Tenant
from hplm.core.settings import BaseConfig, EncodeSettings
from hplm.engine.encode import EngineRequest, count_read
from hplm.engine.token_domain import random_features
from hplm.models.device import choose_device, choose_dtype, computing_in, in_dtype, use_threads
from hplm.models.layers import UpperLayers
from hplm.reporting.benchmark_result import Report
from hplm.reporting.progress import progress_bars
from hplm_loadtest.benchmarks.served_repository import read_repository
from hplm_loadtest.benchmarks.timing import time_interleaved
from hplm_loadtest.workloads.lengths import NormalLengths

BATCH = 64


def upper_layers(models: Path, rounds: int, num_threads: int, device_name: str) -> Report:
    """Measure the tokens per second of the packed upper layers, of the same texts padded to the longest, and the matrix peak.

    Packed batches are also measured with heads that read only `[CLS]`, and with wide adapters, as taggings have them, for a
    quarter of the texts or for all.
    """
    use_threads(num_threads)
    served = read_repository(models)
    base = served.base
    device = choose_device(device_name)
    dtype = choose_dtype("auto", device)
    tenants = served.load_tenants(BATCH)
    wide = base.config.reduced_size(EncodeSettings.reduction_factor)
    reduced = max(wide, *(tenant.packed.reduced_size for tenant in tenants))
    mean_tenants = [_with_pooling(tenant, "mean") for tenant in tenants]
    # Widened with zeros, which take as long as other numbers.
    wide_tenants = [_widened(tenant, reduced) for tenant in mean_tenants]
    tenants_by_variant = {
        "packed": mean_tenants,
        "packed, [CLS] read": [_with_pooling(tenant, "cls") for tenant in tenants],
        "a quarter wide": [wide_tenants[i] if i % 4 == 0 else tenant for i, tenant in enumerate(mean_tenants)],
        "all wide": wide_tenants,
    }
    engine = served.engine(wide_tenants, device, num_slots=BATCH + 1)
    padded = in_dtype(base.load_upper(), dtype).to(device)
    product, product_flop = peak_product(dtype, device)
    rng = np.random.default_rng(0)
    rows = []
    with progress_bars() as progress:
        for variance in (20.0, 100.0, 400.0):
            lengths = NormalLengths(variance=variance).draw(BATCH, rng)
            features = [random_features(base.config, int(n), rng) for n in lengths]
            requests_by_variant = {
                name: [EngineRequest(members[i % len(members)], each) for i, each in enumerate(features)]
                for name, members in tenants_by_variant.items()
            }
            requests = requests_by_variant["packed"]
            variants: dict[str, Callable[[], object]] = {
                **{name: partial(engine.run, batch) for name, batch in requests_by_variant.items()},
                "padded": partial(run_padded, padded, requests, dtype, device),
                "matrix product": product,
            }
            timed = time_interleaved(variants, rounds, 5, progress, f"variance {variance:g}")
            real = int(lengths.sum())
            work = product_flop_of(base.config, requests)
            peak = product_flop / timed["matrix product"].median_s
            packed, full = timed["packed"].median_s, timed["padded"].median_s
            rows.append(
                {
                    "length_variance": variance,
                    "packed_tokens_per_s": real / packed,
                    "padded_tokens_per_s": real / full,
                    "ratio": full / packed,
                    "cls_over_packed": packed / timed["packed, [CLS] read"].median_s,
                    "quarter_wide_over_packed": packed / timed["a quarter wide"].median_s,
                    "all_wide_over_packed": packed / timed["all wide"].median_s,
                    "padded_over_real_tokens": float(BATCH * lengths.max() / real),
                    "share_of_matrix_peak": work / packed / peak,
                    "peak_gflop_per_s": peak / 1e9,
                    "spread": timed["packed"].spread,
                }
            )
    settings = {"batch": BATCH, "mean_length": 20, "threads": num_threads, "dtype": str(dtype), "device": device.type}
    return Report("upper", {**settings, "tenants": len(tenants), "rounds": rounds}, rows)


def _with_pooling(tenant: Tenant, pooling: Pooling) -> Tenant:
    return replace(tenant, card=replace(tenant.card, pooling=pooling))


def _widened(tenant: Tenant, reduced_size: int) -> Tenant:
    return replace(tenant, packed=widen(tenant.packed, reduced_size), version=f"{tenant.version}-wide")


def peak_product(dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], object], int]:
    """Return a square matrix product large enough to run at the machine's peak, and its multiplications and additions.

    A GPU would finish a product of the processor's size before the next product is launched.
    """
    side = 8192 if device.type == "cuda" else 2048
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))

    def product() -> None:
        F.linear(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return product, 2 * side**3


def product_flop_of(config: BaseConfig, requests: Sequence[EngineRequest]) -> int:
    """Return the multiplications and additions of the shared layers' matrix products, without attention scores.

    After its attention the last layer computes only the tokens that heads read, which may be only `[CLS]`.
    """
    lengths = [len(request.features) for request in requests]
    read = sum(count_read(request.tenant, length) for request, length in zip(requests, lengths, strict=True))
    into_attention = 3 * config.hidden_size**2
    behind_it = config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size
    tokens, layers = sum(lengths), config.upper_layers
    return 2 * (layers * tokens * into_attention + ((layers - 1) * tokens + read) * behind_it)


def run_padded(upper: UpperLayers, requests: list[EngineRequest], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Compute the shared layers of a padded batch of `longest` tokens a text with a mask, without adapters and heads."""
    lengths = [len(request.features) for request in requests]
    longest, first = max(lengths), requests[0].features
    batch = np.zeros((len(requests), longest, first.shape[1]), dtype=first.dtype)
    for row, request in zip(batch, requests, strict=True):
        row[: len(request.features)] = request.features
    mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    bias = mask[:, None, None, :].to(device)
    shape = (len(requests), longest, upper.config.num_heads, -1)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (part.view(shape).transpose(1, 2) for part in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias).transpose(1, 2).flatten(2)

    with torch.inference_mode(), computing_in(dtype, device):
        positions = torch.arange(longest, device=device).expand(len(requests), -1)
        state = upper.embed(torch.from_numpy(batch).to(device), positions)
        for layer in upper.layers:
            state = layer(state, attend)
        return state[:, 0].float().cpu()
