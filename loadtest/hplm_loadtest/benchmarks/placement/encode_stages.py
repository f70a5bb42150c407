"""The benchmark `hplm bench stages`: one encode stage against two, on the same cores."""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from hplm_client import Client

from hplm.core.roles import ENCODE_BACKENDS, base_roles, of_whole_base, served_base, staged_roles
from hplm.errors import ConfigError
from hplm.models import base_folder
from hplm.placement.partition import even_cut
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import progress_bars
from hplm.store.layout import Store
from hplm.triton.launcher.model_folder import write_model
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from hplm_loadtest.benchmarks.page_cache import into_page_cache
from hplm_loadtest.benchmarks.serving.open_load import MeteredRun, ServerMeter, Traffic, medians
from hplm_loadtest.scenarios.grpc_load import closed_loop
from hplm_loadtest.scenarios.outcomes import ANSWERED
from hplm_loadtest.scenarios.steady_rate import enough_requests, rate_columns, steady_rate

WARM_UP_REQUESTS = 20
FORMS = ("1 stage, 2 threads", "1 stage, 2 processes", "2 stages")


@dataclass(frozen=True)
class Variant:
    """How a server computes layers: `cut` has the layers of each encode stage, empty for one stage of all layers.

    `cores` are those of each encode stage, in each of its `instances` processes. `settings` are other settings of the encode
    stages.
    """

    cut: tuple[int, ...]
    cores: tuple[tuple[int, ...], ...]
    instances: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)


def encode_stages(
    models: Path,
    text_kind: str,
    rounds: int,
    singles: int,
    in_flight: int,
    seconds: float,
    forms: Sequence[str] = FORMS,
) -> Report:
    """Measure servers of one and of two encode stages in turns: response times of single requests, and throughput.

    All `forms` have the same two cores: one stage as a process of two threads or as two processes, and two stages as two
    processes of one thread. The look-up stage, Triton and the load generator share the cores with them. Each round sends
    `singles` requests, one at a time, and then a closed loop of `seconds` with `in_flight` requests to each server. `rate_x`
    and `p50_x` compare each server with the first.
    Raises ConfigError if there are fewer than two cores, or if the base has a single layer to cut.
    """
    variants = {form: variant for form, variant in _variants(models).items() if form in forms}
    traffic = Traffic.read(models, text_kind)
    mix = traffic.mix()
    waits_ms: dict[str, list[float]] = defaultdict(list)
    loops: dict[str, list[MeteredRun]] = defaultdict(list)
    counts: dict[str, int] = {}
    with progress_bars() as progress, ExitStack() as opened:
        servers = {name: opened.enter_context(variant_server(models, variant)) for name, variant in variants.items()}
        for name, server in servers.items():
            warm = closed_loop(server.ports.grpc_url, mix.draw(in_flight * 4, traffic.rng), in_flight)
            warm = closed_loop(server.ports.grpc_url, mix.draw(in_flight * 4, traffic.rng), in_flight)
            counts[name] = enough_requests(len(warm) / warm.duration_s, seconds, in_flight)
        bar = progress.add_task("rounds", total=rounds * len(servers))
        for turn in range(rounds):
            drawn = mix.draw(WARM_UP_REQUESTS + singles, traffic.rng)
            asked = list(zip(drawn.tenants, drawn.texts, strict=True))
            for name in list(servers)[:: -1 if turn % 2 else 1]:
                server = servers[name]
                waits_ms[name] += _waits_ms(server.ports.grpc_url, asked)[WARM_UP_REQUESTS:]
                meter = ServerMeter(server)
                run = closed_loop(server.ports.grpc_url, mix.draw(counts[name], traffic.rng), in_flight)
                loops[name].append(MeteredRun(run, meter.per_request(run)))
                progress.update(bar, advance=1)
    rows = [
        {
            "server": name,
            "layers": "+".join(map(str, variants[name].cut)) or "all",
            "p50_ms": float(np.percentile(waits_ms[name], 50)),
            "p99_ms": float(np.percentile(waits_ms[name], 99)),
            **rate_columns([run for run, _ in loops[name]]),
            **_ratio_columns(name, next(iter(servers)), loops, waits_ms),
            "unanswered": sum(code != ANSWERED for run, _ in loops[name] for code in run.codes),
            "cpu_ms": medians([cpu_ms for _, cpu_ms in loops[name]]),
        }
        for name in servers
    ]
    settings = {
        "rounds": rounds,
        "singles": singles,
        "in_flight": in_flight,
        "seconds": seconds,
        "tenants": len(traffic.names),
        **traffic.settings,
    }
    unanswered = float(sum(row["unanswered"] for row in rows))
    # Two stages are for bases that fit no single device. What they gain or lose on two cores has no goal.
    goals = [Goal("stages-unanswered", "requests not answered", 0, unanswered, "requests", "lower")]
    return Report("stages", settings, rows, goals)


