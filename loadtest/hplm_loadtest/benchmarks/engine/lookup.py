"""`hplm bench plot-lookup`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from hplm.core.text import TextEncoder
from hplm.engine import reference
from hplm.engine.open_domain import OpenDomain, open_lookup
from hplm.errors import ConfigError
from hplm.models.device import use_threads
from hplm.plot.ngrams import text_ngrams
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import progress_bars
from hplm.reporting.samples import unseen_paragraphs
from hplm_loadtest.benchmarks.models import Served, read
from hplm_loadtest.benchmarks.timing import interleaved

LENGTH = 128
BATCH = 32
BATCHED = f"batch of {BATCH}"


def plot_lookup(models: Path, rounds: int) -> Report:
    """Time of 128-token requests whose windows are in memory, alone and in batches, beside a dictionary in Python."""
    use_threads(1)
    served = read(models)
    base = served.base
    encoder = TextEncoder(base.tokenizer_path, LENGTH)
    texts = [one.ids for one in encoder.encode(unseen_paragraphs()) if len(one.ids) == LENGTH]
    rates = hit_rates(served, texts)
    fast = open_lookup(served.store, base, served.plot.table, overlay_windows=sum(map(len, texts)))
    batches = [texts[i : i + BATCH] for i in range(0, len(texts) - BATCH + 1, BATCH)]
    with progress_bars() as progress:
        for some in progress.track(batches, description="remember all windows"):
            fast.hidden_states(np.concatenate(some), [LENGTH] * BATCH)
    # Every window is in the root table or the overlay from here on: "from memory". All texts in turn, for what is looked up
    # again and again lies in the processor's own memory.
    slow_texts = batches[0]
    stored = as_dictionary(fast, slow_texts)
    turn = iter(range(1 << 60))

    def alone() -> None:
        fast.hidden_states(texts[next(turn) % (len(batches) * BATCH)], [LENGTH])

    def batch() -> None:
        fast.hidden_states(np.concatenate(batches[next(turn) % len(batches)]), [LENGTH] * BATCH)

    def slow() -> None:
        ids = slow_texts[next(turn) % BATCH].tolist()
        reference.merged(ids, base.config, [stored], None)

    with progress_bars() as progress:
        timed = interleaved({"one request": alone, BATCHED: batch, "reference": slow}, rounds, 32, progress, "look-up")
    rows = [
        {
            "variant": name,
            "ms_per_request": 1000 * one.median_s / (BATCH if name == BATCHED else 1),
            "spread": one.spread,
        }
        for name, one in timed.items()
    ]
    rows += [{"variant": f"share of windows, {mode}", **shares} for mode, shares in rates.items()]
    best = 1000 * timed[BATCHED].median_s / BATCH
    goal = Goal("plot-lookup", "128 tokens looked up and merged, in batches", 0.05, best, "ms", "lower")
    return Report(
        "plot-lookup", {"tokens": LENGTH, "texts": len(batches) * BATCH, "threads": 1, "rounds": rounds}, rows, [goal]
    )


def as_dictionary(lookup: OpenDomain, texts: list[npt.NDArray[np.int64]]) -> dict[tuple[int, ...], reference.Vectors]:
    """All windows of `texts` with their vectors, as the slow reference looks them up."""
    config = lookup.config
    stored: dict[tuple[int, ...], reference.Vectors] = {}
    for ids in texts:
        grams, _ = text_ngrams(ids, [len(ids)], config)
        for gram, vectors in zip(grams.tolist(), lookup.vectors(grams), strict=True):
            stored[tuple(gram)] = vectors
    return stored


def hit_rates(served: Served, texts: list[npt.NDArray[np.int64]]) -> dict[str, dict[str, float]]:
    """Share of windows of unseen text that each level answers, overlay empty at first; by what becomes of a miss."""
    rates = {}
    for mode in ("backoff", "compute"):
        try:
            lookup = open_lookup(served.store, served.base, served.plot.table, miss=mode)
        except ConfigError:  # a fleet's tables have nothing to back off to
            continue
        for ids in texts[:64]:
            lookup.hidden_states(ids, [len(ids)])
        total = sum(lookup.windows_by_level.values())
        rates[mode] = {level: count / total for level, count in lookup.windows_by_level.items()}
    return rates
