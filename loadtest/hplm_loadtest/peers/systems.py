"""Starts hBERT and its peers as servers over one fleet, with the same tenants, tokenizer, threads and client."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import Progress

from hplm.core.roles import base_roles, load_serving_settings, of_whole_base
from hplm.core.settings import EncodeSettings
from hplm.engine.adapter_slots import USUAL_SLOTS
from hplm.errors import ConfigError, MissingArtifactError
from hplm.models.base import Base
from hplm.models.device import choose_device, choose_dtype, count_cores
from hplm.store.layout import Store
from hplm.triton.launcher.instances import with_instances
from hplm.triton.launcher.model_folder import write_model
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from hplm_loadtest.benchmarks.benchmark_server import StageSettings, copy_repository
from hplm_loadtest.benchmarks.page_cache import into_page_cache
from hplm_loadtest.benchmarks.served_repository import read_repository, single_text_tenants
from hplm_loadtest.peers import onnx_graph, whole_fleet, whole_model
from hplm_loadtest.peers.repository import serve_peer, write_models, write_repository
from hplm_loadtest.peers.settings import PeerSettings
from hplm_loadtest.peers.whole_fleet import write_whole_fleet
from hplm_loadtest.peers.whole_model import file_bytes, whole_config
from hplm_loadtest.workloads.texts import texts_of_kind

Shape = Literal["minilm", "bert-base"]
SystemName = Literal["hbert", "dedicated", "adapter", "onnxruntime"]
# The systems that hplm serves. `adapter` is a whole base: all layers are computed, with adapters in the layers of hBERT's.
OWN: tuple[SystemName, ...] = ("hbert", "adapter")
# The systems with a whole model for each tenant, in the memory that `Limits` gives them.
WHOLE_MODELS: tuple[SystemName, ...] = ("dedicated", "onnxruntime")


@dataclass(frozen=True)
class Fleet:
    """A folder that `hplm build fleet` wrote."""

    folder: Path
    base: Base
    names: list[str]
    texts: list[str]

    @property
    def models(self) -> Path:
        return self.folder / "models"

    @property
    def upper(self) -> EncodeSettings:
        """Load the settings of the fleet's encode stage. Raises ConfigError."""
        return load_serving_settings(self.models).encode


def slots_of(upper: EncodeSettings) -> int:
    """Return the number of adapter slots of a benchmark. Even a GPU with much memory gets no more than peers by default."""
    return upper.num_slots or USUAL_SLOTS


def open_fleet(folder: Path, shape: Shape, tenants: int, text_kind: str = "pool") -> Fleet:
    """Open a fleet with at least `tenants` tenants; text_kind: see `texts_of_kind`.

    Raises MissingArtifactError with the command that builds the fleet, if the fleet is missing or has too few tenants.
    """
    models = folder / "models"
    names = single_text_tenants(models) if models.is_dir() else []
    if len(names) < tenants:
        raise MissingArtifactError(
            f"no fleet of {tenants} tenants in {folder}: "
            f"`hplm build fleet --shape {shape} --tenants {tenants} --out {folder}` builds it"
        )
    return Fleet(folder, read_repository(models).base, names, texts_of_kind(text_kind, models))


@dataclass(frozen=True)
class Limits:
    """The limits of every system: computing threads, memory for tenants, disk for files of whole models.

    Each thread is a process of its own, so that threads do not wait for each other. Systems of whole models use threads of one
    process, because one process can keep more models in its memory than several. On a GPU hBERT's look-up stage has as many
    processes.
    """

    num_threads: int = 1
    budget_mb: int = 4096
    disk_mb: int = 6000


