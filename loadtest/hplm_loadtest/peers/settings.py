"""Settings of the `peer` backend: which system answers, and with how much memory and how many threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hplm.core.settings import at_least

System = Literal["dedicated", "shared", "adapter", "onnxruntime"]


@dataclass(frozen=True)
class PeerSettings:
    """Paths are relative to the folder of the settings file; `weights` is a folder that `weights.write_models` filled.

    `budget_mb` bounds the models that `dedicated` and `onnxruntime` hold at once, the former on the `device`; the latter has
    the processor alone. `from_disk` reads their files past the page cache, as a fleet larger than the memory must.
    `host_cache_mb` is the memory for loaded tenants. `compute_nice` is for the threads that compute and that load models.
    """

    system: System
    store: str
    base: str
    weights: str
    budget_mb: int = 4096
    from_disk: bool = False
    # For a batch of as many tenants, and the identity.
    num_slots: int = 65
    reduction_factor: int = 16
    host_cache_mb: int = 1024
    batch_requests: int = 64
    num_threads: int = 1
    compute_nice: int = -20
    max_text_bytes: int = 65_536
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"

    def __post_init__(self) -> None:
        at_least(
            self, 1, "budget_mb", "num_slots", "reduction_factor", "host_cache_mb", "batch_requests", "num_threads"
        )
