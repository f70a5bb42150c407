"""The profile of a base, measured in this process; and the profile that a job works with."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import nn

from hplm.adapters.bank import TenantBank
from hplm.core.roles import ServedBase
from hplm.core.settings import EncodeSettings
from hplm.core.text import tokenise_in_one_thread
from hplm.engine.adapter_slots import PARTS
from hplm.engine.encode import EncodeEngine
from hplm.engine.open_domain import Domain
from hplm.engine.open_domains import OpenDomains
from hplm.engine.served_engine import conditions_of, make_engine
from hplm.engine.token_domain import TokenDomains
from hplm.errors import ArtifactError
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.models.device import choose_device, choose_threads, use_threads
from hplm.profiles.profile import Conditions, Memory, Profile, Timing
from hplm.profiles.profile_store import find_profile, read_profiles
from hplm.registry.catalog import Catalog
from hplm.registry.records import ServedTenant
from hplm.reporting.progress import Report, silent
from hplm.store.layout import Store
from hplm_builder.profiles.stage_timings import (
    ALONE,
    LAYERS,
    QUICK,
    TOGETHER,
    LayerTracer,
    Size,
    cut,
    time_encode,
    time_layers,
    time_look_up,
    time_swap,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Effort:
    """The sizes of batches to measure, the rounds that count, and the seconds after which no further round begins."""

    sizes: Sequence[Size]
    rounds: int
    within_s: float


FULL_EFFORT = Effort((*ALONE, *TOGETHER), rounds=9, within_s=90.0)
QUICK_EFFORT = Effort(QUICK, rounds=3, within_s=6.0)
# Milliseconds of a request outside the two stages: the client, Triton, and the way between the processes. Only quick profiles
# need the number; a full profile measures whole requests.
OUTSIDE_MS = 3.0
# Tenants that are loaded from disk to measure how long that takes.
LOADED = 16
# Bytes of a token's position in its text: start, end, and word, int32.
POSITION_BYTES = 12


def profile_of(
    store: Store,
    base: Base,
    domain: Domain,
    settings: EncodeSettings | None = None,
    report: Report = silent,
) -> Profile:
    """Return the profile that a job selects by: the kept profile of this machine, else a quick measurement.

    A kept profile counts if `hplm profile` measured the same base on the same processor with the same number of cores. Equal
    `settings` come first, by default those of an export without options; else the newest profile counts, because a job does not
    know how each server is set. A quick profile is measured in seconds, in this process, over `domain`; it is not kept.
    The log says which it is.
    """
    name = base.config.name
    settings = settings or EncodeSettings(store="", base=name)
    device, threads = choose_device(settings.device), choose_threads(settings.num_threads)
    conditions = conditions_of(base, settings, device, threads)
    kept = kept_profile(store, name, conditions)
    if kept is not None:
        log.info("base %s: latencies from the profile of %s", name, kept.measured_at)
        return kept
    log.warning(
        "base %s: no profile of this machine, so a quick measurement estimates latencies; measure with `hplm profile`",
        name,
    )
    with _torch_threads(threads), closing(make_engine(base, settings, device)) as engine:
        return _measure(base, domain, engine, conditions, QUICK_EFFORT, report)


def kept_profile(store: Store, base: str, wanted: Conditions) -> Profile | None:
    """Return the kept profile that fits `wanted` best, see `profile_of`. A damaged profile is logged, and none is returned."""
    try:
        equal = find_profile(store, base, wanted, full=True)
        return equal or next((each for each in read_profiles(store, base) if _is_alike(each, wanted)), None)
    except ArtifactError as error:
        log.warning("base %s: %s", base, error)
        return None


def _is_alike(profile: Profile, wanted: Conditions) -> bool:
    same = ("fingerprint", "processor", "cores", "device")
    return profile.kind == "full" and all(getattr(profile.conditions, key) == getattr(wanted, key) for key in same)


def measure_stages(store: Store, served: ServedBase, instances: int, report: Report = silent) -> Profile:
    """Measure the stages of a served base in this process. The profile is quick, because no server is asked.

    Threads and slots are those of a process if `instances` processes of a server compute upper layers.

    Raises ConfigError, MissingArtifactError, CorruptArtifactError or RegistryError.
    """
    look_up, encode, _ = served.settings
    base = bases.load(store.base(served.base))
    device, threads = choose_device(encode.device), choose_threads(encode.num_threads, instances)
    tokenise_in_one_thread()
    use_threads(threads)
    with closing(Catalog(store, served.base)) as catalog:
        lineage = catalog.lineage(look_up.table)
        bank = TenantBank(store, catalog, base.fingerprint)
        tenants = catalog.served()[:LOADED]
        domains = TokenDomains(base.config) if base.config.is_whole else OpenDomains(store, base, look_up)
        tracer = LayerTracer(device)
        engine = make_engine(base, encode, device, instances=instances, tracer=tracer)
        with closing(domains), closing(engine):
            domain: Domain = domains.fetch(lineage).result()
            domain.warm_up()
            conditions = conditions_of(base, encode, device, threads)
            profile = _measure(base, domain, engine, conditions, FULL_EFFORT, report)
            layers = time_layers(
                engine, tracer, cut(LAYERS, base.config.max_tokens), FULL_EFFORT.rounds, partial(report, "layers")
            )
        tables = [] if base.config.is_whole else [store.path(path) for path in lineage]
        table_bytes = sum(file.stat().st_size for folder in tables for file in folder.rglob("*") if file.is_file())
        return replace(
            profile,
            layers=tuple(layers),
            memory=replace(profile.memory, tables=table_bytes),
            tenant_load_ms=median(_load_ms(bank, tenant) for tenant in tenants) if tenants else None,
        )


def _measure(
    base: Base,
    domain: Domain,
    engine: EncodeEngine,
    conditions: Conditions,
    effort: Effort,
    report: Report,
) -> Profile:
    """Measure batches in this process. The latency of a request is the sum of both stages' times and of OUTSIDE_MS."""
    sizes = cut(effort.sizes, base.config.max_tokens)
    encode = time_encode(engine, sizes, effort.rounds, effort.within_s, partial(report, "encode stage"))
    lengths = [tokens for texts, tokens in sizes if texts == 1]
    new, known = time_look_up(
        base.load_text_encoder(), domain, lengths, effort.rounds, partial(report, "look-up stage")
    )
    alone = [timing for timing in encode if timing.texts == 1]
    return Profile(
        base=base.config.name,
        conditions=conditions,
        measured_at=utc_now(),
        kind="quick",
        look_up=tuple(new),
        known=tuple(known),
        encode=tuple(encode),
        layers=(),
        request=tuple(
            Timing(1, computed.tokens, looked_up.ms + computed.ms + OUTSIDE_MS)
            for looked_up, computed in zip(new, alone, strict=True)
        ),
        memory=_memory(base, domain, engine, conditions),
        swap_ms=time_swap(engine),
    )


def _memory(base: Base, domain: Domain, engine: EncodeEngine, conditions: Conditions) -> Memory:
    layers = base.load_upper().layers
    number_bytes = torch.empty((), dtype=engine.dtype).element_size()
    matrices = sum(module.weight.numel() for module in layers.modules() if isinstance(module, nn.Linear))
    others = sum(parameter.numel() for parameter in layers.parameters()) - matrices
    matrix_bytes = 1 if conditions.quantization == "int8" else number_bytes
    # The last pool has the widest slots.
    widest = engine.slots.parts[-PARTS:]
    return Memory(
        weights=matrices * matrix_bytes + others * number_bytes,
        adapter=sum(part[:, 0].numel() * part.element_size() for part in widest),
        slots=engine.slots.device_bytes,
        tables=0,
        waiting_token=domain.token_bytes + POSITION_BYTES,
    )


def _load_ms(bank: TenantBank, tenant: ServedTenant) -> float:
    start = time.perf_counter()
    bank.load(tenant)
    return 1000 * (time.perf_counter() - start)


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Let torch compute with `count` threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def utc_now() -> str:
    """Return the time as a profile has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