class Systems:
    """The systems of a benchmark: writes each system's files below the fleet's folder, then starts its server."""

    def __init__(self, fleet: Fleet, limits: Limits, upper: Mapping[str, Any] | None = None) -> None:
        """Choose device and dtype; `upper` has settings of hBERT's encode stage that differ from the fleet's."""
        self._fleet = fleet
        self._upper = dict(upper or {})
        self._limits = limits
        self._config = whole_config(fleet.base.config)
        # Peers compute on the device and in the dtype of hBERT.
        self._device = choose_device(fleet.upper.device)
        self._dtype = choose_dtype(fleet.upper.dtype, self._device)
        # Each process has its share of the budget.
        self._cache_mb = max(1, limits.budget_mb // limits.num_threads)
        self.settings: dict[str, Any] = {"device": self._device.type, "dtype": str(self._dtype), **asdict(limits)}

    def prepare(self, name: SystemName, progress: Progress) -> None:
        """Write a system's model files and repository. Model files from earlier calls are kept.

        Raises ConfigError for a peer that cannot be compared with hBERT on this machine.
        """
        target = self._repository(name)
        shutil.rmtree(target, ignore_errors=True)
        if name == "hbert":
            self._write_hbert(target)
            return
        if name == "adapter":
            served = read_repository(self._fleet.models)
            self._write_adapter(target, write_whole_fleet(self._whole_store.root, served, self._fleet.names, progress))
            return
        if self._device.type == "cuda" and torch.cuda.device_count() > 1:
            raise ConfigError("hBERT would compute on every GPU and its peers on one: set CUDA_VISIBLE_DEVICES=0")
        is_onnx = name == "onnxruntime"
        dtype: Literal["bfloat16", "float32"] = "bfloat16" if self._dtype == torch.bfloat16 else "float32"
        files = f"onnx-{onnx_graph.FORMAT}" if is_onnx else f"{dtype}-{whole_model.FORMAT}"
        weights = self._fleet.folder / "peers" / files
        count = write_models(
            weights,
            self._config,
            tenants=len(self._fleet.names),
            disk_bytes=self._limits.disk_mb * 1_000_000,
            dtype=self._dtype,
            onnx=is_onnx,
            progress=progress,
        )
        self.settings |= {f"{name}_files": count, f"{name}_processes": 1}
        if is_onnx:
            self.settings |= {f"{name}_on": "cpu", f"{name}_dtype": "float32"}
        if name == "dedicated":
            model_mb = file_bytes(self._config, self._dtype) / 1e6
            resident = int(self._limits.budget_mb / model_mb)
            self.settings |= {"dedicated_model_mb": model_mb, "dedicated_resident": resident}
            if self._device.type == "cpu":
                beside = "models that stay are packed for oneDNN in memory that budget_mb does not count"
                self.settings["dedicated_beside"] = beside
        settings = PeerSettings(
            system=name,
            store=str((self._fleet.folder / "store").resolve()),
            base=self._fleet.base.config.name,
            weights=str(weights.resolve()),
            budget_mb=self._limits.budget_mb,
            host_cache_mb=self._limits.budget_mb,
            num_threads=self._limits.num_threads,
            # With preferred computing threads on every core, requests could neither arrive nor leave. hBERT's encode stage
            # handles this itself.
            compute_nice=PeerSettings.compute_nice if self._limits.num_threads < count_cores() else 0,
            device="cuda" if self._device.type == "cuda" else "cpu",
            dtype=dtype,
        )
        write_repository(target, settings, self.processes(name))

    def processes(self, name: SystemName) -> int:
        """Return the number of a system's computing processes, each with its own memory for tenants."""
        return 1 if name in WHOLE_MODELS else self._limits.num_threads

    def start(self, name: SystemName) -> TritonServer:
        """Start a system's server. The caller waits until the server is ready."""
        target, log = self._repository(name), self._fleet.folder / "peers" / f"{name}.log"
        if name in OWN:
            # Before each start, because other systems' files may have replaced the bank in the page cache.
            into_page_cache(self._whole_store.root if name == "adapter" else self._fleet.folder / "store")
            return TritonServer(target, free_ports(), log=log, tied=True)
        return serve_peer(target, log=log)

    @property
    def _whole_store(self) -> Store:
        """The store of the system `adapter`."""
        return Store(self._fleet.folder / "peers" / "whole-store")

    def _repository(self, name: str) -> Path:
        return self._fleet.folder / "peers" / f"models-{name}"

    def _write_hbert(self, target: Path) -> None:
        """Copy the fleet's repository with the limit's number of encode processes, on a GPU also of look-up processes.

        The tenants' host cache has the memory of a peer's models.
        """
        look_up, upper = self._stage_settings()
        copy_repository(self._fleet.models, target, StageSettings(look_up, upper))
        stages = base_roles()
        for role, count in zip((stages.look_up, stages.encode), self._stage_processes, strict=True):
            config = target / role.name / "config.pbtxt"
            config.write_text(with_instances(config.read_text(), count))
        self.settings |= {
            "hbert_look_up_processes": self._stage_processes[0],
            "hbert_look_up_threads": look_up["num_threads"],
            "hbert_look_up_device": look_up["device"],
            "hbert_num_slots": upper["num_slots"],
        }

    def _write_adapter(self, target: Path, store: Store) -> None:
        """Write the models of a whole base in `store`, with the settings and processes of hBERT's stages."""
        fleet = load_serving_settings(self._fleet.models)
        look_up, upper = self._stage_settings()
        common = {"store": str(store.root.resolve()), "registry": "", "base": whole_fleet.BASE}
        stages = base_roles()
        values = {
            stages.look_up: {**asdict(fleet.look_up), **look_up, **common, "table": whole_fleet.ROOT},
            stages.encode: {**asdict(fleet.encode), **upper, **common},
            stages.ensemble: {},
            stages.dispatch: {},
        }
        counts = dict(zip((stages.look_up, stages.encode), self._stage_processes, strict=True))
        for role, settings in values.items():
            write_model(target, of_whole_base(role), settings, counts.get(role))

    def _stage_settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the settings of hBERT's stages that differ from the fleet's."""
        # The look-up stage also computes, for new text. Each of the two stages has one thread.
        look_up = {"num_threads": 1, "device": self._device.type}
        num_slots = slots_of(self._fleet.upper)
        return look_up, {"num_threads": 1, "host_cache_mb": self._cache_mb, "num_slots": num_slots, **self._upper}

    @property
    def _stage_processes(self) -> tuple[int, int]:
        """The number of processes of the look-up stage and of the encode stage."""
        # A GPU computes the upper layers faster than one look-up process can prepare batches.
        return self._limits.num_threads if self._device.type == "cuda" else 1, self._limits.num_threads
