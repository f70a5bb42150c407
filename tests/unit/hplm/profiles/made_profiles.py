"""Profiles for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hplm.models.base import Base
from hplm.models.device import count_cores
from hplm.profiles.profile import Conditions, LayerTiming, Memory, Profile, Timing
from hplm.profiles.profile_store import write_profile
from hplm.runtime.processor import processor_name
from hplm.store.layout import Store

CONDITIONS = Conditions(
    fingerprint="0123456789abcdef",
    processor="a processor",
    cores=2,
    device="cpu",
    dtype="bfloat16",
    quantization="none",
    threads=1,
    batching="packed",
    reduced_size=96,
)


def made_profile(**changed: Any) -> Profile:
    """Return a profile of requests of 8, 32 and 128 tokens: 4, 6 and 20 ms."""
    values: dict[str, Any] = {
        "base": "tiny",
        "conditions": CONDITIONS,
        "measured_at": "2026-01-31T12:00:00Z",
        "kind": "full",
        "look_up": (Timing(1, 8, 0.5),),
        "known": (Timing(1, 8, 0.25),),
        "encode": (Timing(1, 8, 2.0), Timing(8, 32, 16.0)),
        "layers": (LayerTiming(1, 8, (0.5, 0.5)),),
        "request": (Timing(1, 8, 4.0), Timing(1, 32, 6.0), Timing(1, 128, 20.0)),
        "memory": Memory(1000, 10, 100, 50, 8),
        "load_s": 1.5,
    }
    return Profile(**values | changed)


def keep_profile(store: Store, base: Base, ms: float) -> None:
    """Keep a profile of this machine beside a base: every text takes `ms` milliseconds."""
    machine = replace(CONDITIONS, fingerprint=base.fingerprint, processor=processor_name(), cores=count_cores())
    write_profile(store, made_profile(base=base.config.name, conditions=machine, request=(Timing(1, 8, ms),)))
