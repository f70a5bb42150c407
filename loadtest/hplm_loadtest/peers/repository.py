"""Writes and serves the Triton repository of a peer: one model named as hBERT, so that the same clients call it.

Writes also the whole models that the peers `dedicated` and `onnxruntime` swap.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from rich.progress import Progress

from hplm.core import wire
from hplm.core.settings import BaseConfig
from hplm.errors import ConfigError
from hplm.triton.launcher.instances import with_instances
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from hplm_loadtest.peers import onnx_graph
from hplm_loadtest.peers.settings import PeerSettings
from hplm_loadtest.peers.whole_model import file_bytes, make_seeded_model, model_files, stored_as, write_model

BACKENDS = Path(__file__).parent / "backends"
_CONFIG = f"""\
name: "{wire.MODEL}"
backend: "peer"
max_batch_size: 64
input [
  {{ name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "TENANT" data_type: TYPE_STRING dims: [ 1 ] }}
]
output [
  {{ name: "LABEL" data_type: TYPE_STRING dims: [ -1 ] }},
  {{ name: "SCORE" data_type: TYPE_FP32 dims: [ -1 ] }},
  {{ name: "SPAN" data_type: TYPE_INT32 dims: [ -1, 2 ] }},
  {{ name: "TRUNCATED" data_type: TYPE_BOOL dims: [ 1 ] }},
  {{ name: "LOGITS" data_type: TYPE_FP32 dims: [ -1, -1 ] }}
]
# The backend queues and batches itself; a short delay lets requests cross to it together.
dynamic_batching {{ max_queue_delay_microseconds: 500 }}
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
"""


def write_repository(folder: Path, settings: PeerSettings, instances: int = 1) -> Path:
    """Write the model folder of a peer. Paths in `settings` are absolute or relative to `folder/hbert/1`.

    Each of the `instances`, processes at the same time, has all the memory and threads that the settings name.
    """
    version = folder / wire.MODEL / "1"
    version.mkdir(parents=True, exist_ok=True)
    (folder / wire.MODEL / "config.pbtxt").write_text(with_instances(_CONFIG, instances))
    (version / "settings.json").write_text(json.dumps(asdict(settings), indent=2) + "\n")
    return folder


def serve_peer(models: Path, *, log: Path) -> TritonServer:
    """Start Triton over a repository that `write_repository` wrote. The caller waits until the server is ready."""
    return TritonServer(models, free_ports(), models=(wire.MODEL,), backends=(BACKENDS,), log=log, tied=True)


def write_models(
    folder: Path,
    config: BaseConfig,
    *,
    tenants: int,
    disk_bytes: int,
    dtype: torch.dtype,
    onnx: bool,
    progress: Progress,
) -> int:
    """Write a different model of shape `config`, see `whole_config`, for each tenant, as far as `disk_bytes` allow.

    Files from an earlier call are kept, except those beyond `disk_bytes`. Returns the number of files. If there are fewer files
    than tenants, tenants share files; a swap still reads and copies a whole model.
    """
    model_bytes = onnx_graph.file_bytes(config) if onnx else file_bytes(config, dtype)
    max_files = disk_bytes // model_bytes
    count = min(tenants, max_files)
    if count < 1:
        raise ConfigError(
            f"one model takes {model_bytes:,} bytes on disk, and {disk_bytes:,} are allowed: raise --disk-mb"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for number in progress.track(range(count), description=f"{folder.name}: models of {model_bytes / 1e6:.0f} MB"):
        path = folder / f"model-{number:05d}{'.onnx' if onnx else '.bin'}"
        if not path.is_file():
            partial = path.with_name(f".{path.name}")
            model = make_seeded_model(config, number)
            if onnx:
                onnx_graph.write(model, config, partial, path.with_suffix(".data"))
            else:
                write_model(stored_as(model, dtype), partial)
            partial.rename(path)
    files = model_files(folder)
    # Removed, because a server uses all files: an earlier benchmark was allowed more disk.
    for path in files[max_files:]:
        path.unlink()
        path.with_suffix(".data").unlink(missing_ok=True)
    return min(len(files), max_files)
