"""Measures the speed-up of cutting batch rows into slots, in-process (TCB 4.2, Figs. 13 and 14)."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
from rich.progress import Progress

from hplm.engine.encode import EngineRequest
from hplm.models.device import choose_device, use_threads
from hplm_loadtest.benchmarks.served_repository import ServedRepository
from hplm_loadtest.benchmarks.timing import time_interleaved

ROWS = (10, 32)
ROW_TOKENS = 100
TEXT_TOKENS = 10  # each of ten slots in a row holds one text
SLOTS = (1, 2, 5, 10)
TENANTS = 8
THREADS = 1


def slot_speeds(served: ServedRepository, rounds: int, progress: Progress) -> list[dict[str, Any]]:
    """Time a batch of full rows of `ROW_TOKENS` tokens, cut into several numbers of slots, against rows of one slot.

    Rows of one slot are the mode `concat`. `THREADS` threads compute, as on a server with two cores.
    """
    use_threads(THREADS)
    tenants = served.load_tenants(TENANTS)
    rng = np.random.default_rng(0)
    rows = []
    with closing(served.engine(tenants, choose_device("auto"), batching="slotted")) as engine:
        for count in ROWS:
            texts = count * ROW_TOKENS // TEXT_TOKENS
            hidden = rng.normal(size=(texts, TEXT_TOKENS, served.base.config.hidden_size)).astype(np.float16)
            requests = [EngineRequest(tenants[i % len(tenants)], states) for i, states in enumerate(hidden)]
            variants = {str(slots): partial(engine.run, requests, ROW_TOKENS // slots) for slots in SLOTS}
            timed = time_interleaved(variants, rounds, 1, progress, f"slots, {count} rows")
            rows += [
                {
                    "mode": "slotted, in-process",
                    "rows": count,
                    "slots": slots,
                    "batch_ms": 1000 * timed[str(slots)].median_s,
                    "speed_up": timed["1"].median_s / timed[str(slots)].median_s,
                    "spread": timed[str(slots)].spread,
                }
                for slots in SLOTS
            ]
    return rows
