"""`hplm profile`: measure a served base on this machine, and keep the result in the store."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import typer
from hplm_builder.profiles.base_profile import measure_stages
from hplm_builder.profiles.stage_timings import ALONE, cut
from hplm_client.cli.display import console, print_json, print_records
from hplm_client.cli.options import JsonOption
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hplm.adapters.bank import TenantBank
from hplm.core.roles import ServedBase, served_base, served_bases
from hplm.errors import ArtifactError
from hplm.models import base as bases
from hplm.models import base_folder
from hplm.models.base import Base
from hplm.profiles.profile import Profile
from hplm.profiles.profile_store import read_profiles, write_profile
from hplm.registry.access.limits import DEFAULT
from hplm.registry.catalog import Catalog
from hplm.registry.registry import Registry
from hplm.reporting.benchmark_result import plain
from hplm.reporting.progress import Report, bar_report, progress_bars
from hplm.runtime.processor import processor_name
from hplm.store.layout import Store
from hplm.triton.launcher.instances import count_encode_processes
from hplm_cli.request_timings import (
    AskedTenant,
    RunningBase,
    ask_once,
    check_limits,
    own_server,
    process_bytes,
    time_requests,
)

DEFAULT_MODELS = Path("build/demo/models")
MIB = 1 << 20


@dataclass(frozen=True)
class ProfileLine:
    """A kept profile in the list. Latencies are of one request alone, in ms, of 16, 64 and 256 tokens."""

    base: str
    measured_at: str
    kind: str
    processor: str
    cores: int
    device: str
    dtype: str
    threads: int
    ms_16: float
    ms_64: float
    ms_256: float
    is_current: bool


def profile(
    models: Annotated[Path, typer.Option(help="Triton model repository of the base.")] = DEFAULT_MODELS,
    name: Annotated[
        str | None, typer.Option(help="Model by which clients call the base. Default: the first base.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Ask this running server over the same models, idle otherwise; default: a server of its own."
        ),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List the kept profiles of the bases; measure nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure a served base: latency by tokens, memory, times of loading. Keep the profile in the store.

    Cascades select by it, and the base's stages start from it. Measure on an idle machine, and again after a change of the
    machine, the base or the settings of its threads and formats. It takes one to five minutes.

    Examples:

      hplm profile --models /srv/hplm/models --name mpnet

      hplm profile --list
    """
    if listed:
        bases = [served_base(models, name)] if name else [served_base(models), *served_bases(models)[1:]]
        print_records([line for base in bases for line in _lines(base)], list(ProfileLine.__annotations__), as_json)
        return
    measured = _measured(served_base(models, name), url)
    if as_json:
        print_json(measured.to_json())
    else:
        _show(measured)


def _measured(served: ServedBase, url: str | None) -> Profile:
    """Measure a base and keep its profile. A base without tenants gets a quick profile, which is not kept."""
    store = Store(served.store_root, served.settings.encode.registry)
    # Minutes of measuring must not end at a store that cannot be written.
    store.profiles(served.base).mkdir(parents=True, exist_ok=True)
    base = bases.load(store.base(served.base))
    tenant = _asked_tenant(store, base)
    running = RunningBase(url, served, None) if url else None
    if tenant is not None and running is not None:
        lengths = [tokens for _, tokens in cut(ALONE, base.config.max_tokens)]
        with closing(Registry.open_read_only(store)) as registry:
            check_limits(registry.limits(tenant.name).over(registry.limits(DEFAULT)), tenant.name, lengths)
    where = "" if tenant is None else f", then requests of tenant {tenant.name} to {url or 'a server of its own'}"
    console().print(
        f"measuring base {served.base}: its stages in this process for up to two minutes{where}; one to five minutes in all",
        markup=False,
    )
    if tenant is not None and running is not None:
        ask_once(running, tenant)
    with progress_bars() as bars:
        report = _told_steps(bars, bar_report(bars, served.name))
        report("load", 0.0)
        measured = measure_stages(store, served, count_encode_processes(served.models), report)
        if tenant is None:
            console().print(f"base {served.base} has no tenant to ask: this profile is quick, and it is not kept")
            return measured
        lengths = [timing.tokens for timing in measured.request]
        report("server", 0.0)
        with nullcontext(running) if running else own_server(served, measured.conditions.threads) as asked:
            report("server", 1.0)
            requests = time_requests(asked, tenant, base.load_text_encoder(), lengths, report)
            look_up_bytes, encode_bytes = process_bytes(asked.served)
    memory = replace(measured.memory, look_up_process=look_up_bytes, encode_process=encode_bytes)
    measured = replace(measured, kind="full", request=requests, memory=memory, load_s=asked.load_s)
    write_profile(store, measured)
    return measured


