"""A whole encoder that computes every layer: the model of one tenant, or the body that all tenants share."""

from __future__ import annotations

import mmap
import os
import zlib
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
from hplm.errors import ConfigError, CorruptArtifactError, MissingArtifactError
from hplm.models.device import CPU
from hplm.models.layers import UpperLayers, equal_runs, layer_weights
from hplm.tasks.task import Logits

# Bytes of a page. Direct reads need whole disk blocks and vector loads need whole cache lines; a page has both.
ALIGNMENT = 4096
# Bytes of a piece of a file. One piece is read while the piece before is copied to a GPU.
PIECE_BYTES = 1024 * ALIGNMENT
FORMAT = 2  # version of the files, part of the folder's name so that files of another version are not used
# A model is packed in oneDNN's order from this batch on. Packing BERT-base takes 0.2 s in float32 and 0.07 s in bfloat16, and
# saves 1 to 20 ms in a batch of 1 to 16 texts (two Xeon cores, measured once). So packing only pays for a model that stays.
PACKED_FROM_BATCH = 16


@dataclass(frozen=True)
class PeerRequest:
    """A request of one text: `ids` int64 `[T]`."""

    tenant: Tenant
    ids: npt.NDArray[np.int64]


def whole_config(config: BaseConfig) -> BaseConfig:
    """Return the shape of the whole model: the layers that PLOT replaces are computed too, from the embeddings on."""
    return replace(config, upper_layers=config.original_layers)


