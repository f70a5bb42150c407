"""One PLOT table on disk: sorted keys and the gated vectors of each n-gram, memory-mapped.

Files of the artifact: `keys.u64` `[rows]` sorted, `values.f16` `[rows, vectors_per_ngram, H]`, and, if keys are hashes,
`grams.u32` `[rows, size]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hplm.core.settings import BaseConfig
from hplm.errors import CorruptArtifactError, WrongBaseError, unusable
from hplm.plot import keys as key_codec
from hplm.plot.arena import Arena, Vectors
from hplm.plot.ngrams import vectors_of
from hplm.store import artifact

KIND = "plot-table"
Rows = npt.NDArray[np.int64]
Values = npt.NDArray[np.float16]


def row_bytes(config: BaseConfig, hidden_size: int | None = None) -> int:
    """Return the bytes of a whole n-gram on disk. `hidden_size`: of a base of another width than `config`'s."""
    ids = 0 if key_codec.fits(config.window, config.vocab_size) else 4 * config.window
    return 8 + ids + 2 * config.vectors_per_ngram * (hidden_size or config.hidden_size)


@dataclass(frozen=True)
class Spare:
    """Free room in a memory, from vector `first` on."""

    memory: Vectors
    first: int


@dataclass(frozen=True)
class PlotTable:
    """An open table of n-grams of `size` tokens, with `vectors_per_ngram` vectors each.

    `memory` `[V, H]` is mapped: pages are read when they are touched, and all processes share them. Vector i of row r is
    `memory[first + r * vectors_per_ngram + i]`. Several tables may lie in one memory.
    """

    name: str
    size: int
    vectors_per_ngram: int
    vocab_size: int
    keys: key_codec.Keys
    memory: Vectors
    first: int
    grams: npt.NDArray[np.uint32] | None

    @property
    def values(self) -> Values:
        """The vectors by row: `[rows, vectors_per_ngram, H]`."""
        vectors = self.memory[self.first : self.first + len(self.keys) * self.vectors_per_ngram]
        return vectors.reshape(len(self.keys), self.vectors_per_ngram, -1)

    def ngrams(self) -> npt.NDArray[np.int64]:
        """Return the n-grams `[rows, size]`, in the order of the rows."""
        if self.grams is not None:
            return self.grams.astype(np.int64)
        return key_codec.unpack(self.keys, self.size, self.vocab_size)

    def find(self, grams: npt.NDArray[np.int64], which: Rows, keys: key_codec.Keys) -> Rows:
        """Return the rows `[K]` of the n-grams `grams[which]`, -1 for an n-gram that the table lacks.

        `keys` `[K]` are those n-grams' keys; sorted keys are found faster.
        """
        if not len(self.keys):
            return np.full(len(keys), -1, dtype=np.int64)
        rows = np.searchsorted(self.keys, keys)
        rows[rows == len(self.keys)] = 0
        hit = self.keys[rows] == keys
        if self.grams is not None:
            hit &= (self.grams[rows] == grams[which]).all(axis=1)
        return np.where(hit, rows, -1)


def sort_grams(grams: npt.NDArray[np.int64], vocab_size: int) -> npt.NDArray[np.int64]:
    """Return the n-grams in the order of their keys, as `write` takes them.

    If two n-grams have one hash, the earlier one stays, so pass the most frequent first. The other becomes a miss.
    """
    _, first = np.unique(key_codec.pack(grams, vocab_size), return_index=True)
    return grams[first]


def write(
    folder: Path,
    name: str,
    grams: npt.NDArray[np.int64],
    chunks: Iterable[Values],
    *,
    config: BaseConfig,
    fingerprint: str,
    meta: dict[str, Any] | None = None,
) -> None:
    """Publish a table of `grams` `[rows, size]`, as `sort_grams` gives them, for a base of shape `config`.

    `chunks` hold the values one after another: `[any, vectors_of(size, config), H]`.
    """
    rows, size = grams.shape
    keys = key_codec.pack(grams, config.vocab_size)
    assert bool(np.all(keys[1:] > keys[:-1])), "grams must come from sort_grams"
    vectors_per_ngram = vectors_of(size, config)
    manifest = {
        "name": name,
        "rows": rows,
        "size": size,
        "vectors_per_ngram": vectors_per_ngram,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "dtype": "float16",
        "keys": "packed" if key_codec.fits(size, config.vocab_size) else "hashed",
        "base": fingerprint,
        "lower_form": config.lower_form,
        "window": config.window,
        **(meta or {}),
    }
    with artifact.publish(folder, KIND, manifest) as partial:
        _write(partial / "keys.u64", [keys])
        if manifest["keys"] == "hashed":
            _write(partial / "grams.u32", [grams.astype(np.uint32)])
        written = _write(partial / "values.f16", (_as_stored(chunk, vectors_per_ngram, config) for chunk in chunks))
        assert written == rows, f"{written} values for {rows} keys"


