"""The benchmark `hplm bench plot-lookup`: time of a look-up from memory, and which level answers how many windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from hplm_loadtest.benchmarks.served_repository import ServedRepository, read_repository
from hplm_loadtest.benchmarks.timing import time_interleaved

LENGTH = 128
BATCH = 32
BATCHED = f"batch of {BATCH}"
MISSING = "random tokens, in no table"


def plot_lookup(models: Path, rounds: int) -> Report:
    """Measure look-ups of 128 tokens: n-grams in memory, alone, in batches, in a Python dictionary; and n-grams in no table."""
    use_threads(1)
    served = read_repository(models)
    base = served.base
    encoder = TextEncoder(base.tokenizer_path, LENGTH)
    texts = [encoded.ids for encoded in encoder.encode(unseen_paragraphs()) if len(encoded.ids) == LENGTH]
    rates = hit_rates(served, texts)
    fast = open_lookup(served.store, base, served.plot.table, overlay_windows=sum(map(len, texts)))
    batches = [texts[i : i + BATCH] for i in range(0, len(texts) - BATCH + 1, BATCH)]
    with progress_bars() as progress:
        for texts_of_batch in progress.track(batches, description="remember all windows"):
            fast.hidden_states(np.concatenate(texts_of_batch), [LENGTH] * BATCH)
    # From here on every window is in the root table or in the overlay. The measurement goes through all texts, because windows
    # that are looked up again and again would be in the processor's cache.
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

    random = np.random.default_rng(0)
    # With room for one n-gram, none of them is remembered.
    nothing_known = open_lookup(served.store, base, served.plot.table, overlay_windows=1)

    def missing() -> None:
        nothing_known.hidden_states(random.integers(base.config.vocab_size, size=LENGTH), [LENGTH])

    variants = {"one request": alone, BATCHED: batch, "reference": slow, MISSING: missing}
    with progress_bars() as progress:
        timed = time_interleaved(variants, rounds, 32, progress, "look-up")
    ms = {name: 1000 * timing.median_s / (BATCH if name == BATCHED else 1) for name, timing in timed.items()}
    rows: list[dict[str, Any]] = [
        {"variant": name, "ms_per_request": ms[name], "spread": timing.spread} for name, timing in timed.items()
    ]
    rows += [{"variant": f"share of windows, {mode}", **shares} for mode, shares in rates.items()]
    goals = [
        Goal("plot-lookup", "128 tokens looked up and merged, in batches", 0.03, ms[BATCHED], "ms", "lower"),
        Goal("plot-misses", "128 random tokens, all computed", 4.5, ms[MISSING], "ms", "lower"),
    ]
    settings = {"tokens": LENGTH, "texts": len(batches) * BATCH, "threads": 1, "rounds": rounds}
    return Report("plot-lookup", settings, rows, goals)


def as_dictionary(lookup: OpenDomain, texts: list[npt.NDArray[np.int64]]) -> dict[tuple[int, ...], reference.Vectors]:
    """Return all windows of `texts` with their vectors, in the form that the slow reference looks up."""
    config = lookup.config
    stored: dict[tuple[int, ...], reference.Vectors] = {}
    for ids in texts:
        grams, _ = text_ngrams(ids, [len(ids)], config)
        for gram, vectors in zip(grams.tolist(), lookup.vectors(grams), strict=True):
            stored[tuple(gram)] = vectors
    return stored


def hit_rates(served: ServedRepository, texts: list[npt.NDArray[np.int64]]) -> dict[str, dict[str, float]]:
    """Return the share of windows of unseen text that each level answers, for each treatment of misses.

    The overlay is empty at first.
    """
    rates = {}
    for mode in ("backoff", "compute"):
        try:
            lookup = open_lookup(served.store, served.base, served.plot.table, miss=mode)
        except ConfigError:  # a fleet's tables have no shorter n-grams to back off to
            continue
        for ids in texts[:64]:
            lookup.hidden_states(ids, [len(ids)])
        total = sum(lookup.windows_by_level.values())
        rates[mode] = {level: count / total for level, count in lookup.windows_by_level.items()}
    return rates
