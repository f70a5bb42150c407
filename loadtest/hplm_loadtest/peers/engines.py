"""Computes a batch as each peer system does.

An engine has places in memory for whole models; `SwapWorker` decides which model is in which place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from hplm.adapters.tenant import Tenant
from hplm.core.settings import BaseConfig
from hplm.engine.encode import count_read, head_logits
from hplm.errors import ConfigError
from hplm.tasks.task import Logits
from hplm_loadtest.peers.settings import PeerSettings, System
from hplm_loadtest.peers.whole_model import PeerRequest, PreallocatedModel, file_bytes, model_file_of, model_files


def without_adapter(tenant: Tenant) -> Tenant:
    """Return a tenant with its head and its labels only."""
    return replace(tenant, packed=replace(tenant.packed, weights=tenant.packed.weights[:0].copy()))


@dataclass
class PeerEngine(ABC):
    """The computation of one peer system, with a whole model for each tenant.

    config: of the whole model, see `whole_config`. dtype: of the model files in the folder `weights`.
    """

    settings: PeerSettings
    config: BaseConfig
    dtype: torch.dtype
    weights: Path
    device: torch.device
    num_places = 1  # not a field: an engine of whole models sets its own number

    @abstractmethod
    def __post_init__(self) -> None:
        """Load what the engine needs, after the fields are set."""

    @cached_property
    def files(self) -> list[Path]:
        return model_files(self.weights)

    def keep(self, tenant: Tenant) -> Tenant:
        """Return the parts of a tenant to keep in memory."""
        return without_adapter(tenant)

    def model_of(self, tenant: Tenant) -> str:
        """Return the name of the model that answers a tenant's requests: each tenant has a whole model."""
        return tenant.card.name

    @abstractmethod
    def load(self, place: int, model: str) -> None:
        """Load a model into a place."""

    @abstractmethod
    def run(self, place: int, requests: Sequence[PeerRequest]) -> list[Logits]:
        """Return the logits of each request, computed with the model at a place."""


class DedicatedEngine(PeerEngine):
    """BERT-dedicated: a whole model for each tenant. Models beyond the memory budget are read from files when needed."""

    def __post_init__(self) -> None:
        self.num_places = places_in(self.settings, file_bytes(self.config, self.dtype))
        self._models = [PreallocatedModel(self.config, self.dtype, self.device) for _ in range(self.num_places)]
        self._unused = set(range(self.num_places))

    def load(self, place: int, model: str) -> None:
        self._models[place].fill(model_file_of(model, self.files))
        if place in self._unused:
            # The first model in a place replaces no other and probably stays, so it is packed before the measurement.
            self._unused.remove(place)
            self._models[place].pack()

    def run(self, place: int, requests: Sequence[PeerRequest]) -> list[Logits]:
        return self._models[place].run(requests)


class OnnxEngine(PeerEngine):
    """BERT-dedicated on ONNX Runtime: a session for each tenant, fp32 on the processor, texts padded to the longest."""

    def __post_init__(self) -> None:
        import onnxruntime

        size = self.files[0].with_suffix(".data").stat().st_size
        self.num_places = places_in(self.settings, size)
        self._sessions: list[onnxruntime.InferenceSession | None] = [None] * self.num_places
        self._options = onnxruntime.SessionOptions()
        self._options.intra_op_num_threads = self.settings.num_threads
        self._options.inter_op_num_threads = 1
        # The graph in the file is fused already: optimising again would only make swapping slower.
        self._options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._open = onnxruntime.InferenceSession

    def load(self, place: int, model: str) -> None:
        # Freed first, because the budget has no room for both models.
        self._sessions[place] = None
        path = model_file_of(model, self.files)
        self._sessions[place] = self._open(str(path), self._options, providers=["CPUExecutionProvider"])

    def run(self, place: int, requests: Sequence[PeerRequest]) -> list[Logits]:
        session = self._sessions[place]
        assert session is not None
        lengths = [len(request.ids) for request in requests]
        ids = np.full((len(requests), max(lengths)), self.config.pad_id, dtype=np.int32)
        mask = np.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, : lengths[row]] = request.ids
            mask[row, : lengths[row]] = 1
        read = max(count_read(request.tenant, len(request.ids)) for request in requests)
        hidden = session.run(["hidden"], {"ids": ids, "mask": mask, "read": np.array([read])})[0]
        counts = [count_read(request.tenant, length) for request, length in zip(requests, lengths, strict=True)]
        states = np.concatenate([text_hidden[:count] for text_hidden, count in zip(hidden, counts, strict=True)])
        return head_logits([request.tenant for request in requests], counts, torch.from_numpy(states))


def places_in(settings: PeerSettings, model_bytes: int) -> int:
    """Return how many whole models fit in the memory budget. Raises ConfigError if no model fits."""
    places = settings.budget_mb * 1_000_000 // model_bytes
    if places < 1:
        raise ConfigError(f"budget_mb is {settings.budget_mb}, but one model takes {model_bytes / 1e6:.0f} MB")
    return places


ENGINES: dict[System, type[PeerEngine]] = {
    "dedicated": DedicatedEngine,
    "onnxruntime": OnnxEngine,
}
