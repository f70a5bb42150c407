"""Writes and serves the Triton repository of a peer: one model named as hBERT, so that the same clients call it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from hplm.core import wire
from hplm.triton.launcher.instances import with_instances
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from hplm_loadtest.peers.settings import PeerSettings

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
