"""What each system does with a batch. A body has places for whole models; which model is where is the worker's business."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from hplm.adapters.tenant import Tenant
from hplm.core.settings import BaseConfig
from hplm.engine.encode import EncodeEngine, EngineRequest, count_read, head_logits
from hplm.errors import ConfigError
from hplm.tasks.task import Logits
from hplm_loadtest.peers.files import file_of, model_files
from hplm_loadtest.peers.plain import FlatModel, PeerRequest
from hplm_loadtest.peers.settings import PeerSettings, System

BODY = "body"


def without_adapter(tenant: Tenant) -> Tenant:
    """The head and the labels alone."""
    return replace(tenant, packed=replace(tenant.packed, weights=tenant.packed.weights[:0].copy()))


def in_every_layer(tenant: Tenant, layers: int) -> Tenant:
    """An adapter for all `layers`: the upper ones' again, from the top, below the cut."""
    packed = tenant.packed
    times = -(-layers // len(packed.weights))
    tiled = np.ascontiguousarray(np.tile(packed.weights, (times, 1))[-layers:])
    return replace(tenant, packed=replace(packed, weights=tiled))


class Body(ABC):
    """One system; by default one model that is there answers all tenants, with a head for each."""

    num_places = 1

    def keep(self, tenant: Tenant) -> Tenant:
        """What it needs of a tenant."""
        return without_adapter(tenant)

    def model_of(self, tenant: Tenant) -> str:
        """Which model answers it."""
        return BODY

    def load(self, place: int, model: str) -> None:
        """Bring a model to a place."""
        return  # it is there

    @abstractmethod
    def run(self, place: int, requests: Sequence[PeerRequest]) -> list[Logits]:
        """With the model at a place."""


class SharedBody(Body):
    """BERT-shared: one body for all, a head a tenant."""

    def __init__(
        self, settings: PeerSettings, config: BaseConfig, dtype: torch.dtype, weights: Path, device: torch.device
    ) -> None:
        self._flat = FlatModel(config, dtype, device)
        self._flat.fill(model_files(weights)[0])
        self._flat.pack()

    def run(self, place: int, requests: Sequence[PeerRequest]) -> list[Logits]:
        return self._flat.run(requests)


class AdapterBody(Body):
    """hBERT-adapter: all layers computed once for all tenants, with each text's own adapters; no PLOT."""

    def __init__(
        self, settings: PeerSettings, config: BaseConfig, dtype: torch.dtype, weights: Path, device: torch.device
    ) -> None:
        flat = FlatModel(config, dtype)
        flat.fill(model_files(weights)[0])
        self._layers = config.upper_layers
        # A copy: what it was read into holds the whole model.
        self._embeddings = nn.Embedding.from_pretrained(flat.model.word_embeddings.weight.clone())
        self._engine = EncodeEngine(
            config,
            flat.model.body,
            num_slots=settings.num_slots,
            reduced_size=config.reduced_size(settings.reduction_factor),
            device=device,
            dtype=dtype,
        )

    def keep(self, tenant: Tenant) -> Tenant:
        """In the shape of a slot, pinned where there is CUDA, as hBERT keeps them."""
        tiled, slots = in_every_layer(tenant, self._layers), self._engine.slots
        return replace(tiled, packed=slots.staged(slots.fitted(tiled.packed)))

    def run(self, place: int, requests: Sequence[PeerRequest]) -> list[Logits]:
        with torch.inference_mode():
            ids = torch.from_numpy(np.concatenate([request.ids for request in requests]))
            # As large as what hBERT's look-up hands on.
            embedded = self._embeddings(ids).half().numpy()
        parts = np.split(embedded, np.cumsum([len(request.ids) for request in requests])[:-1])
        texts = [EngineRequest(r.tenant, part) for r, part in zip(requests, parts, strict=True)]
        return self._engine.run(texts)


class DedicatedBody(Body):
    """BERT-dedicated: a whole model a tenant, as many in memory as the budget holds, the others a read away."""

    def __init__(
        self, settings: PeerSettings, config: BaseConfig, dtype: torch.dtype, weights: Path, device: torch.device
    ) -> None:
        self._files = model_files(weights)
        self._from_disk = settings.from_disk
        first = FlatModel(config, dtype, device)
        self.num_places = places_in(settings, first.num_bytes)
        self._models = [first, *(FlatModel(config, dtype, device) for _ in range(self.num_places - 1))]
        self._unused = set(range(self.num_places))

    def model_of(self, tenant: Tenant) -> str:
        return tenant.card.name

    def load(self, place: int, model: str) -> None:
        self._models[place].fill(file_of(model, self._files), from_disk=self._from_disk)
        if place in self._unused:
            # Nobody had to go for it, so it may stay: packed before anything is measured.
            self._unused.remove(place)
            self._models[place].pack()

    def run(self, place: int, requests: Sequence[PeerRequest]) -> list[Logits]:
        return self._models[place].run(requests)


class OnnxBody(Body):
    """BERT-dedicated on ONNX Runtime: a session a tenant, fp32 on the processor, texts of a batch padded to the longest."""

    def __init__(
        self, settings: PeerSettings, config: BaseConfig, dtype: torch.dtype, weights: Path, device: torch.device
    ) -> None:
        import onnxruntime

        self._files = model_files(weights)
        size = self._files[0].with_suffix(".data").stat().st_size
        self.num_places = places_in(settings, size)
        self._sessions: list[onnxruntime.InferenceSession | None] = [None] * self.num_places
        self._options = onnxruntime.SessionOptions()
        self._options.intra_op_num_threads = settings.num_threads
        self._options.inter_op_num_threads = 1
        # The graph is fused as it lies there: looking for more would only make a swap slower.
        self._options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._pad_id = config.pad_id
        self._open = onnxruntime.InferenceSession

    def model_of(self, tenant: Tenant) -> str:
        return tenant.card.name

    def load(self, place: int, model: str) -> None:
        # First let the old one go: the budget holds for both.
        self._sessions[place] = None
        path = file_of(model, self._files)
        self._sessions[place] = self._open(str(path), self._options, providers=["CPUExecutionProvider"])

    def run(self, place: int, requests: Sequence[PeerRequest]) -> list[Logits]:
        session = self._sessions[place]
        assert session is not None
        lengths = [len(request.ids) for request in requests]
        ids = np.full((len(requests), max(lengths)), self._pad_id, dtype=np.int32)
        mask = np.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, : lengths[row]] = request.ids
            mask[row, : lengths[row]] = 1
        read = max(count_read(request.tenant, len(request.ids)) for request in requests)
        hidden = session.run(["hidden"], {"ids": ids, "mask": mask, "read": np.array([read])})[0]
        counts = [count_read(request.tenant, length) for request, length in zip(requests, lengths, strict=True)]
        states = np.concatenate([own[:count] for own, count in zip(hidden, counts, strict=True)])
        return head_logits([request.tenant for request in requests], counts, torch.from_numpy(states))


def places_in(settings: PeerSettings, model_bytes: int) -> int:
    """How many whole models the budget holds. Raises ConfigError where it holds none."""
    places = settings.budget_mb * 1_000_000 // model_bytes
    if places < 1:
        raise ConfigError(f"budget_mb is {settings.budget_mb}, but one model takes {model_bytes / 1e6:.0f} MB")
    return places


# The config is the whole model's, the dtype what the files in the folder hold.
BODIES: dict[System, Callable[[PeerSettings, BaseConfig, torch.dtype, Path, torch.device], Body]] = {
    "dedicated": DedicatedBody,
    "shared": SharedBody,
    "adapter": AdapterBody,
    "onnxruntime": OnnxBody,
}
