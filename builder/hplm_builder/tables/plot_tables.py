"""Building PLOT tables: count the n-grams of a corpus, keep the most frequent, compute their vectors (HMI 3.2.1, 5.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.progress import Progress

from hplm.core.names import check_name_of
from hplm.core.settings import BaseConfig
from hplm.core.text import load_tokenizer
from hplm.engine.lower_layers import load_lower
from hplm.engine.lower_layers import pack as pack_lower
from hplm.engine.open_domain import compute_ngrams
from hplm.errors import ArtifactError, ConfigError, DataError
from hplm.models import base as bases
from hplm.models import base_folder
from hplm.models.base import Base
from hplm.models.device import CPU, choose_dtype
from hplm.models.lower import LowerEncoder
from hplm.plot import table as tables
from hplm.plot.keys import fits, pack, unpack
from hplm.plot.ngrams import Ids, middle, text_ngrams, vectors_of
from hplm.store import artifact
from hplm.store.layout import Store, levels
from hplm_builder.data.tokenising import tokenise_in_batches

CHUNK = 4096  # n-grams computed between two progress reports


@dataclass(frozen=True)
class Counted:
    """Distinct n-grams `[D, n]`, most frequent first, and how often each occurs `[D]`."""

    grams: Ids
    counts: npt.NDArray[np.int64]

    def top(self, percent: float) -> Ids:
        """Return the most frequent `percent` of the distinct n-grams."""
        return self.grams[: max(1, round(len(self.grams) * percent / 100))]

    def share_of(self, grams: Ids, vocab_size: int) -> float:
        """Return the share of all occurrences that the n-grams `[any, n]` make up."""
        known = np.isin(pack(self.grams, vocab_size), pack(grams, vocab_size))
        return int(self.counts[known].sum()) / int(self.counts.sum())

    def bigrams(self, vocab_size: int) -> Ids:
        """Return the distinct bigrams of centre and right neighbour, which the back-off looks up; most frequent first."""
        grams, counts = _unique(self.grams[:, middle(2, self.grams.shape[1])], self.counts, vocab_size)
        return grams[np.argsort(-counts, kind="stable")]


def count_grams(documents: Sequence[str], base: Base, progress: Progress) -> Counted:
    """Count the n-grams of all tokens of the corpus; ties stay in the order of the ids."""
    tokenizer = load_tokenizer(base.tokenizer_path)
    tracked = progress.track(documents, description="count n-grams")
    parts = tokenise_in_batches(tracked, tokenizer, base.config.max_tokens)
    return count_packed(((ids, lengths.tolist()) for ids, lengths in parts), base.config)


def count_packed(texts: Iterable[tuple[Ids, Sequence[int]]], config: BaseConfig) -> Counted:
    """Count the n-grams of texts that are token ids already: packed `ids` `[N]` and `lengths` that sum to N, part by part."""
    parts = (text_ngrams(ids, lengths, config)[0] for ids, lengths in texts)
    if fits(config.window, config.vocab_size):
        # A key for each occurrence, sorted in place: a corpus of 64 M tokens has tens of millions of distinct n-grams.
        keys = np.concatenate([pack(part, config.vocab_size) for part in parts])
        keys.sort()
        first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        counts, distinct = np.diff(first, append=len(keys)), keys[first]
        del keys
        order = np.argsort(-counts, kind="stable")
        return Counted(unpack(distinct[order], config.window, config.vocab_size), counts[order])
    counted = [np.unique(part, axis=0, return_counts=True) for part in parts]
    part_grams, part_counts = (np.concatenate(both) for both in zip(*counted, strict=True))
    grams, counts = _unique(part_grams, part_counts, config.vocab_size)
    order = np.argsort(-counts, kind="stable")
    return Counted(grams[order], counts[order])


def _unique(grams: Ids, counts: npt.NDArray[np.int64], vocab_size: int) -> tuple[Ids, npt.NDArray[np.int64]]:
    """Return the distinct n-grams in the order of their ids, counts added up."""
    if fits(grams.shape[1], vocab_size):
        _, first, inverse = np.unique(pack(grams, vocab_size), return_index=True, return_inverse=True)
    else:
        _, first, inverse = np.unique(grams, axis=0, return_index=True, return_inverse=True)
    return grams[first], np.bincount(inverse.ravel(), weights=counts).astype(np.int64)


def check_top(percent: float) -> None:
    """Raise ConfigError if `percent` is no share of n-grams to keep."""
    if not 0 < percent <= 100:
        raise ConfigError(f"--top is a share in percent, above 0 and at most 100; got {percent:g}")


def build_plot(
    store: Store,
    base_name: str,
    plot_name: str,
    documents: Sequence[str],
    percent: float,
    progress: Progress,
    dtype: str = "auto",
) -> dict[str, Any]:
    """Publish root, bigram and unigram tables of a base, and return their sizes.

    The root keeps the top `percent` of the distinct n-grams; as many bigrams are kept, and every unigram. Tables of that
    name are replaced. Raises DataError if the tables are another base's, because that base's tenants use them.
    """
    check_name_of("--plot", plot_name)
    check_top(percent)
    if not documents:
        raise DataError("the corpus holds no text")
    base = bases.load(store.base(base_name))
    _check_not_of_another_base(store, base, plot_name)
    return publish_tables(store, base, plot_name, count_grams(documents, base, progress), percent, progress, dtype)


def publish_tables(
    store: Store, base: Base, plot_name: str, counted: Counted, percent: float, progress: Progress, dtype: str = "auto"
) -> dict[str, Any]:
    """Compute and publish the tables of n-grams that were counted; arguments and result as of `build_plot`."""
    computing = choose_dtype(dtype, CPU)
    lower = load_lower(base)
    # Packed as for serving, so that a table holds what a miss would compute.
    pack_lower(lower, computing)
    kept = counted.top(percent)
    seen = int(counted.counts[: len(kept)].sum())
    record: dict[str, Any] = {
        "tokens": int(counted.counts.sum()),
        "distinct": len(counted.grams),
        "top_percent": percent,
        "corpus_hit_rate": seen / int(counted.counts.sum()),
    }
    unigrams = np.arange(base.config.vocab_size, dtype=np.int64)[:, None]
    grams_of = {"unigram": unigrams, "root": kept}
    if base.config.window > 2:
        grams_of["bigram"] = counted.bigrams(base.config.vocab_size)[: len(kept)]
    for level, grams in grams_of.items():
        bar = progress.add_task(f"compute {level} vectors", total=len(grams))
        record[f"{level}_rows"] = write_ngrams(
            store.table(plot_name, level),
            level,
            grams,
            lower,
            base.fingerprint,
            {"corpus": record},
            computing,
            partial(progress.advance, bar),
        )
    return record


def has_plot(store: Store, base: Base, plot_name: str) -> bool:
    """Return whether all tables of a PLOT are there, whole and of this base."""
    try:
        for level in levels(base.config.window):
            tables.load(store.table(plot_name, level), fingerprint=base.fingerprint)
    except ArtifactError:
        return False
    return True


def _check_not_of_another_base(store: Store, base: Base, plot_name: str) -> None:
    fingerprint = None
    with suppress(ArtifactError):
        fingerprint = artifact.read(store.table(plot_name, "root"), tables.KIND).meta.get("base")
    if fingerprint in (None, base.fingerprint):
        return
    for other in base.folder.parent.iterdir():
        with suppress(ArtifactError):
            if artifact.read(other, base_folder.KIND).fingerprint == fingerprint:
                raise DataError(f"the tables {plot_name!r} are of base {other.name!r}: choose another name with --plot")


def write_ngrams(
    folder: Path,
    name: str,
    grams: Ids,
    lower: LowerEncoder,
    fingerprint: str,
    meta: dict[str, Any],
    dtype: torch.dtype,
    advance: Callable[[int], None],
) -> int:
    """Publish the table of n-grams `[D, size]`, most frequent first, computed by `lower`; return its number of rows.

    `advance(count)` is called after every chunk with the number of n-grams computed. If it raises, no table is published.
    """
    config = lower.config
    grams = tables.sort_grams(grams, config.vocab_size)
    size = grams.shape[1]
    kept = middle(vectors_of(size, config), config.vectors_per_ngram)

    def chunks() -> Iterator[tables.Values]:
        for first in range(0, len(grams), CHUNK):
            part = grams[first : first + CHUNK]
            whole = np.full((len(part), config.window), config.pad_id, dtype=np.int64)
            whole[:, middle(size, config.window)] = part
            yield compute_ngrams(lower, whole, dtype)[:, kept]
            advance(len(part))

    tables.write(folder, name, grams, chunks(), config=config, fingerprint=fingerprint, meta=meta)
    return len(grams)
