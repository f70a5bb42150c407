"""The benchmark `hplm bench students`: students by their number, beside teacher, half-depth model and n-gram base (Table 2).

One server has the models of all bases. The number of students of an answer is that of its tenant, so each number has tenants
of its own. Under a burst the server lowers the number by itself.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from hplm_client import Client
from rich.progress import Progress

from hplm.core.roles import ServedBase, served_bases
from hplm.errors import ConfigError
from hplm.models import base_folder
from hplm.models.device import use_threads
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.charts import check_picture
from hplm.reporting.progress import progress_bars
from hplm.store.layout import Store
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from hplm.workloads.arrivals import TraceArrivals
from hplm_loadtest.benchmarks.engine.students import LENGTHS, TimedEngine, time_one_text
from hplm_loadtest.benchmarks.served_repository import read_repository
from hplm_loadtest.benchmarks.serving.students_burst import Burst, BurstPlan, burst_rows, draw_burst, run_burst
from hplm_loadtest.scenarios.grpc_load import closed_loop, open_loop
from hplm_loadtest.scenarios.outcomes import Run
from hplm_loadtest.scenarios.result_rows import combine_runs, load_goals
from hplm_loadtest.scenarios.steady_rate import enough_requests, rate_columns, steady_rate
from hplm_loadtest.workloads.labelled_requests import LabelledRequest, as_load, read_labelled_requests
from hplm_loadtest.workloads.lengths import texts_of_lengths
from hplm_loadtest.workloads.load_plan import LoadPlan
from hplm_loadtest.workloads.texts import pool_texts

# Goals of the paper's Table 2, as engine time of the others over that of students.
ENGINE_TIMES = 1.6
# The least share of the ratio of matrix products that becomes throughput.
PRODUCTS_SHARE = 0.8
# The rate of the trace, as a share of the slowest model's throughput: all models can bear it.
TRACE_SHARE = 0.5
LEAST_PAIRS = 60  # different requests of a repository without a file of requests
WARM_UP = 20  # requests of each round that are sent one at a time and do not count


@dataclass(frozen=True)
class StudentsLoad:
    """How much is measured: rounds, requests one at a time in a round, the closed loop, and the seconds of each load."""

    rounds: int = 3
    singles: int = 200
    in_flight: int = 128
    seconds: float = 20.0


@dataclass(frozen=True)
class Variant:
    """A model, or the trunk's model with the tenants of one number of students, and the requests that it answers."""

    name: str
    model: str
    students: int
    requests: Sequence[LabelledRequest]

    def draw(self, count: int, rng: np.random.Generator) -> list[LabelledRequest]:
        """Draw requests, all equally likely."""
        return [self.requests[i] for i in rng.integers(len(self.requests), size=count).tolist()]


@dataclass
class Singles:
    """The answers to a variant's requests, one request at a time."""

    waits_ms: list[float] = field(default_factory=list)
    students: list[int] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)


def students(
    models: Path,
    trace: Path,
    requests_file: Path | None,
    load: StudentsLoad,
    threads: int,
    picture: Path | None,
) -> Report:
    """Measure engines in-process, then a server over `models`.

    Without a file of requests, the pool's texts go to all tenants, and an answer is right if it is that of all students of an
    idle server. Raises ConfigError if the repository has no trunk or no other base, and DataError for a bad file.
    """
    check_picture(picture)
    use_threads(threads)
    TraceArrivals(trace, 1.0).times(1.0, np.random.default_rng(0))
    served = served_bases(models)
    trunk = find_trunk(served)
    requests = read_labelled_requests(requests_file) if requests_file else pool_requests(models, trunk.name)
    variants = variants_of(models, [base.name for base in served], trunk.name, requests)
    log = models.parent / "triton-bench.log"
    loaded = [role.name for base in served for role in base.roles]
    with progress_bars() as progress:
        engine_rows, flop = engine_times(models, served, variants, load.rounds, progress)
        with TritonServer(models, free_ports(), models=loaded, log=log, tied=True) as server:
            server.wait_ready()
            url = server.ports.grpc_url
            if not requests_file:
                variants = labelled_by_server(url, variants)
            rows, burst = measure(url, trunk.name, variants, trace, load, progress)
    if picture is not None:
        burst.draw(picture)
    settings = {
        **asdict(load),
        "threads": threads,
        "trace": trace.name,
        "models": {base.name: base.base for base in served},
        "tenants": {variant.name: len({one.tenant for one in variant.requests}) for variant in variants},
        "products_gflop": {name: value / 1e9 for name, value in flop.items()},
        "burst": asdict(burst.plan),
    }
    all_rows = [*engine_rows, *rows, *burst_rows(burst)]
    return Report("students", settings, all_rows, goals_of(all_rows, variants, trunk.name, flop))


