"""A model to be placed: the time, memory and communication of its layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hplm.errors import ConfigError


@dataclass(frozen=True)
class IntraCost:
    """The cost of intra-layer parallelism: `share` of a layer's time is communication when it runs on two or more devices.

    A layer of `t` seconds takes `t / n + share * t * (1 - 1 / n)` on `n` devices (AlpaServe Fig. 8b).
    """

    share: float

    def seconds(self, layer_s: float, devices: int) -> float:
        """Return the seconds of a layer on `devices` devices."""
        return layer_s / devices + self.share * layer_s * (1 - 1 / devices)


@dataclass(frozen=True)
class ServedModel:
    """A model to be placed, layer by layer, for one request of usual length on one device.

    layer_s: seconds of each layer, `[layers]`. What runs before the first layer or after the last belongs to it.
    layer_bytes: bytes of each layer's weights on its device, `[layers]`.
    fixed_bytes: bytes on each device that holds a stage of the model: the process and the adapter slots.
    boundary_bytes: bytes that a request sends from a stage to the next.
    hop_s: seconds to hand a request to the next stage, besides the time of `boundary_bytes`.
    intra: the cost of intra-layer parallelism; None if the model's layers cannot be divided.
    batch_times: seconds of a batch of 1, 2, ... requests as multiples of one request. Empty: no batch of more than one.
    """

    name: str
    layer_s: tuple[float, ...]
    layer_bytes: tuple[int, ...]
    fixed_bytes: int = 0
    boundary_bytes: int = 0
    hop_s: float = 0.0
    intra: IntraCost | None = None
    batch_times: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if not self.layer_s or len(self.layer_s) != len(self.layer_bytes):
            raise ConfigError(
                f"model {self.name!r}: a time and bytes for each layer were expected, got {len(self.layer_s)} times and "
                f"{len(self.layer_bytes)} numbers of bytes"
            )
        if not all(0 < seconds < math.inf for seconds in self.layer_s):
            raise ConfigError(f"model {self.name!r}: finite times above 0 s were expected, got {self.layer_s}")
        if min(self.layer_bytes) < 0:
            raise ConfigError(f"model {self.name!r}: bytes of 0 or more were expected, got {self.layer_bytes}")

    @property
    def latency_s(self) -> float:
        """The seconds of a request on one device, while no other request runs."""
        return sum(self.layer_s)

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights, without `fixed_bytes`."""
        return sum(self.layer_bytes)
