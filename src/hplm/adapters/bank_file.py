"""Many tenants in one file: a fleet that opens in milliseconds and loads a tenant with one read.

An artifact of three files. `adapters.bin` holds bfloat16 `[adapters, L, P]`, each layer contiguous, see `packed`: each tenant's
adapter, or those of its students. `heads.bin` holds the heads in float32, one after another. `cards.jsonl` has a line for each
tenant: its card, its students' alphas and scores, where its head starts, and the checksum over card, adapters and head. The
checksum is XXH3, which takes a thirtieth of SHA-256's time, because a tenant is checked each time it is loaded.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from hplm.adapters.buffers import Buffers
from hplm.adapters.packed import PackedAdapter, packed_width, to_bfloat16
from hplm.adapters.students import Students, check_alphas
from hplm.adapters.tenant import Head, Tenant, TenantCard, card_meta, parse_card
from hplm.core.names import check_name
from hplm.errors import ConfigError, CorruptArtifactError, WrongBaseError
from hplm.store import artifact

KIND = "bank"
LAYOUT = "transposed"  # of PackedAdapter's matrices; another layout has the same sizes, so it is refused by name
# The layout of a bank in which a tenant has students: a server that knows none would look for adapters in the wrong rows.
LAYOUT_WITH_STUDENTS = "transposed, students"


@dataclass(frozen=True)
class _Entry:
    """A line of `cards.jsonl`: the tenant's first row in `adapters.bin`, the line itself, its first number in `heads.bin`.

    The line is kept as text: parsed cards, with their curves and confusions, take three times the memory.
    A head is its weight, its bias, and its transitions if the card has them.
    """

    row: int
    line: bytes
    head_start: int
    xxh3_128: str

    @property
    def card(self) -> dict[str, Any]:
        """The card's values, as `hplm.adapters.tenant.card_meta` writes them."""
        return json.loads(self.line)["card"]

    @property
    def students(self) -> dict[str, list[float]] | None:
        """The alphas and the scores of the students, None for an ordinary tenant."""
        return json.loads(self.line).get("students")


class BankFile:
    """A bank on disk with its two large files open.

    The files are read, not mapped. A mapped file that is cut short kills the whole process, and a mapped file that changes
    after its check is served. As long as a BankFile lives, its files' bytes stay on the disk.
    Raises MissingArtifactError, CorruptArtifactError, WrongBaseError, or OSError if the system cannot open a file.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        stored = artifact.read(folder, KIND)
        self.folder = folder
        meta = stored.meta
        files = ExitStack()
        weakref.finalize(self, files.close)
        try:
            if meta["layout"] not in (LAYOUT, LAYOUT_WITH_STUDENTS):
                raise CorruptArtifactError(f"{folder} has adapters laid out as {meta['layout']!r}: build it again")
            if meta["base"] != fingerprint:
                raise WrongBaseError(f"{folder} was made over base {meta['base']}, this base is {fingerprint}")
            layers, self._hidden, self._reduced = meta["layers"], meta["hidden_size"], meta["reduced_size"]
            self._buffers = Buffers((layers, packed_width(self._hidden, self._reduced)), np.uint16)
            self._adapters, self._heads = (_opened(stored, name, files) for name in ("adapters.bin", "heads.bin"))
            self._entries: dict[str, _Entry] = {}
            row = 0
            for line in stored.read_bytes("cards.jsonl", verify=True).splitlines():
                values = json.loads(line)
                self._entries[values["card"]["name"]] = _Entry(row, line, values["head_start"], values["xxh3_128"])
                row += values["card"].get("students", 1)
        except BaseException as error:
            # Closed now: the error's traceback would keep the files open.
            files.close()
            if isinstance(error, KeyError | TypeError | ValueError | FileNotFoundError):
                raise CorruptArtifactError(f"{folder} is not a whole bank ({error!r}); build it again") from error
            raise

    @property
    def names(self) -> list[str]:
        """Names of the tenants, in the order of the file."""
        return list(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def card(self, name: str) -> TenantCard:
        """Return a tenant's card. Raises CorruptArtifactError."""
        return parse_card(self._entry(name).card, f"{self.folder}: {name}")

    def load(self, name: str, *, verify: bool = True) -> Tenant:
        """Read a tenant from the disk or the page cache. Raises CorruptArtifactError, or OSError if the disk fails."""
        entry = self._entry(name)
        meta = entry.card
        card = parse_card(meta, f"{self.folder}: {name}")
        labels, outputs = len(card.labels), card.outputs
        size = outputs * (self._hidden + 1) + (labels * (1 + labels) if card.transitions else 0)
        adapters, head = [self._buffers.take() for _ in range(card.students)], np.empty(size, np.float32)
        is_whole = all(_fill(one, self._adapters, row * one.nbytes) for row, one in enumerate(adapters, entry.row))
        is_whole = is_whole and _fill(head, self._heads, entry.head_start * head.itemsize)
        if not is_whole or (verify and _digest(meta, entry.students, adapters, head) != entry.xxh3_128):
            raise CorruptArtifactError(f"{self.folder}: the weights of {name} do not match their checksum")
        weight, bias, transitions = np.split(head, (outputs * self._hidden, outputs * (self._hidden + 1)))
        moves = transitions.reshape(1 + labels, labels) if card.transitions else None
        parts = Head(weight.reshape(outputs, self._hidden), bias, moves)
        packed = tuple(PackedAdapter(one, self._hidden, self._reduced) for one in adapters)
        students = None if card.is_ordinary else self._students(card, entry.students, packed)
        return Tenant(card, packed[0], parts, entry.xxh3_128[:16], students)

    def _students(
        self, card: TenantCard, values: dict[str, list[float]] | None, packed: tuple[PackedAdapter, ...]
    ) -> Students:
        """Return the students of a line's `values`. Raises CorruptArtifactError."""
        try:
            if values is None or card.student_form != "shared":
                raise ValueError(f"students of the form {card.student_form}: {values!r}")
            alphas = np.array(values["alphas"], np.float32)
            check_alphas(alphas, card.students)
            return Students(alphas, packed, None, tuple(map(float, values["scores"])))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptArtifactError(f"{self.folder}: {card.name}: not a tenant's students ({error!r})") from error

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise CorruptArtifactError(f"{self.folder} does not hold tenant {name}")
        return self._entries[name]