def _told_steps(bars: Progress, report: Report) -> Report:
    """Return a progress callback that also prints each step when it begins, unless a terminal shows bars."""
    told: set[str] = set()

    def report_step(step: str, progress: float) -> None:
        if step not in told and not bars.console.is_terminal:
            told.add(step)
            bars.console.print(f"{step} ...", markup=False, highlight=False)
        report(step, progress)

    return report_step


def _asked_tenant(store: Store, base: Base) -> AskedTenant | None:
    """Return a tenant of the base, None if it has none. A tenant of single texts comes before a tenant of pairs."""
    found = None
    with closing(Catalog(store, base.config.name)) as catalog:
        bank = TenantBank(store, catalog, base.fingerprint)
        for tenant in sorted(catalog.served(), key=attrgetter("name")):
            try:
                found = AskedTenant(tenant.name, bank.card(tenant).texts)
            except ArtifactError as error:
                logging.getLogger(__name__).warning("tenant %s is left out: %s", tenant.name, error)
                continue
            if found.texts == 1:
                break
    return found


def _lines(served: ServedBase) -> Iterator[ProfileLine]:
    store = Store(served.store_root, served.settings.encode.registry)
    fingerprint = base_folder.read(store.base(served.base), verify=False).fingerprint
    for each in read_profiles(store, served.base):
        conditions = each.conditions
        yield ProfileLine(
            base=each.base,
            measured_at=each.measured_at,
            kind=each.kind,
            processor=conditions.processor,
            cores=conditions.cores,
            device=conditions.device,
            dtype="int8" if conditions.quantization == "int8" else conditions.dtype,
            threads=conditions.threads,
            ms_16=round(each.latency_ms(16), 2),
            ms_64=round(each.latency_ms(64), 2),
            ms_256=round(each.latency_ms(256), 2),
            is_current=conditions.fingerprint == fingerprint and conditions.processor == processor_name(),
        )


def _show(measured: Profile) -> None:
    """Print a profile for people."""
    out = Console()
    conditions, memory = measured.conditions, measured.memory
    threads = "1 thread" if conditions.threads == 1 else f"{conditions.threads} threads"
    numbers = "int8" if conditions.quantization == "int8" else conditions.dtype
    out.print(
        f"{measured.base}: {measured.kind} profile of {measured.measured_at}, {conditions.processor}, "
        f"{conditions.cores} cores, {conditions.device}, {numbers}, {threads}",
        highlight=False,
        soft_wrap=True,
    )
    alone = {timing.tokens: timing for timing in measured.encode if timing.texts == 1}
    _table(
        out,
        "one text, ms",
        ("tokens", "request", "look-up, new text", "look-up, known text", "encode stage"),
        [
            (request.tokens, request.ms, new.ms, known.ms, alone[request.tokens].ms)
            for request, new, known in zip(measured.request, measured.look_up, measured.known, strict=True)
        ],
    )
    _table(
        out,
        "batches of the encode stage, ms",
        ("texts", "tokens each", "batch", "a text"),
        [(each.texts, each.tokens, each.ms, each.ms / each.texts) for each in measured.encode if each.texts > 1],
    )
    _table(
        out,
        "layers, ms",
        ("texts", "tokens each", "layers", "first", "slowest", "last"),
        [(each.texts, each.tokens, len(each.ms), each.ms[0], max(each.ms), each.ms[-1]) for each in measured.layers],
    )
    sizes = {
        "layers' weights": memory.weights,
        "one adapter": memory.adapter,
        "all adapter slots": memory.slots,
        "tables": memory.tables,
        "1,000 waiting tokens": 1000 * memory.waiting_token,
        "look-up processes": memory.look_up_process,
        "encode processes": memory.encode_process,
    }
    _table(out, "memory, MiB", ("what", "MiB"), [(what, count / MIB) for what, count in sizes.items()])
    times = {
        "server ready, s": measured.load_s,
        "tenant from disk, ms": measured.tenant_load_ms,
        "adapter into a slot, ms": measured.swap_ms,
    }
    _table(out, "loading", ("what", "time"), [(what, taken) for what, taken in times.items() if taken is not None])


def _table(out: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str | float]]) -> None:
    table = Table(*columns, title=title, box=SIMPLE_HEAD, padding=0, title_justify="left")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, str) else plain(cell, 3) for cell in row))
    out.print(table)