def _variants(models: Path) -> Mapping[str, Variant]:
    served = served_base(models)
    config = base_folder.read(Store(served.store_root).base(served.base), verify=False).config
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2 or config.upper_layers < 2:
        raise ConfigError(
            f"two cores and two layers were expected, this process has {len(cores)} cores and base {served.base} has "
            f"{config.upper_layers} layers that an encode stage computes"
        )
    both = tuple(cores)
    return {
        FORMS[0]: Variant((), (both,)),
        FORMS[1]: Variant((), (both,), instances=2),
        FORMS[2]: Variant(even_cut(config.upper_layers, 2), ((both[0],), (both[1],))),
    }


@contextmanager
def variant_server(models: Path, variant: Variant) -> Iterator[TritonServer]:
    """Start a server over a copy of the models of the first base, with other encode stages, and wait until it is ready."""
    served = served_base(models)
    look_up, encode, _ = served.settings
    config = base_folder.read(Store(served.store_root).base(served.base), verify=False).config
    common: dict[str, Any] = {"store": str(served.store_root), "stage_layers": variant.cut}
    roles = staged_roles(served.name, len(variant.cut)) if variant.cut else base_roles(served.name)[:3]
    with tempfile.TemporaryDirectory(prefix="hplm-variant-") as folder:
        copy = Path(folder) / "models"
        for role in roles:
            values: dict[str, Any] = {"registry": encode.registry}
            is_encode = role.backend in ENCODE_BACKENDS
            if is_encode:
                own: dict[str, Any] = {**common, "stage_cores": variant.cores, **variant.settings}
                values = asdict(replace(encode, **own, stage=role.stage))
            elif role.backend is not None:
                values = asdict(replace(look_up, **common))
            written = of_whole_base(role) if config.is_whole else role
            write_model(copy, written, values, variant.instances if is_encode else None)
        into_page_cache(served.store_root)
        pinned = [core for cores in variant.cores for core in cores]
        name = "-".join(map(str, (*variant.cut, variant.instances, "cores", *pinned)))
        log = models.parent / f"triton-bench-stages-{name}.log"
        with TritonServer(copy, free_ports(), log=log, tied=True) as server:
            server.wait_ready()
            yield server


def _waits_ms(url: str, requests: Sequence[tuple[str, str]]) -> list[float]:
    """Send one request at a time; return the milliseconds of each."""
    waits = []
    with Client(url) as client:
        for request in requests:
            start_s = time.perf_counter()
            client.predict(*request)
            waits.append(1000 * (time.perf_counter() - start_s))
    return waits


def _ratio_columns(
    name: str, first: str, loops: Mapping[str, Sequence[MeteredRun]], waits_ms: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """Return the throughput and the median response time of a server over those of the first server."""
    rates = [
        steady_rate(own)[0] / steady_rate(other)[0]
        for (own, _), (other, _) in zip(loops[name], loops[first], strict=True)
    ]
    return {"rate_x": median(rates), "p50_x": float(np.median(waits_ms[name]) / np.median(waits_ms[first]))}
