"""A domain's tables, opened: token ids -> hidden states by look-up; the lower encoder computes what no table has."""

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
from hplm.core.text import EncodedText
from hplm.engine import lower_layers as lowers
from hplm.engine.kernels.onednn import rounded
from hplm.engine.token_domain import TokenDomain
from hplm.errors import ConfigError, MissingArtifactError
from hplm.models.base import Base
from hplm.models.device import CPU, choose_dtype, computing_in
from hplm.models.lower import LowerEncoder
from hplm.plot import table as tables
from hplm.plot.keys import pack
from hplm.plot.lookup_plan import LookupPlan, Table, plan, resolve
from hplm.plot.overlay import Overlay
from hplm.plot.table import PlotTable, Rows, Spare, Values
from hplm.store import artifact, domain_version
from hplm.store.layout import Store, levels

# n-grams of a product are filled up to a multiple of this number, see `hplm.engine.kernels.onednn`. A window costs as much as
# three tokens, so few are filled up. One n-gram alone may be rounded otherwise, so the number is above one.
NGRAM_STEP = 2
# n-grams computed at once on a CPU. More take longer: 2,048 of MiniLM's shape a fifth, of BERT-base's a tenth, with one thread
# or two (measured by hand). They would be of more sizes too, for each of which oneDNN keeps memory.
CPU_NGRAMS = 256
# n-grams computed at once if threads share the work: 4 % more time an n-gram than 256, but each thread waits less for the last.
SHARED_NGRAMS = 128
CUDA_NGRAMS = 2048
# Levels under which n-grams without a table row are counted: remembered, and computed now.
COMPUTED = (Overlay.name, "computed")
# Names of all levels but domains. A domain may have one of these names too.
LEVELS = frozenset({*levels(3), *COMPUTED})
# Sizes that are computed at the start, twice each: TorchScript and oneDNN prepare themselves at the first calls of a size.
WARM_NGRAMS = (2, 8, 32, 128)


@dataclass(frozen=True)
class Helpers:
    """Threads that compute n-grams beside the thread that asks for them, `count` for one look-up."""

    pool: ThreadPoolExecutor
    count: int


