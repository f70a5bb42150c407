"""Many tenants in one file: a fleet that opens in milliseconds and loads a tenant with one read.

An artifact of three files: `adapters.bin` (bfloat16 `[tenants, L, P]`, each layer contiguous, see `packed`), `heads.bin`
(float32, one after another) and `cards.jsonl` (a line a tenant: its card, where its head starts, and the checksum over
its card, adapter and head).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hplm.adapters.packed import PackedAdapter, packed_width, to_bfloat16
from hplm.adapters.tenant import Head, Tenant, TenantCard, card_meta, check_name, parse_card
from hplm.errors import ConfigError, CorruptArtifactError, WrongBaseError
from hplm.store import artifact

KIND = "bank"
LAYOUT = "transposed"  # of PackedAdapter; another one would be read without an error


@dataclass(frozen=True)
class _Entry:
    """A line of `cards.jsonl`: the tenant's number in `adapters.bin`, its card, its first number in `heads.bin`.

    A head is its weight, its bias, and where the card says so its transitions.
    """

    row: int
    card: dict[str, Any]
    head_start: int
    sha256: str


class BankFile:
    """A bank on disk, memory-mapped. Raises MissingArtifactError, CorruptArtifactError or WrongBaseError."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        stored = artifact.read(folder, KIND)
        self.folder = folder
        meta = stored.meta
        try:
            if meta["layout"] != LAYOUT:
                raise CorruptArtifactError(f"{folder} has adapters laid out as {meta['layout']!r}: build it again")
            if meta["base"] != fingerprint:
                raise WrongBaseError(f"{folder} was made over base {meta['base']}, this base is {fingerprint}")
            layers, self._hidden, self._reduced = meta["layers"], meta["hidden_size"], meta["reduced_size"]
            width = packed_width(self._hidden, self._reduced)
            shape = (meta["tenants"], layers, width)
            self._adapters = _mapped(stored.path("adapters.bin"), np.dtype(np.uint16)).reshape(shape)
            self._heads = _mapped(stored.path("heads.bin"), np.dtype(np.float32))
            self._verified: set[str] = set()
            self._entries: dict[str, _Entry] = {}
            for row, line in enumerate(stored.read_bytes("cards.jsonl", verify=True).splitlines()):
                values = json.loads(line)
                card = values["card"]
                self._entries[card["name"]] = _Entry(row, card, values["head_start"], values["sha256"])
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise CorruptArtifactError(f"{folder} is not a whole bank ({error!r}); build it again") from error

    @property
    def names(self) -> list[str]:
        """In the order of the file."""
        return list(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def card(self, name: str) -> TenantCard:
        """One tenant's card. Raises CorruptArtifactError."""
        return parse_card(self._entries[name].card, f"{self.folder}: {name}")

    def load(self, name: str, *, verify: bool = True) -> Tenant:
        """One tenant, its weights where the page cache has them. Raises CorruptArtifactError.

        Checked when first asked for: a published bank is never written again.
        """
        entry = self._entries[name]
        card = self.card(name)
        labels = len(card.labels)
        size = labels * (self._hidden + 1 + (1 + labels if card.transitions else 0))
        packed = np.asarray(self._adapters[entry.row])
        head = np.asarray(self._heads[entry.head_start : entry.head_start + size])
        unchecked = verify and name not in self._verified
        if len(head) != size or (unchecked and _digest(entry.card, packed, head) != entry.sha256):
            raise CorruptArtifactError(f"{self.folder}: the weights of {name} do not match their checksum")
        self._verified.add(name)
        weight, bias, transitions = np.split(head, (labels * self._hidden, labels * (self._hidden + 1)))
        moves = transitions.reshape(1 + labels, labels) if card.transitions else None
        parts = Head(weight.reshape(labels, self._hidden), bias, moves)
        return Tenant(card, PackedAdapter(packed, self._hidden, self._reduced), parts, entry.sha256[:16])


def write(folder: Path, base: str, tenants: Iterable[Tenant]) -> int:
    """Publish a bank of tenants, which may come one by one from a generator; returns how many there were.

    All must be of base `base` (its fingerprint) with adapters of one size, under different names.
    """
    meta: dict[str, Any] = {"base": base, "layout": LAYOUT}
    seen: set[str] = set()
    with artifact.publish(folder, KIND, meta) as partial:
        head_start = 0
        with (
            (partial / "adapters.bin").open("wb") as adapters,
            (partial / "heads.bin").open("wb") as heads,
            (partial / "cards.jsonl").open("w") as cards,
        ):
            for tenant in tenants:
                packed, name = tenant.packed, check_name(tenant.card.name)
                shape = {
                    "layers": len(packed.weights),
                    "hidden_size": packed.hidden_size,
                    "reduced_size": packed.reduced_size,
                }
                if tenant.card.base != base or name in seen or (seen and meta | shape != meta):
                    raise ConfigError(f"tenant {name} does not fit the bank: another base, size, or the name again")
                meta.update(shape)
                seen.add(name)
                weights = packed.weights if packed.weights.dtype == np.uint16 else to_bfloat16(packed.weights)
                head = np.concatenate([array.ravel() for array in tenant.head.arrays.values()]).astype(np.float32)
                adapters.write(weights.tobytes())
                heads.write(head.tobytes())
                card = json.loads(json.dumps(card_meta(tenant.card)))
                line = {"card": card, "head_start": head_start, "sha256": _digest(card, weights, head)}
                cards.write(json.dumps(line) + "\n")
                head_start += len(head)
        if not seen:
            raise ConfigError("a bank needs at least one tenant")
        meta["tenants"] = len(seen)
    return len(seen)


def _digest(card: dict[str, Any], packed: npt.NDArray[Any], head: npt.NDArray[np.float32]) -> str:
    digest = hashlib.sha256(json.dumps(card, sort_keys=True).encode())
    digest.update(packed.data)
    digest.update(head.data)
    return digest.hexdigest()


def _mapped(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The file, read on demand into the page cache. Copy-on-write, though nobody writes: torch warns of what is read-only."""
    if not os.path.getsize(path):
        raise ValueError(f"{path.name} is empty")
    return np.memmap(path, dtype=dtype, mode="c")
