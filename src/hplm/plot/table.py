"""One PLOT table on disk: sorted keys and the gated vectors of each n-gram, memory-mapped.

Files of the artifact: `keys.u64` `[rows]` sorted, `values.f16` `[rows, size, H]`, and `grams.u32` `[rows, size]` where
keys are hashes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hplm.errors import CorruptArtifactError, WrongBaseError
from hplm.plot import keys as key_codec
from hplm.store import artifact

KIND = "plot-table"
Rows = npt.NDArray[np.int64]
Values = npt.NDArray[np.float16]


@dataclass(frozen=True)
class PlotTable:
    """An open table. `values` is mapped: pages come in as they are touched and are shared by all processes."""

    name: str
    size: int
    vocab_size: int
    keys: key_codec.Keys
    values: Values
    grams: npt.NDArray[np.uint32] | None

    def find(self, grams: npt.NDArray[np.int64]) -> Rows:
        """Row of each n-gram `[W, size]`, -1 where the table lacks it: `[W]`."""
        if not len(self.keys):
            return np.full(len(grams), -1, dtype=np.int64)
        wanted = key_codec.pack(grams, self.vocab_size)
        rows = np.searchsorted(self.keys, wanted)
        rows[rows == len(self.keys)] = 0
        found = self.keys[rows] == wanted
        if self.grams is not None:
            found &= (self.grams[rows] == grams).all(axis=1)
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
        found_keys.tofile(partial / "keys.u64")
        if about["keys"] == "hashed":
            grams.astype(np.uint32).tofile(partial / "grams.u32")
        written = 0
        with (partial / "values.f16").open("wb") as file:
            for chunk in chunks:
                chunk.astype(np.float16, copy=False).tofile(file)
                written += len(chunk)
        assert written == rows, f"{written} values for {rows} keys"


def load(folder: Path, *, fingerprint: str, verify: bool = True) -> PlotTable:
    """Open a table of the base with `fingerprint`.

    Raises MissingArtifactError, CorruptArtifactError (cut short, flipped bytes) or WrongBaseError.
    """
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
        vocab_size, hashed = int(meta["vocab_size"]), meta["keys"] == "hashed"
        keys = _map(stored.path("keys.u64"), np.uint64, (rows,))
        grams = _map(stored.path("grams.u32"), np.uint32, (rows, size)) if hashed else None
        values = _map(stored.path("values.f16"), np.float16, (rows, size, hidden))
    except (KeyError, ValueError, OSError) as error:
        raise CorruptArtifactError(f"{folder} cannot be mapped ({error}); build it again") from error
    return PlotTable(meta["name"], size, vocab_size, keys, values, grams)


def _map(path: Path, dtype: Any, shape: tuple[int, ...]) -> Any:
    if 0 in shape:
        return np.zeros(shape, dtype=dtype)
    # Copy-on-write, though nobody writes: torch warns about tensors over read-only memory. Pages stay shared.
    return np.memmap(path, dtype=dtype, mode="c", shape=shape)