def compute_ngrams(
    lower: LowerEncoder, grams: npt.NDArray[np.int64], dtype: torch.dtype, helpers: Helpers | None = None
) -> Values:
    """Compute the vectors of n-grams `[W, n]` as a table stores them: float16 `[W, v, H]`.

    The bits do not depend on which thread computes which n-grams. The caller does the work of helpers that start late.
    """
    config, device = lower.config, lower.device
    values = np.empty((len(grams), config.vectors_per_ngram, config.hidden_size), dtype=np.float16)
    at_once = CUDA_NGRAMS if device.type != "cpu" else CPU_NGRAMS if helpers is None else SHARED_NGRAMS
    # Threads may share an iterator of a range: each number goes to one of them.
    starts = iter(range(0, len(grams), at_once))

    def compute() -> None:
        with torch.inference_mode(), computing_in(dtype, device):
            for start in starts:
                chunk = torch.from_numpy(grams[start : start + at_once])
                count = len(chunk)
                if device.type == "cpu":
                    # The last n-gram is repeated, see `rounded`.
                    chunk = chunk[torch.arange(rounded(count, NGRAM_STEP)).clamp(max=count - 1)]
                values[start : start + count] = lower(chunk.to(device))[:count].to("cpu", torch.float16).numpy()

    shares = -(-len(grams) // at_once)
    futures = [] if helpers is None else [helpers.pool.submit(compute) for _ in range(min(helpers.count, shares - 1))]
    try:
        compute()
    finally:
        # If this thread failed, the helpers stop too. A helper that starts late has no work left.
        for _ in starts:
            pass
        started = [future for future in futures if not future.cancel()]
        wait(started)
    for future in started:
        future.result()
    return values


class OpenDomain:
    """Look-up over the tables of one path through a version tree. Not thread-safe: one batch at a time.

    `chain` holds the n-gram tables, branch first, root last, or none (see `hplm.store.domain_version.searched`). In miss mode
    `backoff`, without `lower`, a miss goes on to the bigrams and unigrams of `shorter`. In mode `compute`, `lower` computes a
    miss. An overlay of `overlay_windows` n-grams then remembers it, in `room` if there is one.
    """

    def __init__(
        self,
        config: BaseConfig,
        chain: Sequence[PlotTable],
        shorter: Sequence[PlotTable],
        lower: LowerEncoder | None,
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
        self._overlay = Overlay(overlay_windows, config, room) if lower is not None else None
        self.windows_by_level: Counter[str] = Counter()

    @property
    def miss(self) -> Miss:
        """The miss mode: how an n-gram that no table has is answered."""
        return "backoff" if self._lower is None else "compute"

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's features."""
        return 2 * self.config.hidden_size

    def features(self, texts: Sequence[EncodedText]) -> list[npt.NDArray[np.float16]]:
        """Return the hidden states `[T, H]` of each text."""
        lengths = [len(text.ids) for text in texts]
        hidden = self.hidden_states(np.concatenate([text.ids for text in texts]), lengths)
        return np.split(hidden, np.cumsum(lengths)[:-1])

    def hidden_states(self, ids: npt.NDArray[np.int64], lengths: Sequence[int]) -> npt.NDArray[np.float16]:
        """Return the merged vectors `[N, H]` of packed texts (HMI eq. 2). The upper layers add positions."""
        config = self.config
        computed: list[tuple[npt.NDArray[np.int64], Values]] = []

        def compute(grams: npt.NDArray[np.int64]) -> tuple[PlotTable, Rows]:
            unique, rows = np.unique(grams, axis=0, return_inverse=True)
            assert self._lower is not None
            values = compute_ngrams(self._lower, unique, self._dtype, self._helpers)
            computed.append((unique, values))
            keys = pack(unique, config.vocab_size)
            memory = values.reshape(-1, config.hidden_size)
            table = PlotTable(
                "computed", config.window, config.vectors_per_ngram, config.vocab_size, keys, memory, 0, None
            )
            return table, rows.ravel()

        if self._overlay is None:
            lookup_plan = plan(ids, lengths, [*self._chain, *self._shorter], config)
        else:
            lookup_plan = plan(ids, lengths, [*self._chain, self._overlay], config, compute)
        self.windows_by_level.update(lookup_plan.windows_by_level)
        merged = gather(lookup_plan)
        # Only after gathering: remembering may overwrite rows that the plan reads.
        for unique, values in computed:
            assert self._overlay is not None
            self._overlay.remember(unique, values)
        return merged.numpy()

    def warm_up(self) -> None:
        """Compute n-grams of a few sizes and forget them: the first of a process take ten times as long as later ones."""
        if self._lower is not None:
            for count in 2 * WARM_NGRAMS:
                grams = np.full((count, self.config.window), self.config.pad_id, dtype=np.int64)
                compute_ngrams(self._lower, grams, self._dtype, self._helpers)

    def vectors(self, grams: npt.NDArray[np.int64]) -> Values:
        """Return the vectors `[W, v, H]` of n-grams `[W, n]` from tables or overlay. Raises KeyError if they lack an n-gram."""
        config = self.config
        values = np.zeros((len(grams), config.vectors_per_ngram, config.hidden_size), dtype=np.float16)
        chain: list[Table] = [*self._chain]
        if self._overlay is not None:
            chain.append(self._overlay)
        answers, missing = resolve(grams, chain)
        if len(missing):
            raise KeyError(f"{len(missing)} n-grams are neither in a table nor in the overlay")
        for table, answered, rows in answers:
            assert isinstance(table, PlotTable | Overlay)
            values[answered] = table.values[rows]
        return values


# An open domain of either kind of base. It gives texts' `features`, which tenants train on.
Domain = OpenDomain | TokenDomain


def open_lookup(
    store: Store,
    base: Base,
    plot_name: str,
    *,
    miss: str = "compute",
    overlay_windows: int = 65_536,
) -> OpenDomain:
    """Open the look-up over a PLOT of a store: the lineage of a root alone."""
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
    base_lower: LowerEncoder | None = None,
    quantization: Quantization = "none",
    device: torch.device = CPU,
    helpers: Helpers | None = None,
) -> OpenDomain:
    """Open the look-up over a domain version, as serving, fine-tuning and measuring all do it.

    `lineage` holds the folders of its versions, its own first, its root's last, relative to the store or absolute. The lower
    encoder of the first computes a miss on `device`, and the overlay remembers it for this look-up alone. Tables above a
    version without a table are not opened. `base_lower` is the base's lower encoder if it is loaded already; all domains of a
    base share its word embeddings. The encoders are packed here and serve look-ups alone from then on (see
    `lower_layers.pack`). With `quantization` int8 their products are in int8.
    Raises MissingArtifactError, CorruptArtifactError, WrongBaseError, StoreUnavailableError or ConfigError. A whole base has
    nothing to look up: it is refused, and `open_features` takes it.
    """
    lowers.check_hierarchical(base.config)
    folders = [store.root / path for path in lineage]
    with_branch, root = domain_version.searched(folders)
    if miss != "compute" and root is None:
        without = folders[len(with_branch)]
        raise ConfigError(
            f"version {without.name} of domain {without.parent.name!r} has no table, so its n-grams cannot be answered with "
            f"miss {miss}: set miss to compute (`hplm build export --models MODELS --keep-settings --name NAME "
            "--miss compute`), or build a version with a table (`hplm domain update NAME --base BASE --corpus FILE --top 10`)"
        )
    overlay_windows = overlay_windows if miss == "compute" else 0
    dtype = dtype or choose_dtype("auto", device)
    lower = lowers.of_lineage(store, base, lineage, base_lower=base_lower, verify=verify) if miss == "compute" else None
    if lower is not None:
        lower.to(device)
        lowers.pack(lower, dtype, base if quantization == "int8" else None)
    folders_of_tables = [folder / "branch" for folder in with_branch]
    if root is not None:
        folders_of_tables += [root / level for level in levels(base.config.window)]
    opened: list[PlotTable] = []
    room = None
    if folders_of_tables:
        opened, room = tables.load_together(
            folders_of_tables,
            fingerprint=base.fingerprint,
            verify=verify,
            spare_vectors=overlay_windows * base.config.vectors_per_ngram,
        )
    if lower is None and not len(opened[-1].keys):
        raise ConfigError("the domain has no unigrams to back off to, as in a generated fleet: set miss to compute")
    branches, of_root = opened[: len(with_branch)], opened[len(with_branch) :]
    named = [replace(table, name=f"domain:{table.name}") if table.name in LEVELS else table for table in branches]
    return OpenDomain(
        base.config,
        [*named, *of_root[:1]],
        of_root[1:],
        lower,
        overlay_windows=overlay_windows,
        room=room,
        dtype=dtype,
        helpers=helpers,
    )


def open_features(
    store: Store,
    base: Base,
    lineage: Sequence[Path | str],
    *,
    miss: str = "compute",
    quantization: Quantization = "none",
    device: torch.device = CPU,
) -> Domain:
    """Open a domain version of either kind of base for training and measuring, as `open_lineage` does."""
    if base.config.is_whole:
        return TokenDomain(base.config)
    return open_lineage(store, base, lineage, miss=miss, quantization=quantization, device=device)


# Path, size and time of change of each file.
FilesState = tuple[tuple[str, int, int], ...]


def files_state(folder: Path) -> FilesState:
    """Return a state that differs after a file of the domain version was replaced or written to. Raises OSError."""
    paths = sorted(path for path in folder.rglob("*") if not path.name.startswith(".") and path.is_file())
    stats = ((path, path.stat()) for path in paths)
    return tuple((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats)


def verify_domain(folder: Path) -> None:
    """Check all files of a domain version. Raises MissingArtifactError or CorruptArtifactError."""
    if not folder.is_dir():
        raise MissingArtifactError(f"no domain version in {folder}: `hplm store verify` tells what is lost")
    for part in sorted(path for path in folder.iterdir() if not path.name.startswith(".")):
        artifact.read(part, domain_version.LOWER_KIND if part.name == "lower" else tables.KIND).verify()


def gather(lookup_plan: LookupPlan) -> Tensor:
    """Carry out a plan: float16 `[N, H]`, one `embedding_bag` over its memory, or a copy where a token has one vector."""
    counts = np.diff(lookup_plan.offsets)
    if len(lookup_plan.flat) == len(counts):
        return torch.from_numpy(lookup_plan.memory).index_select(0, torch.from_numpy(lookup_plan.flat))
    return F.embedding_bag(
        torch.from_numpy(lookup_plan.flat),
        torch.from_numpy(lookup_plan.memory),
        torch.from_numpy(lookup_plan.offsets),
        mode="sum",
        per_sample_weights=torch.from_numpy(np.repeat((1.0 / counts).astype(np.float16), counts)),
        include_last_offset=True,
    )
