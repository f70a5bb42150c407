"""The PLOT stage: token ids -> hidden states, by look-up, with the lower layers only for what no table has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from hplm.core.settings import BaseConfig, Miss, Quantization
from hplm.engine import lower_layers as lowers
from hplm.engine.kernels.onednn import rounded
from hplm.errors import ConfigError, MissingArtifactError
from hplm.models.base import Base
from hplm.models.device import CPU, choose_dtype, computing_in
from hplm.models.layers import WindowEncoder
from hplm.plot import table as tables
from hplm.plot.keys import pack
from hplm.plot.lookup_plan import LookupPlan, Table, plan, resolve
from hplm.plot.overlay import Overlay
from hplm.plot.table import PlotTable, Rows, Spare, Values
from hplm.store import artifact
from hplm.store.layout import Store, levels

# A window costs as much as three tokens: few are filled up. More than one, see `hplm.engine.kernels.onednn`.
WINDOW_STEP = 2
# At once. On a CPU more take longer: 2,048 of MiniLM's shape at once a fifth, of BERT-base's a tenth, with one thread or two
# (by hand); and they are of more sizes, for each of which oneDNN keeps memory.
CPU_WINDOWS = 256
# Shared out among threads: 4 % more time a window than 256 at once, and each waits less for the last (by hand).
SHARED_WINDOWS = 128
CUDA_WINDOWS = 2048
# What windows that no table has are counted under: remembered, computed now.
COMPUTED = (Overlay.name, "computed")
# What windows are counted under beside domains' names: a domain may be called like one of them.
LEVELS = frozenset({*levels(3), *COMPUTED})
# Computed at the start, twice each: TorchScript and oneDNN make themselves ready at the first calls of a size.
WARM_WINDOWS = (2, 8, 32, 128)


@dataclass(frozen=True)
class Helpers:
    """Threads that compute windows beside the one that asks for them, `count` for one look-up."""

    pool: ThreadPoolExecutor
    count: int


def compute_windows(
    lower: WindowEncoder, grams: npt.NDArray[np.int64], dtype: torch.dtype, helpers: Helpers | None = None
) -> Values:
    """What the lower layers give for windows `[W, n]`, as a table stores it: float16 `[W, n, H]`.

    The same bits whoever computes which: what a helper that comes late would have done the others do.
    """
    device = lower.window_position.device
    values = np.empty((*grams.shape, lower.config.hidden_size), dtype=np.float16)
    at_once = CUDA_WINDOWS if device.type != "cpu" else CPU_WINDOWS if helpers is None else SHARED_WINDOWS
    # Threads may share an iterator of a range: each number goes to one of them.
    starts = iter(range(0, len(grams), at_once))

    def compute() -> None:
        with torch.inference_mode(), computing_in(dtype, device):
            for start in starts:
                chunk = torch.from_numpy(grams[start : start + at_once])
                count = len(chunk)
                if device.type == "cpu":
                    # The last window again and again, see `rounded`.
                    chunk = chunk[torch.arange(rounded(count, WINDOW_STEP)).clamp(max=count - 1)]
                values[start : start + count] = lower(chunk.to(device))[:count].to("cpu", torch.float16).numpy()

    shares = -(-len(grams) // at_once)
    at_work = [] if helpers is None else [helpers.pool.submit(compute) for _ in range(min(helpers.count, shares - 1))]
    try:
        compute()
    finally:
        # Where this failed, nobody goes on. Who has not begun would begin late, and find nothing to do.
        for _ in starts:
            pass
        begun = [one for one in at_work if not one.cancel()]
        wait(begun)
    for one in begun:
        one.result()
    return values


class OpenDomain:
    """Look-up over the tables of one version tree's path.

    `chain` holds the n-gram tables, branch first, root last. Miss mode `backoff` goes on to `shorter` (bigrams,
    unigrams); `compute`, chosen by passing `lower`, computes the window instead and remembers it in an overlay of
    `overlay_windows`, in `room` where given. Not thread-safe: one batch at a time.
    """

    def __init__(
        self,
        config: BaseConfig,
        chain: Sequence[PlotTable],
        shorter: Sequence[PlotTable],
        lower: WindowEncoder | None,
        *,
        overlay_windows: int = 0,
        room: Spare | None = None,
        dtype: torch.dtype = torch.float32,
        helpers: Helpers | None = None,
    ) -> None:
        self.config = config
        self._chain = chain
        self._shorter = shorter
        self._lower = lower
        self._dtype = dtype
        self._helpers = helpers
        self._overlay = (
            Overlay(overlay_windows, config.window, config.hidden_size, config.vocab_size, room)
            if lower is not None
            else None
        )
        self.windows_by_level: Counter[str] = Counter()

    @property
    def miss(self) -> Miss:
        """What a window that no table has gets."""
        return "backoff" if self._lower is None else "compute"

    def hidden_states(self, ids: npt.NDArray[np.int64], lengths: Sequence[int]) -> npt.NDArray[np.float16]:
        """Merged window vectors `[N, H]` of packed texts (HMI eq. 2); positions are added by the upper layers."""
        config = self.config
        fresh: list[tuple[npt.NDArray[np.int64], Values]] = []

        def compute(grams: npt.NDArray[np.int64]) -> tuple[PlotTable, Rows]:
            unique, rows = np.unique(grams, axis=0, return_inverse=True)
            assert self._lower is not None
            values = compute_windows(self._lower, unique, self._dtype, self._helpers)
            fresh.append((unique, values))
            keys = pack(unique, config.vocab_size)
            memory = values.reshape(-1, config.hidden_size)
            return PlotTable("computed", config.window, config.vocab_size, keys, memory, 0, None), rows.ravel()

        if self._overlay is None:
            found = plan(ids, lengths, [*self._chain, *self._shorter], config.window, config.pad_id)
        else:
            found = plan(ids, lengths, [*self._chain, self._overlay], config.window, config.pad_id, compute)
        self.windows_by_level.update(found.windows_by_level)
        merged = gather(found)
        # Only now: remembering may overwrite rows that the plan reads.
        for unique, values in fresh:
            assert self._overlay is not None
            self._overlay.remember(unique, values)
        return merged.numpy()

    def warm_up(self) -> None:
        """Compute windows of a few sizes and forget them: the first of a process take ten times as long as later ones."""
        if self._lower is not None:
            for count in 2 * WARM_WINDOWS:
                grams = np.full((count, self.config.window), self.config.pad_id, dtype=np.int64)
                compute_windows(self._lower, grams, self._dtype, self._helpers)

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


def open_lookup(
    store: Store,
    base: Base,
    plot_name: str,
    *,
    miss: str = "compute",
    overlay_windows: int = 65_536,
) -> OpenDomain:
    """The look-up over a PLOT of a store: the lineage of a root alone."""
    root = store.table(plot_name, "root").parent.relative_to(store.root)
    return open_lineage(store, base, [root], miss=miss, overlay_windows=overlay_windows)


def open_lineage(
    store: Store,
    base: Base,
    lineage: Sequence[Path | str],
    *,
    miss: str = "compute",
    overlay_windows: int = 65_536,
    dtype: torch.dtype | None = None,
    verify: bool = True,
    base_lower: WindowEncoder | None = None,
    quantization: Quantization = "none",
    device: torch.device = CPU,
    helpers: Helpers | None = None,
) -> OpenDomain:
    """The look-up over a domain version, as serving, fine-tuning and measuring all do it.

    `lineage` holds the folders of its versions, its own first, its root's last, relative to the store or absolute. A miss
    is computed by the lower layers of the first, on `device`, and remembered for it alone. `base_lower`: the base's lower
    layers where they are there already; all domains of a base share their word embeddings. They are for look-ups alone from
    then on: their matrices are put in oneDNN's order, and with `quantization` int8 products with them are computed in int8.
    Raises MissingArtifactError, CorruptArtifactError, WrongBaseError, StoreUnavailableError or ConfigError.
    """
    *branches, root = (store.root / path for path in lineage)
    whole, *shorter = levels(base.config.window)
    overlay_windows = overlay_windows if miss == "compute" else 0
    dtype = dtype or choose_dtype("auto", device)
    lower = lowers.of_lineage(store, base, lineage, base_lower=base_lower, verify=verify) if miss == "compute" else None
    if lower is not None:
        lower.to(device)
        lowers.pack(lower, dtype, base if quantization == "int8" else None)
    opened, room = tables.load_together(
        [*(branch / "branch" for branch in branches), root / whole, *(root / level for level in shorter)],
        fingerprint=base.fingerprint,
        verify=verify,
        spare_vectors=overlay_windows * base.config.window,
    )
    if lower is None and not len(opened[-1].keys):
        raise ConfigError("the domain has no unigrams to back off to, as of a fleet made up: let misses be computed")
    named = [replace(one, name=f"domain:{one.name}") if one.name in LEVELS else one for one in opened[: len(branches)]]
    return OpenDomain(
        base.config,
        [*named, *opened[len(branches) : -len(shorter)]],
        opened[-len(shorter) :],
        lower,
        overlay_windows=overlay_windows,
        room=room,
        dtype=dtype,
        helpers=helpers,
    )


# Of each file its path, size and time of change.
FilesState = tuple[tuple[str, int, int], ...]


def files_state(folder: Path) -> FilesState:
    """Another one where a file of a domain version was replaced or written to. Raises OSError."""
    seen = sorted(path for path in folder.rglob("*") if not path.name.startswith(".") and path.is_file())
    found = ((path, path.stat()) for path in seen)
    return tuple((str(path), about.st_size, about.st_mtime_ns) for path, about in found)


def verify_domain(folder: Path) -> None:
    """Check all files of a domain version. Raises MissingArtifactError or CorruptArtifactError."""
    if not folder.is_dir():
        raise MissingArtifactError(f"no domain version in {folder}: `hplm store verify` tells what is lost")
    for part in sorted(path for path in folder.iterdir() if not path.name.startswith(".")):
        artifact.read(part, lowers.KIND if part.name == "lower" else tables.KIND).verify()


def gather(found: LookupPlan) -> Tensor:
    """Carry a plan out: float16 `[N, H]`, one `embedding_bag` over the plan's memory."""
    counts = np.diff(found.offsets)
    return F.embedding_bag(
        torch.from_numpy(found.flat),
        torch.from_numpy(found.memory),
        torch.from_numpy(found.offsets),
        mode="sum",
        per_sample_weights=torch.from_numpy(np.repeat((1.0 / counts).astype(np.float16), counts)),
        include_last_offset=True,
    )
