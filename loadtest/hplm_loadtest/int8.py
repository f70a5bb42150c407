"""`hplm bench int8`: products of the upper layers in int8 beside the engine's own format."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

from hplm.nn.dtype import choose_dtype, choose_threads
from hplm.nn.int8 import check_int8, in_int8
from hplm.nn.int8_ranges import measure_ranges
from hplm.nn.memory import keep_freed_memory
from hplm.nn.upper import UpperEngine
from hplm.progress import progress_bars
from hplm.report import Report
from hplm_loadtest.models import read
from hplm_loadtest.open_loop import closed_loop
from hplm_loadtest.pictures import bars, check_picture
from hplm_loadtest.saturated import BATCH, saturated
from hplm_loadtest.timing import interleaved
from hplm_loadtest.variants import serving

CPU = torch.device("cpu")


def int8(models: Path, rounds: int, seconds: float, picture: Path | None = None) -> Report:
    """Requests/s of the engine in-process and through Triton, in turn, and how far the logits move."""
    check_picture(picture)
    check_int8(CPU)
    keep_freed_memory()
    threads = choose_threads(0)
    torch.set_num_threads(threads)
    served = read(models)
    base = served.base
    dtype = choose_dtype("auto", CPU)
    load = saturated(models, served)
    engines = {
        name: UpperEngine(
            base.config,
            base.load_upper(),
            num_slots=BATCH + 1,
            reduced_size=load.reduced_size,
            device=CPU,
            dtype=dtype,
            int8=ranges,
        )
        for name, ranges in (("none", ()), ("int8", measure_ranges(base, base.load_upper())))
    }
    plain, quantised = (
        np.concatenate([one.ravel() for one in engine.run(load.requests)]) for engine in engines.values()
    )
    variants: dict[str, Callable[[], object]] = {
        name: partial(engine.run, load.requests) for name, engine in engines.items()
    }
    inside: dict[str, list[float]] = {name: [] for name in engines}
    served_rates: dict[str, list[float]] = {name: [] for name in engines}
    with ExitStack() as stack:
        for engine in engines.values():
            stack.callback(engine.close)
        progress = stack.enter_context(progress_bars())
        servers = {}
        for name in engines:
            upper = {"num_slots": BATCH + 1, "quantization": name, "device": "cpu"}
            log = f"triton-bench-{name}.log"
            servers[name] = stack.enter_context(serving(models, plot={}, upper=upper, log=log))
            closed_loop(servers[name].ports.grpc_url, load.sent(2), 2 * BATCH)
        bar = progress.add_task("int8", total=rounds)
        for turn in range(rounds):
            timed = interleaved(variants, 3, 2, progress, "in-process")
            for name in list(engines)[:: 1 if turn % 2 else -1]:
                inside[name].append(BATCH / timed[name].median_s)
                times = 2 * max(2, int(inside[name][-1] * seconds / (2 * BATCH)))
                run = closed_loop(servers[name].ports.grpc_url, load.sent(times), 2 * BATCH)
                served_rates[name].append(run.kinds["answered"] / run.span_s)
            progress.update(bar, advance=1)
    rows = []
    for where, rates in (("engine in-process", inside), ("through Triton, gRPC", served_rates)):
        ratios = [one / other for one, other in zip(rates["int8"], rates["none"], strict=True)]
        rows.append(
            {
                "where": where,
                "requests_per_s": median(rates["none"]),
                "int8_requests_per_s": median(rates["int8"]),
                "ratio": median(ratios),
                "spread": f"{min(ratios):.2f}-{max(ratios):.2f}",
            }
        )
    if picture is not None:
        bars(
            picture,
            ["engine in-process", "through Triton, gRPC"],
            {name: [median(rates[name]) for rates in (inside, served_rates)] for name in engines},
            title=f"{base.config.name} in {str(dtype).removeprefix('torch.')}, {in_int8(dtype)} in int8",
            x_label="",
            y_label="requests/s",
        )
    moved = float(np.square(quantised - plain).mean() / plain.var())
    about = {
        "base": base.config.name,
        "dtype": str(dtype),
        "in_int8": in_int8(dtype),
        "threads": threads,
        "batch": BATCH,
        "rounds": rounds,
    }
    mean_tokens = round(load.tokens / BATCH, 1)
    return Report("int8", {**about, "mean_tokens": mean_tokens, "logits_moved_of_variance": moved}, rows)
