"""The benchmark `hplm bench importance`: what a batch costs more if importances of its tokens are computed (Tabi, 4.2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hplm.adapters.packed import PackedAdapter, packed_width, to_bfloat16
from hplm.adapters.tenant import Head, Tenant, TenantCard
from hplm.core.settings import BaseConfig
from hplm.engine.encode import EncodeEngine, EngineRequest
from hplm.engine.importance import KeptAttention
from hplm.models.device import choose_device, choose_dtype, use_threads
from hplm.models.layers import UpperLayers
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import progress_bars
from hplm_loadtest.benchmarks.timing import time_interleaved
from hplm_loadtest.workloads.lengths import NormalLengths

BATCH = 64
REDUCTION_FACTOR = 16
# The largest share of a batch's time that all its importances may take.
GOAL = 0.05
# Hidden size and computed layers.
SHAPES = {"minilm": (384, 6), "bert-base": (768, 12)}
# A re-routed share that a cascade may well have.
REROUTED = 0.3


def importance(rounds: int, num_threads: int, device_name: str) -> Report:
    """Time the importances of all tokens of 64 texts, and of a part of the texts, beside the batch that they belong to.

    Weights are random: the time does not depend on them.
    """
    use_threads(num_threads)
    device = choose_device(device_name)
    dtype = choose_dtype("auto", device)
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    with progress_bars() as progress:
        for shape, (hidden, layers) in SHAPES.items():
            config = BaseConfig("any", 100, hidden, 12, 4 * hidden, 1, layers, 256, 3)
            engine = EncodeEngine(
                config,
                UpperLayers(config),
                num_slots=BATCH + 1,
                reduced_size=hidden // REDUCTION_FACTOR,
                device=device,
                dtype=dtype,
            )
            tenants = [_tenant(number, config, rng) for number in range(16)]
            for variance in (20.0, 100.0, 400.0):
                lengths = NormalLengths(variance=variance).draw(BATCH, rng)
                requests = [
                    EngineRequest(tenants[i % len(tenants)], rng.normal(size=(n, hidden)).astype(np.float16))
                    for i, n in enumerate(lengths)
                ]
                keeping = [EngineRequest(one.tenant, one.features, keeps_attention=True) for one in requests]
                (part,) = engine.run_each(keeping)
                assert part.attention is not None
                some = rng.choice(BATCH, round(REROUTED * BATCH), replace=False).tolist()
                variants: dict[str, Callable[[], object]] = {
                    "batch": partial(engine.run, requests),
                    "keeping": partial(engine.run, keeping),
                    "all": partial(_importances, part.attention, list(range(BATCH))),
                    "some": partial(_importances, part.attention, some),
                }
                timed = time_interleaved(variants, rounds, 5, progress, f"{shape}, variance {variance:g}")
                batch_s = timed["batch"].median_s
                rows.append(
                    {
                        "shape": shape,
                        "length_variance": variance,
                        "batch_ms": 1000 * batch_s,
                        "keeping_over_batch": timed["keeping"].median_s / batch_s,
                        "all_ms": 1000 * timed["all"].median_s,
                        "share_of_all": timed["all"].median_s / batch_s,
                        "share_of_rerouted": timed["some"].median_s / batch_s,
                        "spread": timed["all"].spread,
                    }
                )
                del part
            engine.close()
    settings = {"batch": BATCH, "mean_length": 20, "threads": num_threads, "dtype": str(dtype), "device": device.type}
    goals = [
        Goal(
            f"importance-{shape}",
            f"{shape}: importances of all texts over their batch's time, the largest",
            GOAL,
            max(row["share_of_all"] for row in rows if row["shape"] == shape),
            "x",
            "lower",
        )
        for shape in SHAPES
    ]
    return Report("importance", {**settings, "rerouted": REROUTED, "rounds": rounds}, rows, goals)


def _importances(attention: KeptAttention, texts: list[int]) -> None:
    # The importances come to the host, so a GPU has finished them.
    attention.importances(texts)


def _tenant(number: int, config: BaseConfig, rng: np.random.Generator) -> Tenant:
    hidden, reduced = config.hidden_size, config.hidden_size // REDUCTION_FACTOR
    weights = rng.normal(0, 0.05, (config.adapted_layers, packed_width(hidden, reduced))).astype(np.float32)
    card = TenantCard(f"tenant-{number}", "classification", ("a", "b"), base="")
    head = Head(np.zeros((2, hidden), np.float32), np.zeros(2, np.float32))
    return Tenant(card, PackedAdapter(to_bfloat16(weights), hidden, reduced), head, version=str(number))
