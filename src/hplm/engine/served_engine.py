"""The encode engine of a base as its settings say, for serving and for measuring."""

from __future__ import annotations

import torch

from hplm.core.settings import EncodeSettings
from hplm.engine.adapter_slots import choose_slots, pool_sizes
from hplm.engine.encode import EncodeEngine
from hplm.engine.kernels.int8 import Ranges, check_int8
from hplm.engine.kernels.int8_ranges import measure_ranges
from hplm.engine.lower_layers import load_lower
from hplm.errors import ConfigError
from hplm.models.base import Base
from hplm.models.device import choose_dtype, count_cores
from hplm.profiles.profile import Conditions
from hplm.runtime.processor import processor_name
from hplm.runtime.tracing import Tracer


def make_engine(
    base: Base,
    settings: EncodeSettings,
    device: torch.device,
    *,
    instances: int = 1,
    layers: range | None = None,
    tracer: Tracer | None = None,
) -> EncodeEngine:
    """Make the engine of a base. `instances`: how many processes compute upper layers in one server.

    With `layers` the engine computes these layers alone. Only their weights are loaded, but for int8, which is measured with
    all layers first.
    Raises ConfigError if the device cannot compute as the settings say, or an ArtifactError for a damaged base.
    """
    config = base.config
    if base.is_trunk and settings.batching != "packed":
        raise ConfigError(
            f"base {config.name} is a trunk, whose tenants may have students: they want batching packed, it is "
            f"{settings.batching}"
        )
    if layers is not None and base.is_trunk:
        raise ConfigError(f"base {config.name} is a trunk, which has a single encode stage: export it without --stages")
    upper = base.load_upper(layers)
    dtype = choose_dtype(settings.dtype, device, settings.quantization)
    int8: list[Ranges] = []
    if settings.quantization == "int8":
        check_int8(device)
        measured = upper if layers is None else base.load_upper()
        ranges = measure_ranges(base, None if config.is_whole else load_lower(base), measured)
        int8 = ranges if layers is None else ranges[layers.start : layers.stop]
    reduced_size = config.reduced_size(settings.reduction_factor)
    return EncodeEngine(
        config,
        upper,
        num_slots=choose_slots(settings.num_slots, config, reduced_size, device, dtype, instances, layers),
        reduced_size=reduced_size,
        device=device,
        dtype=dtype,
        batching=settings.batching,
        row_tokens=settings.row_tokens,
        pad_to=settings.pad_to,
        fine_prefetch=settings.fine_prefetch,
        int8=int8,
        layers=layers,
        tracer=tracer,
    )


def conditions_of(base: Base, settings: EncodeSettings, device: torch.device, threads: int) -> Conditions:
    """Return the conditions under which an engine of `make_engine` computes with `threads` threads on this machine."""
    dtype = choose_dtype(settings.dtype, device, settings.quantization)
    return Conditions(
        fingerprint=base.fingerprint,
        processor=processor_name(),
        cores=count_cores(),
        device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        quantization=settings.quantization,
        threads=threads,
        batching=settings.batching,
        reduced_size=pool_sizes(base.config, base.config.reduced_size(settings.reduction_factor))[-1],
    )