class WholeModel(nn.Module):
    """A BERT: embeddings, then every layer over packed tokens. `config` comes from `whole_config`."""

    def __init__(self, config: BaseConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.body = UpperLayers(config)

    def forward(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the hidden states `[N, H]` of packed `ids` `[N]`."""
        hidden: Tensor = self.body(self.word_embeddings(ids).float(), lengths)
        return hidden


def make_seeded_model(config: BaseConfig, seed: int) -> WholeModel:
    """Return a model with BERT's initial weights in fp32. Each seed stands for another fine-tuned model."""
    torch.manual_seed(seed)
    model = WholeModel(config)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    return model.eval()


def stored_as(model: WholeModel, dtype: torch.dtype) -> WholeModel:
    """Cast the layers and word embeddings to `dtype`. The rest stays in fp32, as in hBERT's encode stage."""
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


def _layout(model: WholeModel) -> tuple[list[_Part], int]:
    """Return the position of each weight in a file, and the bytes of the file."""
    parts, end = [], 0
    for name, tensor in model.state_dict().items():
        length = tensor.numel() * tensor.element_size()
        parts.append(_Part(name, tensor.dtype, tuple(tensor.shape), end, length))
        end += -(-length // 64) * 64
    return parts, -(-end // ALIGNMENT) * ALIGNMENT


def write_model(model: WholeModel, path: Path) -> None:
    """Write the bytes of all weights of a model from `stored_as` to one file, for `PreallocatedModel.fill`."""
    parts, total = _layout(model)
    state = model.state_dict()
    with path.open("wb") as file:
        for part in parts:
            file.seek(part.start)
            file.write(state[part.name].contiguous().view(torch.uint8).numpy().tobytes())
        file.truncate(total)


def model_files(folder: Path) -> list[Path]:
    """Return the model files of a folder, sorted. Raises MissingArtifactError if there are none."""
    files = sorted([*folder.glob("model-*.bin"), *folder.glob("model-*.onnx")])
    if not files:
        raise MissingArtifactError(f"no models in {folder}; the benchmark that serves them writes them")
    return files


def model_file_of(tenant: str, files: list[Path]) -> Path:
    """Return the file of a tenant's model. Tenants with consecutive numbers at the end of their names get different files."""
    digits = tenant[len(tenant.rstrip("0123456789")) :]
    return files[(int(digits) if digits else zlib.crc32(tenant.encode())) % len(files)]


def file_bytes(config: BaseConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a model in a file and in memory."""
    with torch.device("meta"):
        return _layout(stored_as(WholeModel(config), dtype))[1]


def _host_memory(num_bytes: int) -> Tensor:
    """Return memory for all bytes of a model.

    Every page is touched, and pages are large if the system has such pages, so that the first load is as fast as later loads.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    flat[::ALIGNMENT] = 0
    return flat


class _DeviceLoader:
    """A loader of files to a GPU: it reads one piece while a stream of its own copies the piece before."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pieces = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        # Blocking events, so that waiting for a copy uses no core.
        self._copied = [torch.cuda.Event(blocking=True) for _ in self._pieces]

    def load(self, handle: int, flat: Tensor) -> None:
        """Load a whole file; the copy is complete when this returns. Files are loaded one at a time."""
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


# All models of a device share one loader, because one thread loads all models.
_loader_of = cache(_DeviceLoader)


def _read(handle: int, view: memoryview, start: int) -> None:
    """Fill `view` from a file, from the byte `start` on. Raises CorruptArtifactError if the file is too short."""
    done = 0
    while done < len(view):
        read = os.preadv(handle, [view[done:]], start + done)
        if read == 0:
            raise CorruptArtifactError("a model's file was cut short while it was read")
        done += read


class PreallocatedModel:
    """A model in one preallocated block of a device's memory, which one read fills with another model.

    The model computes as hBERT's upper layers (`RunLayers`), without adapters. On a CPU, a model that stays also has a packed
    copy in oneDNN's order; no memory budget counts the copy.
    """

    def __init__(self, config: BaseConfig, dtype: torch.dtype, device: torch.device = CPU) -> None:
        if config.relative_buckets:
            raise ConfigError(
                "the peers' whole models are BERTs, and this base has relative positions: take a BERT as base"
            )
        with torch.device("meta"):
            self.model = stored_as(WholeModel(config), dtype)
        parts, self.num_bytes = _layout(self.model)
        self._device = device
        if device.type == "cpu":
            self._flat = _host_memory(self.num_bytes)
        else:
            self._flat = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        state = {p.name: self._flat[p.start : p.start + p.length].view(p.dtype).view(p.shape) for p in parts}
        self.model.load_state_dict(state, assign=True)
        self._dtype = dtype
        self._batches = 0
        self._in_place = self._layers = self._run_layers(pack=False)

    @property
    def is_packed(self) -> bool:
        """Return whether the model has a packed copy."""
        return self._layers is not self._in_place

    def fill(self, path: Path) -> None:
        """Read another model's file into the memory. Raises CorruptArtifactError."""
        handle = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(handle).st_size
            if size != self.num_bytes:
                raise CorruptArtifactError(f"{path} has {size} bytes, a model of this shape has {self.num_bytes}")
            if self._device.type == "cpu":
                _read(handle, self._flat.numpy().data, 0)
            else:
                _loader_of(self._device).load(handle, self._flat)
        finally:
            os.close(handle)
        self._batches, self._layers = 0, self._in_place

    def pack(self) -> None:
        """Make a packed copy in oneDNN's order, which is used until the next `fill`; do nothing if oneDNN cannot pack."""
        if can_pack(self._device, self._dtype):
            self._layers = self._run_layers(pack=True)

    def run(self, requests: Sequence[PeerRequest]) -> list[Logits]:
        """Return the logits of each request, computed as one packed batch."""
        # Sorted by length, because texts of equal length share one attention call.
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].ids))
        texts = [requests[i] for i in order]
        lengths = [len(text.ids) for text in texts]
        self._batches += 1
        if self._batches == PACKED_FROM_BATCH and not self.is_packed:
            self.pack()
        with torch.inference_mode():
            ids = torch.from_numpy(np.concatenate([text.ids for text in texts])).to(self._device)
            counts = [count_read(text.tenant, len(text.ids)) for text in texts]
            logits = head_logits([text.tenant for text in texts], counts, self._hidden(ids, lengths, counts))
        logits_by_index = dict(zip(order, logits, strict=True))
        return [logits_by_index[index] for index in range(len(requests))]

    def _hidden(self, ids: Tensor, lengths: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Return the hidden states of the first `counts` tokens of each text, which its head reads: `[sum of counts, H]`."""
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