def _as_stored(chunk: npt.NDArray[Any], vectors_per_ngram: int, config: BaseConfig) -> Values:
    assert chunk.shape[1:] == (vectors_per_ngram, config.hidden_size), chunk.shape
    return chunk.astype(np.float16, copy=False)


def _write(path: Path, arrays: Iterable[npt.NDArray[Any]]) -> int:
    """Write arrays one after another and return their rows. numpy's `tofile` would not say that a disk is full."""
    rows = 0
    with path.open("wb") as file:
        for array in arrays:
            file.write(np.ascontiguousarray(array).data)
            rows += len(array)
    return rows


def load(folder: Path, *, fingerprint: str, verify: bool = True) -> PlotTable:
    """Open a table of the base with `fingerprint`.

    Raises MissingArtifactError, CorruptArtifactError (cut short, flipped bytes), WrongBaseError or StoreUnavailableError.
    """
    return load_together([folder], fingerprint=fingerprint, verify=verify)[0][0]


def load_together(
    folders: Sequence[Path], *, fingerprint: str, verify: bool = True, spare_vectors: int = 0
) -> tuple[list[PlotTable], Spare]:
    """Open tables in one memory, with free room behind them for `spare_vectors` vectors. Raises as `load` does."""
    stored = [_read(folder, fingerprint, verify) for folder in folders]
    hidden = stored[0].hidden_size
    for table in stored:
        if table.hidden_size != hidden:
            raise CorruptArtifactError(
                f"{table.values.parent} has vectors of {table.hidden_size} numbers, {folders[0]} of {hidden}; build it again"
            )
    with ExitStack() as stack:
        try:
            files = [(stack.enter_context(table.values.open("rb")).fileno(), table.vectors) for table in stored]
            arena = Arena.of(files, spare_vectors, hidden)
        except OSError as error:
            raise unusable(f"{folders[0]} cannot be mapped", error) from error
    opened = [
        PlotTable(
            table.name,
            table.size,
            table.vectors_per_ngram,
            table.vocab_size,
            table.keys,
            arena.vectors,
            start,
            table.grams,
        )
        for table, start in zip(stored, arena.starts, strict=True)
    ]
    return opened, Spare(arena.vectors, arena.spare)


@dataclass(frozen=True)
class _Stored:
    """A table's files, values not mapped yet."""

    name: str
    rows: int
    size: int
    vectors_per_ngram: int
    hidden_size: int
    vocab_size: int
    keys: key_codec.Keys
    grams: npt.NDArray[np.uint32] | None
    values: Path

    @property
    def vectors(self) -> int:
        return self.rows * self.vectors_per_ngram


def _read(folder: Path, fingerprint: str, verify: bool) -> _Stored:
    stored = artifact.read(folder, KIND)
    meta = stored.meta
    if meta.get("base") != fingerprint:
        raise WrongBaseError(
            f"{folder} was built for base {meta.get('base')}, this base is {fingerprint}: build the table again with "
            f"`hplm build plot --base BASE --plot PLOT`. It holds vectors of form {meta.get('lower_form')!r} for "
            f"n-grams of {meta.get('window')} tokens"
        )
    if verify:
        stored.verify()
    try:
        rows, size, vectors, hidden = (int(meta[key]) for key in ("rows", "size", "vectors_per_ngram", "hidden_size"))
        keys = _map(stored.path("keys.u64"), np.uint64, (rows,))
        grams = _map(stored.path("grams.u32"), np.uint32, (rows, size)) if meta["keys"] == "hashed" else None
        values = stored.path("values.f16")
        if (file_bytes := values.stat().st_size) < (wanted := 2 * rows * vectors * hidden):
            raise ValueError(f"{values.name} has {file_bytes} bytes of {wanted}")
        return _Stored(meta["name"], rows, size, vectors, hidden, int(meta["vocab_size"]), keys, grams, values)
    except OSError as error:
        raise unusable(f"{folder} cannot be mapped", error) from error
    except (KeyError, ValueError) as error:
        raise CorruptArtifactError(f"{folder} cannot be mapped ({error}); build it again") from error


def _map(path: Path, dtype: Any, shape: tuple[int, ...]) -> Any:
    return np.zeros(shape, dtype=dtype) if 0 in shape else np.memmap(path, dtype=dtype, mode="r", shape=shape)