def find_trunk(served: Sequence[ServedBase]) -> ServedBase:
    """Return the only base that is a trunk. Raises ConfigError if there is not exactly one, or no other base."""
    trunks = [one for one in served if base_folder.read(Store(one.store_root).base(one.base)).is_trunk]
    if len(trunks) != 1 or len(served) < 2:
        raise ConfigError(
            f"one trunk and other bases are needed, and the repository has {len(trunks)} trunks of {len(served)} bases: "
            "`hplm build fleet --students 6` builds such a repository"
        )
    return trunks[0]


def students_of_tenants(models: Path, model: str) -> dict[str, int]:
    """Return the number of students of each tenant over a model's base."""
    with read_repository(models, model).open_tenants() as (bank, tenants):
        return {tenant.name: bank.card(tenant).students for tenant in tenants}


def pool_requests(models: Path, trunk: str) -> list[LabelledRequest]:
    """Return requests of the pool's texts to the trunk's tenants, without labels."""
    texts = pool_texts(models)
    tenants = sorted(students_of_tenants(models, trunk))
    count = max(LEAST_PAIRS, len(tenants))
    pairs = [(tenants[i % len(tenants)], texts[i % len(texts)]) for i in range(count)]
    return [LabelledRequest("pool", tenant, text, "?") for tenant, text in pairs]


def variants_of(models: Path, bases: Sequence[str], trunk: str, requests: Sequence[LabelledRequest]) -> list[Variant]:
    """Return the trunk's variants by number of students, then the other models, which answer all requests."""
    numbers = students_of_tenants(models, trunk)
    by_number: dict[int, list[LabelledRequest]] = defaultdict(list)
    for request in requests:
        if request.tenant not in numbers:
            raise ConfigError(f"tenant {request.tenant} of a request is not served by the trunk's model {trunk}")
        by_number[numbers[request.tenant]].append(request)
    own = [Variant(f"{trunk} k={number}", trunk, number, by_number[number]) for number in sorted(by_number)]
    return [*own, *(Variant(base, base, 1, requests) for base in bases if base != trunk)]


def labelled_by_server(url: str, variants: Sequence[Variant]) -> list[Variant]:
    """Return the variants with the answers of an idle server as labels."""
    labelled = []
    for variant in variants:
        with Client(url, model=variant.model) as client:
            labels = [client.predict(one.tenant, one.text).label or "" for one in variant.requests]
        marked = [replace(one, label=label) for one, label in zip(variant.requests, labels, strict=True)]
        labelled.append(replace(variant, requests=marked))
    return labelled


