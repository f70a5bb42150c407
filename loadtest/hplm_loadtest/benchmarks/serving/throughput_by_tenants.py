"""The benchmark `hplm bench tenants`: HMI's Fig. 11, throughput of hBERT and its peers by number of tenants.

It also compares response times of hBERT and the peer `dedicated` under one load.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.progress import Progress

from hplm.errors import ConfigError
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.charts import check_picture, line_chart
from hplm.reporting.progress import progress_bars
from hplm.workloads.arrivals import PoissonArrivals
from hplm.workloads.tenants import UniformTenants, ZipfTenants
from hplm_loadtest.peers.systems import Fleet, Limits, Shape, SystemName, Systems, open_fleet
from hplm_loadtest.scenarios.grpc_load import closed_loop, open_loop
from hplm_loadtest.scenarios.outcomes import ANSWERED, LATE_S, Run
from hplm_loadtest.scenarios.result_rows import kept_up_goal
from hplm_loadtest.scenarios.steady_rate import enough_requests, rate_columns
from hplm_loadtest.workloads.load_plan import RequestMix, Requests
from hplm_loadtest.workloads.texts import mean_tokens

Popularity = Literal["uniform", "zipf"]
TENANTS = [1, 10, 16, 100, 1_000, 10_000]
FEW, MANY = 16, 1_000
TIMEOUT_S = 300.0  # of each request in a closed loop
# Warm-up requests per tenant and server process. Which process gets a request is chance: with three requests, about one
# process in twenty has not met the tenant.
PASSES = 3
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Load:
    """How one point, a system with a popularity and a number of tenants, is measured.

    duration_s: measured seconds, without the start and the end, see `enough_requests`.
    warm_up_s: at most so many seconds are spent on a first request to each tenant that the server has not met. A first request
        reads and checks files, which the benchmark does not measure. A server of several processes gets several requests per
        tenant, so that most processes meet the tenant.
    rounds: rounds over all systems. in_flight: requests under way. generators: processes that send.
    response_s: seconds of independent arrivals at `response_share` of hBERT's throughput; 0 leaves the response times out.
    """

    duration_s: float = 10.0
    warm_up_s: float = 150.0
    rounds: int = 3
    in_flight: int = 128
    response_s: float = 60.0
    response_share: float = 0.6
    generators: int = 1

    def __post_init__(self) -> None:
        if self.generators > self.in_flight:
            raise ConfigError(f"{self.generators} generators cannot have {self.in_flight} requests under way")


def throughput_by_tenants(
    folder: Path | None,
    shape: Shape,
    systems: Sequence[SystemName],
    counts: Sequence[int],
    popularities: Sequence[Popularity],
    load: Load,
    limits: Limits,
    picture: Path | None,
    text_kind: str,
    slots: int = 0,
) -> Report:
    """Measure every system as a real server, one server at a time; return medians over the rounds.

    text_kind: see `texts_of_kind`; the tables hold every n-gram of the pool's texts.
    folder: by default build/fleet-SHAPE-10000. slots: num_slots of each encode process of hBERT; 0: as in the fleet, else 64.

    All systems compute on the device of the fleet's hBERT, except `onnxruntime`, which always computes on the processor. Raises
    ConfigError if the systems cannot be compared.
    """
    check_picture(picture)
    folder = folder or Path(f"build/fleet-{shape}-10000")
    systems, counts = list(dict.fromkeys(systems)), sorted(set(counts))
    fleet = open_fleet(folder, shape, max(counts), text_kind)
    servers = Systems(fleet, limits, {"num_slots": slots} if slots else None)
    runs: dict[tuple[SystemName, Popularity, int], list[Run]] = defaultdict(list)
    with progress_bars() as progress:
        for name in systems:
            servers.prepare(name, progress)
        bar = progress.add_task("points", total=load.rounds * len(systems) * len(popularities) * len(counts))
        for turn in range(load.rounds):
            for name in systems:
                with servers.start(name) as server:
                    server.wait_ready()
                    warm = 0  # the first so many tenants have met the server
                    for popularity in popularities:
                        for count in counts:
                            rng = np.random.default_rng([turn, count])
                            mix, url = mix_of(fleet, popularity, count), server.ports.grpc_url
                            cold = fleet.names[warm:count]
                            run, warmed = saturate_warm(url, mix, cold, load, rng, servers.processes(name))
                            warm += warmed
                            runs[name, popularity, count].append(run)
                            progress.update(bar, advance=1)
        rows: list[dict[str, Any]] = [
            {
                "measure": "throughput",
                "system": name,
                "popularity": popularity,
                "tenants": count,
                **rate_columns(point_runs),
                "errors": dict(Counter(code for run in point_runs for code in run.codes if code != ANSWERED)),
            }
            for (name, popularity, count), point_runs in runs.items()
        ]
        rows += responses(servers, fleet, rows, max(counts), load, progress)
    if picture is not None:
        draw(picture, rows, shape)
    settings = {
        "shape": shape,
        "fleet": str(folder),
        **asdict(load),
        **servers.settings,
        "texts": text_kind,
        "mean_tokens": mean_tokens(fleet.texts, fleet.models),
        "protocol": "grpc",
        "client": "same machine, processes of its own",
        "swaps": "from the page cache into memory laid out beforehand, of a GPU through pinned memory",
    }
    return Report("tenants", settings, rows, goals(rows))


def mix_of(fleet: Fleet, popularity: Popularity, count: int) -> RequestMix:
    """Return requests of random texts to random tenants among the first `count`."""
    names = fleet.names[:count]
    return RequestMix(UniformTenants(names) if popularity == "uniform" else ZipfTenants(names), fleet.texts)


def saturate_warm(
    url: str, mix: RequestMix, cold: Sequence[str], load: Load, rng: np.random.Generator, processes: int
) -> tuple[Run, int]:
    """Warm the server up, then run a closed loop that is long enough; return the run and the number of tenants warmed up.

    cold: tenants that the server has not met. processes: the server's processes, each with tenants in memory of its own.
    """

    def loop(requests: Requests) -> Run:
        return closed_loop(url, requests, load.in_flight, timeout_s=TIMEOUT_S, generators=load.generators)

    first = loop(mix.draw(2 * load.in_flight, rng))
    affordable = int(load.warm_up_s * len(first) / first.duration_s)
    if warmed := cold[:affordable]:
        passes = PASSES * processes if processes > 1 else 1
        for _ in range(max(1, min(passes, affordable // len(warmed)))):
            # In another order each time, because the processes may take turns.
            order = rng.permutation(len(warmed))
            loop(replace(mix.draw(len(warmed), rng), tenants=[warmed[i] for i in order]))
    run = first
    for _ in range(4):
        # The last run tells how many requests the next run needs.
        count = enough_requests(len(run) / run.duration_s, load.duration_s, load.in_flight)
        run = loop(mix.draw(count, rng))
        if count >= enough_requests(len(run) / run.duration_s, 0.7 * load.duration_s, load.in_flight):
            break
    return run, len(warmed)


def responses(
    servers: Systems, fleet: Fleet, rows: Sequence[Row], count: int, load: Load, progress: Progress
) -> list[dict[str, Any]]:
    """Measure response times of hBERT and `dedicated` under one open load that hBERT carries.

    Returns no rows if the throughput of one of them was not measured.
    """
    rates = _rates(rows)
    compared: tuple[SystemName, ...] = ("hbert", "dedicated")
    if load.response_s <= 0 or any((name, count) not in rates for name in compared):
        return []
    rate = load.response_share * rates["hbert", count]
    bar = progress.add_task(f"response at {rate:.0f} requests/s", total=len(compared))
    response_rows = []
    for name in compared:
        mix, rng = mix_of(fleet, "uniform", count), np.random.default_rng(0)
        with servers.start(name) as server:
            server.wait_ready()
            closed_loop(server.ports.grpc_url, mix.draw(load.in_flight, rng), load.in_flight, timeout_s=TIMEOUT_S)
            plan = mix.plan(PoissonArrivals(rate), load.response_s, rng)
            # Requests without an answer by the end of the run are not waited for much longer.
            run = open_loop(server.ports.grpc_url, plan, timeout_s=load.response_s)
        waited_s, answered = waits(run)
        response_rows.append(
            {
                "measure": "response",
                "system": name,
                "popularity": "uniform",
                "tenants": count,
                "offered_per_s": rate,
                "p50_ms": 1000 * float(np.median(waited_s)),
                "unanswered": f"{100 * (1 - answered):.0f} % at the end, counted at the time waited so far",
                "kept_up": run.sent_within(LATE_S),
            }
        )
        progress.update(bar, advance=1)
    return response_rows


def waits(run: Run) -> tuple[Any, float]:
    """Return the seconds from plan to answer `[k]`, and the share of requests answered before the run's end.

    A request that was not answered by then counts with the seconds until the end.
    """
    in_run = run.answered & (run.done_s <= run.duration_s)
    return np.where(in_run, run.done_s, run.duration_s) - run.planned_s, float(in_run.mean())


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Return the goals of the rows, without goals whose systems or numbers of tenants were not measured."""
    rates = _rates(rows)
    counts = sorted({count for _, count in rates})
    errors = sum(sum(row["errors"].values()) for row in rows if row["measure"] == "throughput")
    reached = [Goal("tenants-errors", "requests not answered", 0, float(errors), "requests", "lower")]
    most = max(counts, default=0)
    if most > 1 and {("hbert", 1), ("hbert", most)} <= rates.keys():
        flat = rates["hbert", most] / rates["hbert", 1]
        reached.append(Goal("tenants-flat", f"hBERT at {most:,} tenants over hBERT at 1", 0.95, flat, "x", "higher"))
    both = [count for count in counts if {("hbert", count), ("dedicated", count)} <= rates.keys()]
    ratios = {count: rates["hbert", count] / rates["dedicated", count] for count in both}
    if FEW in ratios:
        text = f"hBERT over dedicated at {FEW} tenants"
        reached.append(Goal(f"tenants-dedicated-{FEW}", text, 3.0, ratios[FEW], "x", "higher"))
    if many := [ratio for count, ratio in ratios.items() if count >= MANY]:
        text = f"hBERT over dedicated at {MANY:,} tenants and more"
        reached.append(Goal(f"tenants-dedicated-{MANY}", text, 10.0, min(many), "x", "higher"))
    p50 = {row["system"]: row["p50_ms"] for row in rows if row["measure"] == "response"}
    if {"hbert", "dedicated"} <= p50.keys():
        text = "median response of dedicated over hBERT's, one load for both"
        reached.append(Goal("tenants-response", text, 100.0, p50["dedicated"] / p50["hbert"], "x", "higher"))
        reached.append(kept_up_goal("tenants-response", [row for row in rows if row["measure"] == "response"]))
    return reached


def _rates(rows: Sequence[Row]) -> dict[tuple[str, int], float]:
    """Return the requests per second by system and number of tenants, of uniform popularity."""
    uniform = (row for row in rows if row["measure"] == "throughput" and row["popularity"] == "uniform")
    return {(row["system"], row["tenants"]): row["requests_per_s"] for row in uniform}


def draw(picture: Path, rows: Sequence[Row], shape: str) -> None:
    """Draw one line per system."""
    series: dict[str, tuple[list[float], list[float]]] = {}
    for (name, count), rate in _rates(rows).items():
        x, y = series.setdefault(name, ([], []))
        x.append(count)
        y.append(rate)
    line_chart(
        picture,
        series,
        title=f"Throughput by number of tenants ({shape})",
        x_label="tenants",
        y_label="requests/s",
        log=True,
    )