def write(folder: Path, base: str, tenants: Iterable[Tenant]) -> int:
    """Publish a bank of tenants, which may come one by one from a generator; return how many came.

    All must have base `base`, a fingerprint, adapters of one size, and different names. Tenants may have students, in different
    numbers. Raises ConfigError otherwise, and for students of the form `own`: a tenant with own layers has its own folder.
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
                if tenant.card.student_form == "own":
                    raise ConfigError(f"tenant {name} has students with own layers: publish it in a folder of its own")
                shape = {
                    "layers": len(packed.weights),
                    "hidden_size": packed.hidden_size,
                    "reduced_size": packed.reduced_size,
                }
                sizes = {(len(one.weights), one.hidden_size, one.reduced_size) for one in tenant.adapters}
                fits = len(sizes) == 1 and (not seen or meta | shape == meta)
                if tenant.card.base != base or name in seen or not fits:
                    raise ConfigError(f"tenant {name} does not fit the bank: another base, size, or the name again")
                meta.update(shape)
                seen.add(name)
                weights = [_bits(one) for one in tenant.adapters]
                head = np.concatenate([array.ravel() for array in tenant.head.arrays.values()]).astype(np.float32)
                for one in weights:
                    adapters.write(one.tobytes())
                heads.write(head.tobytes())
                card = json.loads(json.dumps(card_meta(tenant.card)))
                students = None
                if tenant.students is not None:
                    meta["layout"] = LAYOUT_WITH_STUDENTS
                    alphas, scores = tenant.students.alphas.tolist(), list(tenant.students.scores)
                    students = {"alphas": alphas, "scores": scores}
                line: dict[str, Any] = {"card": card, "head_start": head_start}
                line |= {} if students is None else {"students": students}
                line["xxh3_128"] = _digest(card, students, weights, head)
                cards.write(json.dumps(line) + "\n")
                head_start += len(head)
        if not seen:
            raise ConfigError("a bank needs at least one tenant")
        meta["tenants"] = len(seen)
    return len(seen)


def signature(folder: Path) -> tuple[int, ...]:
    """Return a signature that differs after the bank, or one of its files, was replaced. Raises OSError if there is no bank."""
    manifest, *files = (os.stat(folder / name) for name in (artifact.MANIFEST, "adapters.bin", "heads.bin"))
    # Without the files' times of change: a bank that is damaged in place still has most of its tenants.
    return manifest.st_ino, manifest.st_mtime_ns, *(file.st_ino for file in files)


def _bits(packed: PackedAdapter) -> npt.NDArray[Any]:
    return packed.weights if packed.weights.dtype == np.uint16 else to_bfloat16(packed.weights)


def _digest(
    card: dict[str, Any],
    students: dict[str, list[float]] | None,
    adapters: Sequence[npt.NDArray[Any]],
    head: npt.NDArray[np.float32],
) -> str:
    digest = xxhash.xxh3_128(json.dumps(card, sort_keys=True).encode())
    if students is not None:
        digest.update(json.dumps(students, sort_keys=True).encode())
    for weights in adapters:
        digest.update(weights.data)
    digest.update(head.data)
    return digest.hexdigest()


def _opened(stored: artifact.Artifact, name: str, files: ExitStack) -> int:
    """Open a file of a bank, to be closed with `files`. Raises ValueError if its length has changed."""
    handle = os.open(stored.path(name), os.O_RDONLY)
    files.callback(os.close, handle)
    if (file_bytes := os.fstat(handle).st_size) != stored.files[name]["bytes"]:
        raise ValueError(f"{name} has {file_bytes} bytes")
    return handle


def _fill(array: npt.NDArray[Any], handle: int, start: int) -> bool:
    """Read an array from a file, from byte `start` on; return False if the file ends before the array is full."""
    view, done = array.data.cast("B"), 0
    while done < len(view):
        if not (read_bytes := os.preadv(handle, [view[done:]], start + done)):
            return False
        done += read_bytes
    return True
