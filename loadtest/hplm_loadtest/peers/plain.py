"""A whole encoder, every layer computed: what a tenant has who shares nothing, and what tenants share who share a body."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hplm.adapters.tenant import Tenant
from hplm.core.settings import BaseConfig
from hplm.engine.encode import count_read, head_logits, places_of
from hplm.engine.kernels.adapt import UNCHANGED
from hplm.engine.kernels.onednn import can_pack
from hplm.engine.kernels.run_layers import RunLayers
from hplm.engine.kernels.scripted import scripted
from hplm.errors import ConfigError, CorruptArtifactError
from hplm.models.device import CPU
from hplm.models.layers import UpperLayers, equal_runs, layer_weights
from hplm.tasks.task import Logits

# Direct reads want blocks of the disk, vector loads want cache lines: a page is both.
ALIGNMENT = 4096
# Of a file, read while the one before is on its way to a GPU.
PIECE_BYTES = 1024 * ALIGNMENT
# Of a file: those of another are not taken for one of these.
FORMAT = 2
# Putting the matrices of BERT-base's shape into oneDNN's order takes 0.2 s in float32, 0.07 in bfloat16, and saves 1 to 20 ms
# of a batch of 1 to 16 texts (two Xeon cores, by hand): worth it for a model that stays, as one does that ran so many batches.
PACKED_FROM_BATCH = 16


@dataclass(frozen=True)
class PeerRequest:
    """One text: `ids` int64 `[T]`."""

    tenant: Tenant
    ids: npt.NDArray[np.int64]


def whole(config: BaseConfig) -> BaseConfig:
    """The shape of the model that was cut: its lower layers computed too, on top of nothing but embeddings."""
    return replace(config, upper_layers=config.window_layers + config.upper_layers)


class PlainModel(nn.Module):
    """A BERT: embeddings, then every layer over packed tokens. `config` as `whole` gives it."""

    def __init__(self, config: BaseConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.body = UpperLayers(config)

    def forward(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Packed `ids` `[N]` -> hidden states `[N, H]`."""
        hidden: Tensor = self.body(self.word_embeddings(ids).float(), lengths)
        return hidden


def seeded_model(config: BaseConfig, seed: int) -> PlainModel:
    """Weights as BERT is initialised, in fp32: another seed is another fine-tuned model."""
    torch.manual_seed(seed)
    model = PlainModel(config)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    return model.eval()


def stored_as(model: PlainModel, dtype: torch.dtype) -> PlainModel:
    """Layers and word embeddings in `dtype`, what is between them in fp32, as hBERT's upper stage computes."""
    model.body.layers.to(dtype)
    model.word_embeddings.to(dtype)
    return model.eval()


@dataclass(frozen=True)
class _Part:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    length: int


