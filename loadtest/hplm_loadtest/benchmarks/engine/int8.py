"""The benchmark `hplm bench int8`: both stages with the layers' matrices in int8, beside the engine's own format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from textwrap import fill

import numpy as np
import numpy.typing as npt

from hplm.engine import lower_layers as lowers
from hplm.engine.encode import EncodeEngine
from hplm.engine.kernels.int8 import check_int8
from hplm.engine.kernels.int8_ranges import measure_ranges
from hplm.engine.lower_layers import load_lower
from hplm.engine.open_domain import compute_ngrams
from hplm.models.base import Base
from hplm.models.device import CPU, choose_dtype, choose_threads, use_threads
from hplm.plot.ngrams import middle, text_ngrams
from hplm.reporting.benchmark_result import Report
from hplm.reporting.charts import bar_chart, check_picture
from hplm.reporting.progress import progress_bars
from hplm_loadtest.benchmarks.benchmark_server import StageSettings, benchmark_server
from hplm_loadtest.benchmarks.saturating_batch import BATCH, IN_FLIGHT, batches_for, saturating_batch
from hplm_loadtest.benchmarks.served_repository import read_repository
from hplm_loadtest.benchmarks.timing import time_interleaved
from hplm_loadtest.scenarios.grpc_load import closed_loop
from hplm_loadtest.scenarios.outcomes import Run
from hplm_loadtest.scenarios.result_rows import unanswered_goal
from hplm_loadtest.scenarios.steady_rate import steady_rate
from hplm_loadtest.workloads.load_plan import Requests
from hplm_loadtest.workloads.texts import texts_of_kind

UPPER = "upper layers, in-process"
LOWER = "lower layers for new text, in-process"
KNOWN = "known text through Triton, gRPC"
NEW = "new text through Triton, gRPC"


def int8(models: Path, rounds: int, seconds: float, picture: Path | None, *, look_up_threads: int = 0) -> Report:
    """Measure requests per second in-process and through Triton, and how far int8 moves logits and windows.

    New text has words in random order, so hardly any of its n-grams is in a table. In-process one thread computes all its
    n-grams; through Triton `look_up_threads` do, see `LookupSettings.num_threads`.
    """
    check_picture(picture)
    check_int8(CPU)
    threads = choose_threads(0)
    use_threads(threads)
    served = read_repository(models)
    base = served.base
    dtype = choose_dtype("auto", CPU)
    load = saturating_batch(models, served)
    new = _NewText(texts_of_kind("shuffled", models), load.names)
    batch, new_warm_up = new.take(BATCH), new.take(2 * BATCH)
    names = ("none", "int8")
    ranges = measure_ranges(base, load_lower(base), base.load_upper())
    engines: dict[str, EncodeEngine] = {
        "none": served.engine(load.tenants, CPU),
        "int8": served.engine(load.tenants, CPU, dtype=choose_dtype("auto", CPU, "int8"), int8=ranges),
    }
    lower_layers = {name: load_lower(base) for name in names}
    for name, layers in lower_layers.items():
        lowers.pack(layers, dtype, base if name == "int8" else None)
    grams = unique_windows(base, batch.texts)
    logits = {
        name: np.concatenate([values.ravel() for values in engine.run(load.requests)])
        for name, engine in engines.items()
    }
    config = base.config
    exists = (grams != config.pad_id)[:, middle(config.vectors_per_ngram, config.window)]
    vectors = {
        name: compute_ngrams(layers, grams, dtype)[exists].astype(np.float32) for name, layers in lower_layers.items()
    }
    run_upper = {name: partial(engine.run, load.requests) for name, engine in engines.items()}
    run_lower = {name: partial(compute_ngrams, layers, grams, dtype) for name, layers in lower_layers.items()}
    runs: list[Run] = []
    rates: dict[str, dict[str, list[float]]] = {
        where: {name: [] for name in names} for where in (UPPER, LOWER, KNOWN, NEW)
    }
    steady = {KNOWN: True, NEW: True}
    with ExitStack() as stack:
        for engine in engines.values():
            stack.callback(engine.close)
        progress = stack.enter_context(progress_bars())
        servers = {}
        for name in names:
            plot = {"miss": "compute", "quantization": name, "num_threads": look_up_threads, "device": "cpu"}
            upper = {"num_slots": BATCH + 1, "device": "cpu", "quantization": name}
            log = f"triton-bench-{name}.log"
            servers[name] = stack.enter_context(benchmark_server(models, StageSettings(plot, upper), log=log))
            closed_loop(servers[name].ports.grpc_url, load.repeat(2), IN_FLIGHT)
            closed_loop(servers[name].ports.grpc_url, new_warm_up, IN_FLIGHT)
        bar = progress.add_task("int8", total=rounds)
        for turn in range(rounds):
            upper_times = time_interleaved(run_upper, 3, 2, progress, UPPER)
            lower_times = time_interleaved(run_lower, 3, 1, progress, LOWER)
            for name in names:
                rates[UPPER][name].append(BATCH / upper_times[name].median_s)
                rates[LOWER][name].append(BATCH / lower_times[name].median_s)
            known, fresh = rates[UPPER]["int8"][-1], min(rates[where]["int8"][-1] for where in (UPPER, LOWER))
            # Both servers get the same requests. New text is never sent twice, because a server keeps computed n-grams.
            requests_by_load = {
                KNOWN: load.repeat(batches_for(known, seconds)),
                NEW: new.take(batches_for(fresh, seconds) * BATCH),
            }
            for name in names[:: 1 if turn % 2 else -1]:
                for where, requests in requests_by_load.items():
                    run = closed_loop(servers[name].ports.grpc_url, requests, IN_FLIGHT)
                    rate, is_steady = steady_rate(run)
                    rates[where][name].append(rate)
                    steady[where] &= is_steady
                    runs.append(run)
            progress.update(bar, advance=1)
    if picture is not None:
        bar_chart(
            picture,
            [fill(where, 18, break_on_hyphens=False) for where in rates],
            {name: [median(rates_of[name]) for rates_of in rates.values()] for name in names},
            title=f"{base.config.name} in {str(dtype).removeprefix('torch.')}, and both stages in int8",
            x_label="what is measured",
            y_label="requests/s",
        )
    settings = {
        "base": base.config.name,
        "dtype": str(dtype),
        "threads": threads,
        "look_up_threads": look_up_threads or 1,
        "batch": BATCH,
        "rounds": rounds,
        "mean_tokens": round(load.tokens / BATCH, 1),
        "distinct_windows_a_text": round(len(grams) / BATCH, 1),
        "logits_moved_of_variance": _moved(logits),
        "windows_moved_of_variance": _moved(vectors),
    }
    rows = [
        {**_row(where, rates_of), **({"start_left_out": steady[where]} if where in steady else {})}
        for where, rates_of in rates.items()
    ]
    return Report("int8", settings, rows, [unanswered_goal("int8", runs)])


class _NewText:
    """A source of texts that are not repeated while the texts last, for tenants one after another."""

    def __init__(self, texts: Sequence[str], names: Sequence[str]) -> None:
        # Shuffled, because the texts list all orders of one sentence side by side.
        self._texts, self._names = np.random.default_rng(0).permutation(texts).tolist(), names
        self._next = 0

    def take(self, count: int) -> Requests:
        """Return requests of the next `count` texts."""
        positions = range(self._next, self._next + count)
        self._next += count
        return Requests(
            [self._names[i % len(self._names)] for i in positions],
            [self._texts[i % len(self._texts)] for i in positions],
            np.full(count, np.nan),
        )


def unique_windows(base: Base, texts: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return the different windows of the texts of one batch: `[W, n]`."""
    config = base.config
    ids = [encoded.ids for encoded in base.load_text_encoder().encode(texts)]
    grams, _ = text_ngrams(np.concatenate(ids), [len(text_ids) for text_ids in ids], config)
    return np.unique(grams.reshape(-1, config.window), axis=0)


def _moved(values: Mapping[str, npt.NDArray[np.float32]]) -> float:
    """Return the mean squared difference over the variance."""
    return float(np.square(values["int8"] - values["none"]).mean() / values["none"].var())


def _row(where: str, rates: Mapping[str, Sequence[float]]) -> dict[str, float | str]:
    ratios = [int8_rate / rate for int8_rate, rate in zip(rates["int8"], rates["none"], strict=True)]
    return {
        "where": where,
        "requests_per_s": median(rates["none"]),
        "int8_requests_per_s": median(rates["int8"]),
        "ratio": median(ratios),
        "spread": f"{min(ratios):.2f}-{max(ratios):.2f}",
    }
