"""One PLOT table on disk: sorted keys and the gated vectors of each n-gram, memory-mapped.

Files of the artifact: `keys.u64` `[rows]` sorted, `values.f16` `[rows, size, H]`, and `grams.u32` `[rows, size]` where
keys are hashes.
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
from hplm.store import artifact

KIND = "plot-table"
Rows = npt.NDArray[np.int64]
Values = npt.NDArray[np.float16]


def row_bytes(config: BaseConfig, hidden_size: int | None = None) -> int:
    """What one whole window takes on disk, of a base as wide as `config` says or of another hidden size."""
    ids = 0 if key_codec.fits(config.window, config.vocab_size) else 4 * config.window
    return 8 + ids + 2 * config.window * (hidden_size or config.hidden_size)


@dataclass(frozen=True)
class Spare:
    """Room in a memory, from vector `first` on."""

    memory: Vectors
    first: int


@dataclass(frozen=True)
class PlotTable:
    """An open table. `memory` `[V, H]` is mapped: pages come in as they are touched and are shared by all processes.

    Vector i of row r is `memory[first + r * size + i]`; several tables may lie in one memory.
    """

    name: str
    size: int
    vocab_size: int
    keys: key_codec.Keys
    memory: Vectors
    first: int
    grams: npt.NDArray[np.uint32] | None

    @property
    def values(self) -> Values:
        """The vectors by row: `[rows, size, H]`."""
        rows = self.memory[self.first : self.first + len(self.keys) * self.size]
        return rows.reshape(len(self.keys), self.size, -1)

    def ngrams(self) -> npt.NDArray[np.int64]:
        """The n-grams `[rows, size]`, in the order of the rows."""
        if self.grams is not None:
            return self.grams.astype(np.int64)
        return key_codec.unpack(self.keys, self.size, self.vocab_size)

    def find(self, grams: npt.NDArray[np.int64], which: Rows, keys: key_codec.Keys) -> Rows:
        """Rows `[K]` of the n-grams `grams[which]`, -1 where the table lacks one; `keys` are theirs, best in order."""
        if not len(self.keys):
            return np.full(len(keys), -1, dtype=np.int64)
        rows = np.searchsorted(self.keys, keys)
        rows[rows == len(self.keys)] = 0
        found = self.keys[rows] == keys
        if self.grams is not None:
            found &= (self.grams[rows] == grams[which]).all(axis=1)
        return np.where(found, rows, -1)


def sort_grams(grams: npt.NDArray[np.int64], vocab_size: int) -> npt.NDArray[np.int64]:
    """n-grams in the order of their keys, the form `write` takes.

    Of two n-grams with one hash the earlier stays (pass them most frequent first); the other backs off like any miss.
    """
    _, first = np.unique(key_codec.pack(grams, vocab_size), return_index=True)
    return grams[first]


def write(
    folder: Path,
    name: str,
    grams: npt.NDArray[np.int64],
    chunks: Iterable[Values],
    *,
    vocab_size: int,
    hidden_size: int,
    fingerprint: str,
    meta: dict[str, Any] | None = None,
) -> None:
    """Publish a table of `grams` `[rows, size]`, as `sort_grams` gives them, with values in `chunks` of `[any, size, H]`."""
    rows, size = grams.shape
    found_keys = key_codec.pack(grams, vocab_size)
    assert bool(np.all(found_keys[1:] > found_keys[:-1])), "grams must come from sort_grams"
    about = {
        "name": name,
        "rows": rows,
        "size": size,
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "dtype": "float16",
        "keys": "packed" if key_codec.fits(size, vocab_size) else "hashed",
        "base": fingerprint,
        **(meta or {}),
    }
    with artifact.publish(folder, KIND, about) as partial:
        _write(partial / "keys.u64", [found_keys])
        if about["keys"] == "hashed":
            _write(partial / "grams.u32", [grams.astype(np.uint32)])
        written = _write(partial / "values.f16", (chunk.astype(np.float16, copy=False) for chunk in chunks))
        assert written == rows, f"{written} values for {rows} keys"


def _write(path: Path, arrays: Iterable[npt.NDArray[Any]]) -> int:
    """One after another, not by numpy's `tofile`: where a disk is full its error does not say so. Returns their rows."""
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
    """Open tables in one memory, with room behind them for `spare_vectors` more. Raises as `load` does."""
    found = [_read(folder, fingerprint, verify) for folder in folders]
    hidden = found[0].hidden_size
    for one in found:
        if one.hidden_size != hidden:
            raise CorruptArtifactError(
                f"{one.values.parent} has vectors of {one.hidden_size} numbers, {folders[0]} of {hidden}; build it again"
            )
    with ExitStack() as stack:
        try:
            files = [(stack.enter_context(one.values.open("rb")).fileno(), one.rows * one.size) for one in found]
            arena = Arena.of(files, spare_vectors, hidden)
        except OSError as error:
            raise unusable(f"{folders[0]} cannot be mapped", error) from error
    opened = [
        PlotTable(one.name, one.size, one.vocab_size, one.keys, arena.vectors, start, one.grams)
        for one, start in zip(found, arena.starts, strict=True)
    ]
    return opened, Spare(arena.vectors, arena.spare)


@dataclass(frozen=True)
class _Stored:
    """A table's files, values not mapped yet."""

    name: str
    rows: int
    size: int
    hidden_size: int
    vocab_size: int
    keys: key_codec.Keys
    grams: npt.NDArray[np.uint32] | None
    values: Path


def _read(folder: Path, fingerprint: str, verify: bool) -> _Stored:
    stored = artifact.read(folder, KIND)
    meta = stored.meta
    if meta.get("base") != fingerprint:
        raise WrongBaseError(
            f"{folder} was built for base {meta.get('base')}, this base is {fingerprint}: "
            "build the table again with `hplm build plot`"
        )
    if verify:
        stored.verify()
    try:
        rows, size, hidden = int(meta["rows"]), int(meta["size"]), int(meta["hidden_size"])
        keys = _map(stored.path("keys.u64"), np.uint64, (rows,))
        grams = _map(stored.path("grams.u32"), np.uint32, (rows, size)) if meta["keys"] == "hashed" else None
        values = stored.path("values.f16")
        if (found := values.stat().st_size) < (wanted := 2 * rows * size * hidden):
            raise ValueError(f"{values.name} has {found} bytes of {wanted}")
        return _Stored(meta["name"], rows, size, hidden, int(meta["vocab_size"]), keys, grams, values)
    except OSError as error:
        raise unusable(f"{folder} cannot be mapped", error) from error
    except (KeyError, ValueError) as error:
        raise CorruptArtifactError(f"{folder} cannot be mapped ({error}); build it again") from error


def _map(path: Path, dtype: Any, shape: tuple[int, ...]) -> Any:
    return np.zeros(shape, dtype=dtype) if 0 in shape else np.memmap(path, dtype=dtype, mode="r", shape=shape)