def _layout(model: PlainModel) -> tuple[list[_Part], int]:
    """Where each weight lies in a file, and how many bytes the file has."""
    parts, end = [], 0
    for name, tensor in model.state_dict().items():
        length = tensor.numel() * tensor.element_size()
        parts.append(_Part(name, tensor.dtype, tuple(tensor.shape), end, length))
        end += -(-length // 64) * 64
    return parts, -(-end // ALIGNMENT) * ALIGNMENT


def write_flat(model: PlainModel, path: Path) -> None:
    """All weights of a model (as `stored_as` gives it) in one file of their bytes, for `FlatModel.fill`."""
    parts, total = _layout(model)
    state = model.state_dict()
    with path.open("wb") as file:
        for part in parts:
            file.seek(part.start)
            file.write(state[part.name].contiguous().view(torch.uint8).numpy().tobytes())
        file.truncate(total)


def file_bytes(config: BaseConfig, dtype: torch.dtype) -> int:
    """How large a model's file is, and its place in memory."""
    with torch.device("meta"):
        return _layout(stored_as(PlainModel(config), dtype))[1]


class _HostMemory:
    """`flat`, all bytes of a model. Its pages are there already, large ones where the system has them: the first load is as
    fast as any other.
    """

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(self._memory, dtype=np.uint8)[::ALIGNMENT] = 0
        self.flat = torch.frombuffer(self._memory, dtype=torch.uint8)

    def fill(self, handle: int) -> None:
        """Read all of an open file."""
        _read(handle, memoryview(self._memory), 0)


class _DeviceMemory:
    """`flat` on a GPU."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._way = _way_to(device)

    def fill(self, handle: int) -> None:
        """Read all of an open file; it is there when this returns."""
        self._way.bring(handle, self.flat)


class _Way:
    """To a GPU, for one file at a time: a piece is read while the one before is copied, in a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pieces = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        # Who waits for them leaves the core to others.
        self._copied = [torch.cuda.Event(blocking=True) for _ in self._pieces]

    def bring(self, handle: int, flat: Tensor) -> None:
        for number, start in enumerate(range(0, len(flat), PIECE_BYTES)):
            piece, copied = self._pieces[number % 2], self._copied[number % 2]
            size = min(PIECE_BYTES, len(flat) - start)
            copied.synchronize()
            _read(handle, piece.numpy().data[:size], start)
            with torch.cuda.stream(self._stream):
                flat[start : start + size].copy_(piece[:size], non_blocking=True)
                copied.record()
        for copied in self._copied:
            copied.synchronize()


# One for all models: one thread loads them.
_way_to = cache(_Way)


def _read(handle: int, view: memoryview, start: int) -> None:
    """What a file has from `start` on, as much as `view` holds. Raises CorruptArtifactError where it has less."""
    done = 0
    while done < len(view):
        read = os.preadv(handle, [view[done:]], start + done)
        if read == 0:
            raise CorruptArtifactError("a model's file was cut short while it was read")
        done += read


class FlatModel:
    """A model in one preallocated piece of a device's memory: another model takes its place with one read, nothing is built
    anew.

    Computed as hBERT's upper layers are (`RunLayers`), without adapters. On a CPU a model that stays is kept in oneDNN's order
    beside, in memory that no budget counts.
    """

    def __init__(self, config: BaseConfig, dtype: torch.dtype, device: torch.device = CPU) -> None:
        if config.relative_buckets:
            raise ConfigError("whole models to compare with are BERTs: none has relative positions")
        with torch.device("meta"):
            self.model = stored_as(PlainModel(config), dtype)
        parts, self.num_bytes = _layout(self.model)
        self._device = device
        self._memory = _HostMemory(self.num_bytes) if device.type == "cpu" else _DeviceMemory(self.num_bytes, device)
        flat = self._memory.flat
        state = {p.name: flat[p.start : p.start + p.length].view(p.dtype).view(p.shape) for p in parts}
        self.model.load_state_dict(state, assign=True)
        self._dtype = dtype
        self._batches = 0
        self._in_place = self._layers = self._run_layers(pack=False)

    @property
    def is_packed(self) -> bool:
        """Whether the model that is here is kept in oneDNN's order too."""
        return self._layers is not self._in_place

    def fill(self, path: Path, *, from_disk: bool = False) -> None:
        """Read a file's weights into place. Raises CorruptArtifactError."""
        handle = os.open(path, os.O_RDONLY | (os.O_DIRECT if from_disk else 0))
        try:
            found = os.fstat(handle).st_size
            if found != self.num_bytes:
                raise CorruptArtifactError(f"{path} has {found} bytes, this shape has {self.num_bytes}")
            self._memory.fill(handle)
        finally:
            os.close(handle)
        self._batches, self._layers = 0, self._in_place

    def pack(self) -> None:
        """Keep the model that is here in oneDNN's order too, where there is one, until another takes its place."""
        if can_pack(self._device, self._dtype):
            self._layers = self._run_layers(pack=True)

    def run(self, requests: Sequence[PeerRequest]) -> list[Logits]:
        """Logits of each request, packed as one batch."""
        # Texts of one length attend in one call.
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].ids))
        texts = [requests[i] for i in order]
        lengths = [len(text.ids) for text in texts]
        self._batches += 1
        if self._batches == PACKED_FROM_BATCH and not self.is_packed:
            self.pack()
        with torch.inference_mode():
            ids = torch.from_numpy(np.concatenate([text.ids for text in texts])).to(self._device)
            counts = [count_read(text.tenant, len(text.ids)) for text in texts]
            found = head_logits([text.tenant for text in texts], counts, self._hidden(ids, lengths, counts))
        answers = dict(zip(order, found, strict=True))
        return [answers[index] for index in range(len(requests))]

    def _hidden(self, ids: Tensor, lengths: Sequence[int], counts: Sequence[int]) -> Tensor:
        """As `self.model(ids, lengths)`, of each text the first `counts` that its head reads: `[sum of counts, H]`."""
        embedded = self.model.word_embeddings(ids).float()
        positions = places_of([0] * len(lengths), lengths).to(self._device)
        state = self.model.body.embed(embedded, positions).to(self._dtype)
        runs = equal_runs(lengths)
        read = None
        if sum(counts) < sum(lengths):
            read = places_of(np.cumsum([0, *lengths[:-1]]).tolist(), counts).to(self._device)
        sizes, rows = [length for _, length in runs], [count for count, _ in runs]
        self._layers.begin(state, rows, sizes, None, UNCHANGED, UNCHANGED, read, UNCHANGED)
        try:
            self._layers(0, len(self.model.body.layers))
        finally:
            state = self._layers.end()
        return state

    def _run_layers(self, *, pack: bool) -> Any:
        config, body = self.model.body.config, self.model.body
        weights = [layer_weights(layer) for layer in body.layers]
        no_adapters = [torch.zeros(len(weights), 1)]
        return scripted(RunLayers(weights, no_adapters, config.layer_norm_eps, config.num_heads, None, pack=pack))