def engine_times(
    models: Path, served: Sequence[ServedBase], variants: Sequence[Variant], rounds: int, progress: Progress
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the rows of one text in each engine, and each base's multiplications and additions of such a text."""
    engines = {}
    for base in served:
        # Of several tenants the one with most students; variants are in the order of their numbers.
        name = [one for one in variants if one.model == base.name][-1].requests[0].tenant
        opened = read_repository(models, base.name)
        with opened.open_tenants() as (bank, tenants):
            tenant = bank.load(next(tenant for tenant in tenants if tenant.name == name))
        engines[base.name] = TimedEngine.of(opened, tenant)
    encoder = read_repository(models).base.load_text_encoder()
    texts = texts_of_lengths(LENGTHS, [one.text for one in variants[-1].requests], encoder, np.random.default_rng(0))
    encoded = encoder.encode(texts)
    rows = time_one_text(engines, encoded, rounds, progress)
    flop = {name: fmean(engine.flop(text) for text in encoded) for name, engine in engines.items()}
    for engine in engines.values():
        engine.engine.close()
    return rows, flop


def measure(
    url: str, trunk: str, variants: Sequence[Variant], trace: Path, load: StudentsLoad, progress: Progress
) -> tuple[list[dict[str, Any]], Burst]:
    """Measure all variants on one server, in turns; return the rows, and the burst of the tenants with most students."""
    rng = np.random.default_rng(0)
    bar = progress.add_task("rounds", total=load.rounds * (1 + 2 * len(variants)) + 1)
    singles: dict[str, Singles] = defaultdict(Singles)
    loops: dict[str, list[Run]] = defaultdict(list)
    traced: dict[str, list[Run]] = defaultdict(list)
    for turn in range(load.rounds):
        _send_singles(url, variants, load.singles, rng, singles)
        progress.update(bar, advance=1)
        for variant in variants[:: -1 if turn % 2 else 1]:
            loops[variant.name].append(_saturated(url, variant, load, rng, loops[variant.name]))
            progress.update(bar, advance=1)
    rates = {name: median(steady_rate(run)[0] for run in runs) for name, runs in loops.items()}
    rate_per_s = TRACE_SHARE * min(rates.values())
    for turn in range(load.rounds):
        times_s = TraceArrivals(trace, rate_per_s).times(load.seconds, np.random.default_rng([1, turn]))
        for variant in variants[:: -1 if turn % 2 else 1]:
            plan = LoadPlan(times_s, as_load(variant.draw(len(times_s), rng)), load.seconds)
            traced[variant.name].append(open_loop(url, plan, model=variant.model))
            progress.update(bar, advance=1)
    own = [variant for variant in variants if variant.model == trunk]
    few, many = own[0], own[-1]
    # At saturation the cap falls to one student, whatever the tenant has.
    burst = BurstPlan.of(rates[few.name], many.students, load.seconds)
    times_s = burst.times(np.random.default_rng(2))
    drawn = many.draw(len(times_s), rng)
    result = run_burst(url, trunk, draw_burst(burst, times_s, drawn), drawn, burst)
    progress.update(bar, advance=1)
    rows = [single_row(variant, singles[variant.name]) for variant in variants]
    rows += [
        {
            "saturated": variant.name,
            **rate_columns(loops[variant.name]),
            "unanswered": sum(len(run) - run.kinds["answered"] for run in loops[variant.name]),
        }
        for variant in variants
    ]
    rows += [{"trace": variant.name, **combine_runs(traced[variant.name])} for variant in variants]
    return rows, result


def _send_singles(
    url: str, variants: Sequence[Variant], count: int, rng: np.random.Generator, found: Mapping[str, Singles]
) -> None:
    """Send `count` requests to each variant, one at a time; variants take turns at being the first."""
    with ExitStack() as stack:
        clients = {variant.name: stack.enter_context(Client(url, model=variant.model)) for variant in variants}
        drawn = {variant.name: variant.draw(WARM_UP + count, rng) for variant in variants}
        for number in range(WARM_UP + count):
            first = number % len(variants)
            for variant in [*variants[first:], *variants[:first]]:
                request = drawn[variant.name][number]
                start_s = time.perf_counter()
                answer = clients[variant.name].predict(request.tenant, request.text)
                wait_ms = 1000 * (time.perf_counter() - start_s)
                if number >= WARM_UP:
                    singles = found[variant.name]
                    singles.waits_ms.append(wait_ms)
                    singles.students.append(answer.students or 1)
                    singles.right.append(answer.label == request.label)


def _saturated(url: str, variant: Variant, load: StudentsLoad, rng: np.random.Generator, before: Sequence[Run]) -> Run:
    """Send a closed loop of about `load.seconds` to a variant."""
    if before:
        rate = steady_rate(before[-1])[0]
    else:
        warm = closed_loop(url, as_load(variant.draw(2 * load.in_flight, rng)), load.in_flight, model=variant.model)
        rate = len(warm) / warm.duration_s
    count = enough_requests(rate, load.seconds, load.in_flight)
    return closed_loop(url, as_load(variant.draw(count, rng)), load.in_flight, model=variant.model)


def single_row(variant: Variant, found: Singles) -> dict[str, Any]:
    """Return the row of a variant, one request at a time."""
    p95, p99 = np.percentile(found.waits_ms, [95, 99]).tolist()
    return {
        "single": variant.name,
        "requests": len(found.right),
        "mean_ms": fmean(found.waits_ms),
        "p95_ms": p95,
        "p99_ms": p99,
        "students": fmean(found.students),
        "accuracy": 100 * fmean(found.right),
    }


def goals_of(
    rows: Sequence[Mapping[str, Any]], variants: Sequence[Variant], trunk: str, flop: Mapping[str, float]
) -> list[Goal]:
    """Return the goals against each other base in the engine, and against the slowest at saturation."""
    most = max(variant.students for variant in variants if variant.model == trunk)
    ms: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in rows:
        if "engine" in row:
            ms[row["engine"], row["students"]].append(row["ms"])
    goals = []
    for base in flop:
        if base != trunk:
            times = fmean(other / own for other, own in zip(ms[base, 1], ms[trunk, most], strict=True))
            text = f"engine time of one text, {base} over {trunk} with {most} students"
            goals.append(Goal(f"students-engine-{base}", text, ENGINE_TIMES, times, "x", "higher"))
    rates = {row["saturated"]: row["requests_per_s"] for row in rows if "saturated" in row}
    few = next(variant for variant in variants if variant.model == trunk)
    slowest = max((base for base in flop if base != trunk), key=lambda base: flop[base])
    share = (rates[few.name] / rates[slowest]) / (flop[slowest] / flop[trunk])
    text = f"throughput of {few.name} over {slowest}, as a share of the ratio of matrix products"
    goals.append(Goal("students-throughput", text, PRODUCTS_SHARE, share, "", "higher"))
    bursts = [row for row in rows if "lost" in row and "second" in row]
    lost = float(sum(row["lost"] for row in bursts))
    goals.append(Goal("students-burst-lost", "requests lost or failed in the burst", 0, lost, "requests", "lower"))
    goals += load_goals("students-trace", [row for row in rows if "trace" in row])
    return goals
