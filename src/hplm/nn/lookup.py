"""The PLOT stage: token ids -> hidden states, by look-up, with the lower layers only for what no table has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from hplm.config import BaseConfig
from hplm.nn.base import Base
from hplm.nn.dtype import choose_dtype, computing_in
from hplm.nn.encoder import WindowEncoder
from hplm.plot import table as tables
from hplm.plot.lookup import Gather, LookupPlan, Table, plan, resolve
from hplm.plot.overlay import Overlay
from hplm.plot.table import PlotTable, Rows, Values
from hplm.store.layout import Store


@dataclass(frozen=True)
class ComputedWindows:
    """Windows that the lower layers have just computed: a table for one batch. `grams` `[U, n]` unique and sorted."""

    size: int
    grams: npt.NDArray[np.int64]
    values: Values
    name: str = "computed"

    def find(self, grams: npt.NDArray[np.int64]) -> Rows:
        """Row of each window; all are there."""
        both = np.concatenate([self.grams, grams])
        _, inverse = np.unique(both, axis=0, return_inverse=True)
        row_of = np.empty(len(both), dtype=np.int64)
        row_of[inverse.ravel()[: len(self.grams)]] = np.arange(len(self.grams))
        return row_of[inverse.ravel()[len(self.grams) :]]


def compute_windows(
    lower: WindowEncoder, grams: npt.NDArray[np.int64], dtype: torch.dtype, chunk_windows: int = 2048
) -> Values:
    """What the lower layers give for windows `[W, n]`, as a table stores it: float16 `[W, n, H]`."""
    device = lower.window_position.device
    parts = []
    with torch.inference_mode(), computing_in(dtype, device):
        for chunk in torch.from_numpy(grams).split(chunk_windows):
            parts.append(lower(chunk.to(device)).to("cpu", torch.float16).contiguous().numpy())
    empty = np.zeros((0, lower.config.window, lower.config.hidden_size), dtype=np.float16)
    return np.concatenate(parts) if parts else empty


class PlotLookup:
    """Look-up over the tables of one version tree's path.

    `chain` holds the n-gram tables, branch first, root last. Miss mode `backoff` goes on to `shorter` (bigrams,
    unigrams); `compute`, chosen by passing `lower`, computes the window instead and remembers it in an overlay of
    `overlay_windows`. Not thread-safe: one batch at a time.
    """

    def __init__(
        self,
        config: BaseConfig,
        chain: Sequence[PlotTable],
        shorter: Sequence[PlotTable],
        lower: WindowEncoder | None,
        *,
        overlay_windows: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config = config
        self._chain = chain
        self._shorter = shorter
        self._lower = lower
        self._dtype = dtype
        self._overlay = (
            Overlay(overlay_windows, config.window, config.hidden_size, config.vocab_size)
            if lower is not None
            else None
        )
        self.windows_by_level: Counter[str] = Counter()

    def hidden_states(self, ids: npt.NDArray[np.int64], lengths: Sequence[int]) -> npt.NDArray[np.float16]:
        """Merged window vectors `[N, H]` of packed texts (HMI eq. 2); positions are added by the upper layers."""
        config = self.config
        if self._overlay is None:
            found = plan(ids, lengths, [*self._chain, *self._shorter], config.window, config.pad_id)
        else:
            found = plan(ids, lengths, [*self._chain, self._overlay], config.window, config.pad_id, self._compute)
        self.windows_by_level.update(found.windows_by_level)
        merged = gather(found)
        # Only now: remembering may overwrite rows that the plan reads.
        if self._overlay is not None:
            for step in found.gathers:
                if isinstance(step.table, ComputedWindows):
                    self._overlay.remember(step.table.grams, step.table.values)
        return merged.numpy()

    def vectors(self, grams: npt.NDArray[np.int64]) -> Values:
        """The stored vectors of windows `[W, n]` that the n-gram tables or the overlay have: `[W, n, H]`."""
        found = np.zeros((len(grams), self.config.window, self.config.hidden_size), dtype=np.float16)
        chain: list[Table] = [*self._chain]
        if self._overlay is not None:
            chain.append(self._overlay)
        answers, missing = resolve(grams, chain)
        if len(missing):
            raise KeyError(f"{len(missing)} windows are neither in a table nor in the overlay")
        for table, places, rows in answers:
            assert isinstance(table, PlotTable | Overlay)
            found[places] = table.values[rows]
        return found

    def _compute(self, grams: npt.NDArray[np.int64]) -> ComputedWindows:
        assert self._lower is not None
        unique = np.unique(grams, axis=0)
        return ComputedWindows(self.config.window, unique, compute_windows(self._lower, unique, self._dtype))


def open_lookup(
    store: Store,
    base: Base,
    plot_name: str,
    *,
    miss: str = "compute",
    overlay_windows: int = 65_536,
    dtype: torch.dtype | None = None,
    verify: bool = True,
) -> PlotLookup:
    """The look-up over a PLOT of a store, as serving, fine-tuning and measuring all do it.

    Raises MissingArtifactError, CorruptArtifactError or WrongBaseError.
    """
    levels = ["root", "bigram", "unigram"] if base.config.window > 2 else ["root", "unigram"]
    root, *shorter = (
        tables.load(store.table(plot_name, level), fingerprint=base.fingerprint, verify=verify) for level in levels
    )
    lower = base.load_lower() if miss == "compute" else None
    dtype = dtype or choose_dtype("auto", torch.device("cpu"))
    return PlotLookup(base.config, [root], shorter, lower, overlay_windows=overlay_windows, dtype=dtype)


def gather(found: LookupPlan) -> Tensor:
    """Carry a plan out: float16 `[N, H]`."""
    weights = torch.from_numpy((1.0 / found.vector_counts).astype(np.float16))
    merged, *rest = (_bag(step, weights) for step in found.gathers)
    for part in rest:
        merged += part
    return merged


def _bag(step: Gather, weights: Tensor) -> Tensor:
    """One `embedding_bag` over the mapped table: weighted sums of rows without copying them first."""
    assert isinstance(step.table, PlotTable | Overlay | ComputedWindows)
    values = step.table.values
    table = torch.from_numpy(values).view(-1, values.shape[-1])
    flat, offsets = torch.from_numpy(step.flat), torch.from_numpy(step.offsets)
    each = weights.repeat_interleave(offsets.diff())
    return F.embedding_bag(flat, table, offsets, mode="sum", per_sample_weights=each, include_last_offset=True)
