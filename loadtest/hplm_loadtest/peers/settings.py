"""Settings of the backend `peer`: the system that answers, and its memory and threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hplm.core.settings import at_least

System = Literal["dedicated", "onnxruntime"]


@dataclass(frozen=True)
class PeerSettings:
    """Settings of a peer. Paths are relative to the folder of the settings file.

    weights: a folder that `write_models` filled.
    budget_mb: memory for whole models of `dedicated`, on the `device`, or of `onnxruntime`, which only uses the processor.
    host_cache_mb: memory for loaded tenants. compute_nice: nice value of the threads that compute and that load models.
    """

    system: System
    store: str
    base: str
    weights: str
    budget_mb: int = 4096
    host_cache_mb: int = 1024
    batch_requests: int = 64
    num_threads: int = 1
    compute_nice: int = -20
    max_text_bytes: int = 65_536
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"

    def __post_init__(self) -> None:
        at_least(self, 1, "budget_mb", "host_cache_mb", "batch_requests", "num_threads")
