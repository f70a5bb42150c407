"""The seconds and the bytes of each stage of a model, for every way to divide it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from hplm.errors import ConfigError
from hplm.placement.cluster import Cluster
from hplm.placement.partition import Cut, balanced_cut, stage_layers, stage_seconds
from hplm.placement.placement import ParallelConfig, Placement
from hplm.placement.served_model import ServedModel

# Returns the cut of a model's layers for their seconds, a number of stages, and the seconds to send a result.
CutFunction: TypeAlias = "Callable[[ServedModel, tuple[float, ...], int, float], Cut]"


def cut_balanced(model: ServedModel, layer_s: tuple[float, ...], stages: int, send_s: float) -> Cut:
    """Return the balanced cut of a model, see `balanced_cut`."""
    return balanced_cut(layer_s, stages, send_s)


class StageTimes:
    """Computes stages of `models` on the devices of `cluster`, and remembers them.

    A config that a model cannot have (more stages than layers, or `intra` above 1 without `ServedModel.intra`) has None.
    """

    def __init__(self, cluster: Cluster, models: Iterable[ServedModel], cut: CutFunction = cut_balanced) -> None:
        self.cluster = cluster
        self.models = {model.name: model for model in models}
        self._cut = cut
        self._cuts: dict[tuple[str, ParallelConfig], Cut | None] = {}
        self._seconds: dict[tuple[str, ParallelConfig], tuple[float, ...] | None] = {}
        self._bytes: dict[tuple[str, ParallelConfig], tuple[int, ...] | None] = {}

    def model(self, name: str) -> ServedModel:
        """Return the model of a name. Raises ConfigError if there is none."""
        if name not in self.models:
            raise ConfigError(f"one of the models {', '.join(self.models)} was expected, got {name!r}")
        return self.models[name]

    def of(self, model: ServedModel | str, config: ParallelConfig) -> tuple[float, ...] | None:
        """Return the seconds of each stage for one request, sending to the next stage included, `[stages]`."""
        key = (model if isinstance(model, str) else model.name), config
        if key not in self._seconds:
            served, cut = self.model(key[0]), self.cut_of(*key)
            self._seconds[key] = (
                None if cut is None else stage_seconds(_layer_seconds(served, config), cut, self._send_s(served))
            )
        return self._seconds[key]

    def cut_of(self, model: ServedModel | str, config: ParallelConfig) -> Cut | None:
        """Return the number of layers of each stage, `[stages]`."""
        key = (model if isinstance(model, str) else model.name), config
        if key not in self._cuts:
            served = self.model(key[0])
            can = config.stages <= len(served.layer_s) and (config.intra == 1 or served.intra is not None)
            layer_s = _layer_seconds(served, config) if can else ()
            self._cuts[key] = self._cut(served, layer_s, config.stages, self._send_s(served)) if can else None
        return self._cuts[key]

    def bytes_of(self, model: ServedModel | str, config: ParallelConfig) -> tuple[int, ...] | None:
        """Return the bytes that a model needs on each device of a stage, `[stages]`."""
        key = (model if isinstance(model, str) else model.name), config
        if key not in self._bytes:
            served, cut = self.model(key[0]), self.cut_of(*key)
            weights = (
                []
                if cut is None
                else [sum(served.layer_bytes[layer] for layer in layers) for layers in stage_layers(cut)]
            )
            # Rounded up: a device cannot hold a part of a byte.
            per_device = tuple(-(-weight // config.intra) + served.fixed_bytes for weight in weights)
            self._bytes[key] = per_device or None
        return self._bytes[key]

    def latency_s(self, model: ServedModel | str, config: ParallelConfig) -> float | None:
        """Return the seconds of a request that meets idle stages."""
        seconds = self.of(model, config)
        return None if seconds is None else sum(seconds)

    def fits(self, placement: Placement) -> bool:
        """Return whether every group can divide its models, and every device has the memory for its stages."""
        for group, names in zip(placement.groups, placement.models, strict=True):
            of_stages = [self.bytes_of(name, group.config) for name in names]
            for stage in range(group.config.stages):
                needed = 0
                for of_stage in of_stages:
                    if of_stage is None:
                        return False
                    needed += of_stage[stage]
                if any(needed > self.cluster.device_bytes(device) for device in group.stage_devices(stage)):
                    return False
        return True

    def _send_s(self, model: ServedModel) -> float:
        return model.hop_s + model.boundary_bytes / self.cluster.bytes_per_s


def _layer_seconds(model: ServedModel, config: ParallelConfig) -> tuple[float, ...]:
    """Return the seconds of each layer on the devices of one stage."""
    if config.intra == 1 or model.intra is None:
        return model.layer_s
    return tuple(model.intra.seconds(layer_s, config.intra) for layer_s in model.layer_s)
