"""`hplm bench tenants`: HMI's Fig. 11, throughput by number of tenants, and the response of a peer that cannot keep up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

import numpy as np
from rich.progress import Progress

from hplm.errors import ConfigError
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import progress_bars
from hplm_loadtest.figures.pictures import check_picture, line_chart
from hplm_loadtest.peers.systems import Fleet, Limits, Shape, SystemName, Systems, open_fleet
from hplm_loadtest.scenarios.open_loop import closed_loop, open_loop
from hplm_loadtest.scenarios.run import ANSWERED, LATE_S, Run, kept_up
from hplm_loadtest.scenarios.steady import enough_requests, steady_rate
from hplm_loadtest.workloads.arrivals import PoissonArrivals
from hplm_loadtest.workloads.plan import Mix, Requests
from hplm_loadtest.workloads.tenants import UniformTenants, ZipfTenants
from hplm_loadtest.workloads.texts import mean_tokens

Popularity = Literal["uniform", "zipf"]
TENANTS = (1, 10, 16, 100, 1_000, 10_000)
FEW, MANY = 16, 1_000
LONGEST_S = 300.0
# Of a server's processes each tenant is asked so many times as often: one in twenty has then not met it.
PASSES = 3
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Load:
    """How a point is measured: `in_flight` requests under way from `generators` processes, in `rounds` rounds of all systems.

    What counts is about `duration_s` without the start and the end, see `enough_requests`.

    Before it every tenant that its server has not met is asked once, or as many as can be in `warm_up_s`: what is checked and
    read when a tenant is first asked for is not what it costs to serve it. Where a server has several processes, so many times
    that most have met it, if there is time: which of them gets a request is chance.
    Response: `response_s` seconds of independent arrivals at `response_share` of what hBERT carried; 0 leaves it out.
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
    folder: Path,
    shape: Shape,
    systems: Sequence[SystemName],
    counts: Sequence[int],
    popularities: Sequence[Popularity],
    load: Load,
    limits: Limits,
    picture: Path | None,
    kind: str,
    upper: Mapping[str, Any] | None,
) -> Report:
    """Every system as a real server of its own, started and stopped in turn; medians over the rounds.

    `kind` of `hplm_loadtest.workloads.texts`: the tables know every n-gram of those of the pool.
    `upper`: settings of hBERT's upper stage
    that are not the fleet's. All compute where the fleet's hBERT
    does, but `onnxruntime` always on the processor. Raises ConfigError where they could not be compared.
    """
    check_picture(picture)
    systems, counts = list(dict.fromkeys(systems)), sorted(set(counts))
    fleet = open_fleet(folder, shape, max(counts), kind)
    servers = Systems(fleet, limits, upper)
    rates: dict[tuple[SystemName, Popularity, int], list[float]] = {}
    errors: dict[tuple[SystemName, Popularity, int], Counter[str]] = {}
    steady: dict[tuple[SystemName, Popularity, int], bool] = {}
    with progress_bars() as progress:
        for name in systems:
            servers.prepare(name, progress)
        bar = progress.add_task("points", total=load.rounds * len(systems) * len(popularities) * len(counts))
        for turn in range(load.rounds):
            for name in systems:
                with servers.start(name) as server:
                    server.wait_ready()
                    asked = 0
                    for popularity in popularities:
                        for count in counts:
                            rng = np.random.default_rng([turn, count])
                            mix, url = mix_of(fleet, popularity, count), server.ports.grpc_url
                            cold = fleet.names[asked:count]
                            run, newly = saturate(url, mix, cold, load, rng, servers.processes(name))
                            asked += newly
                            point = name, popularity, count
                            rate, is_steady = steady_rate(run)
                            rates.setdefault(point, []).append(rate)
                            steady[point] = steady.get(point, True) and is_steady
                            errors.setdefault(point, Counter()).update(c for c in run.codes if c != ANSWERED)
                            progress.update(bar, advance=1)
        rows: list[dict[str, Any]] = [
            {
                "measure": "throughput",
                **dict(zip(("system", "popularity", "tenants"), point, strict=True)),
                "requests_per_s": median(found),
                "spread": f"{min(found):.4g}-{max(found):.4g}",
                "start_left_out": steady[point],
                "errors": dict(errors[point]),
            }
            for point, found in rates.items()
        ]
        rows += responses(servers, fleet, rows, max(counts), load, progress)
    if picture is not None:
        draw(picture, rows, shape)
    settings = {
        "shape": shape,
        "fleet": str(folder),
        **asdict(load),
        **servers.about,
        "texts": kind,
        "mean_tokens": mean_tokens(fleet.texts, fleet.models),
        "protocol": "grpc",
        "client": "same machine, processes of its own",
        "swaps": "from the page cache into memory laid out beforehand, of a GPU through pinned memory; dedicated-disk past the "
        "page cache",
    }
    return Report("tenants", settings, rows, goals(rows))


def mix_of(fleet: Fleet, popularity: Popularity, count: int) -> Mix:
    """Any of the texts to any of the first `count` tenants."""
    names = fleet.names[:count]
    return Mix(UniformTenants(names) if popularity == "uniform" else ZipfTenants(names), fleet.texts)


def saturate(
    url: str, mix: Mix, cold: Sequence[str], load: Load, rng: np.random.Generator, processes: int
) -> tuple[Run, int]:
    """A closed loop long enough, once everything is warm; and how many of the `cold` tenants, not asked yet, were asked.

    `processes` of the server that each have tenants in memory of their own.
    """

    def loop(requests: Requests) -> Run:
        return closed_loop(url, requests, load.in_flight, timeout_s=LONGEST_S, generators=load.generators)

    first = loop(mix.draw(2 * load.in_flight, rng))
    most = int(load.warm_up_s * len(first) / first.duration_s)
    if asked := cold[:most]:
        passes = PASSES * processes if processes > 1 else 1
        for _ in range(max(1, min(passes, most // len(asked)))):
            # In another order each time: processes may take turns.
            order = rng.permutation(len(asked))
            loop(replace(mix.draw(len(asked), rng), tenants=[asked[i] for i in order]))
    run = first
    for _ in range(4):
        # How many requests the next takes, the last tells.
        count = enough_requests(len(run) / run.duration_s, load.duration_s, load.in_flight)
        run = loop(mix.draw(count, rng))
        if count >= enough_requests(len(run) / run.duration_s, 0.7 * load.duration_s, load.in_flight):
            break
    return run, len(asked)


def responses(
    servers: Systems, fleet: Fleet, rows: Sequence[Row], count: int, load: Load, progress: Progress
) -> list[dict[str, Any]]:
    """hBERT and `dedicated` under one open load that hBERT carries; nothing where one of them was not measured."""
    found = _rates(rows)
    compared: tuple[SystemName, ...] = ("hbert", "dedicated")
    if load.response_s <= 0 or any((name, count) not in found for name in compared):
        return []
    rate = load.response_share * found["hbert", count]
    bar = progress.add_task(f"response at {rate:.0f} requests/s", total=len(compared))
    answers = []
    for name in compared:
        mix, rng = mix_of(fleet, "uniform", count), np.random.default_rng(0)
        with servers.start(name) as server:
            server.wait_ready()
            closed_loop(server.ports.grpc_url, mix.draw(load.in_flight, rng), load.in_flight, timeout_s=LONGEST_S)
            plan = mix.plan(PoissonArrivals(rate), load.response_s, rng)
            # What is not answered by the end of the run is not waited for much longer.
            run = open_loop(server.ports.grpc_url, plan, timeout_s=load.response_s)
        waited_s, answered = waits(run)
        answers.append(
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
    return answers


def waits(run: Run) -> tuple[Any, float]:
    """Seconds from plan to answer `[k]`, to the run's end for what was not answered then; and the share that was."""
    in_run = run.answered & (run.done_s <= run.duration_s)
    return np.where(in_run, run.done_s, run.duration_s) - run.planned_s, float(in_run.mean())


def goals(rows: Sequence[Row]) -> list[Goal]:
    """What the rows answer; a goal whose systems or tenants were not measured is left out."""
    rates = _rates(rows)
    counts = sorted({count for _, count in rates})
    found = [
        Goal("tenants-errors", "requests not answered", 0, float(sum(_errors(rows))), "requests", "lower"),
    ]
    most = max(counts, default=0)
    if most > 1 and {("hbert", 1), ("hbert", most)} <= rates.keys():
        flat = rates["hbert", most] / rates["hbert", 1]
        found.append(Goal("tenants-flat", f"hBERT at {most:,} tenants over hBERT at 1", 0.95, flat, "x", "higher"))
    for peer in ("dedicated", "dedicated-disk"):
        both = [count for count in counts if {("hbert", count), (peer, count)} <= rates.keys()]
        ratios = {count: rates["hbert", count] / rates[peer, count] for count in both}
        if FEW in ratios:
            text = f"hBERT over {peer} at {FEW} tenants"
            found.append(Goal(f"tenants-{peer}-{FEW}", text, 3.0, ratios[FEW], "x", "higher"))
        if many := [ratio for count, ratio in ratios.items() if count >= MANY]:
            text = f"hBERT over {peer} at {MANY:,} tenants and more"
            found.append(Goal(f"tenants-{peer}-{MANY}", text, 10.0, min(many), "x", "higher"))
    p50 = {row["system"]: row["p50_ms"] for row in rows if row["measure"] == "response"}
    if {"hbert", "dedicated"} <= p50.keys():
        text = "median response of dedicated over hBERT's, one load for both"
        found.append(Goal("tenants-response", text, 100.0, p50["dedicated"] / p50["hbert"], "x", "higher"))
        found.append(kept_up("tenants-response", [row for row in rows if row["measure"] == "response"]))
    return found


def _rates(rows: Sequence[Row]) -> dict[tuple[str, int], float]:
    """Requests a second by system and tenants, uniform popularity."""
    chosen = (row for row in rows if row["measure"] == "throughput" and row["popularity"] == "uniform")
    return {(row["system"], row["tenants"]): row["requests_per_s"] for row in chosen}


def _errors(rows: Sequence[Row]) -> Iterable[int]:
    return (sum(row["errors"].values()) for row in rows if row["measure"] == "throughput")


def draw(picture: Path, rows: Sequence[Row], shape: str) -> None:
    """One line a system."""
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


def parse_systems(names: Sequence[str]) -> list[SystemName]:
    """Raises ConfigError naming what is not known."""
    _check_known("system", names, get_args(SystemName))
    return [name for name in get_args(SystemName) if name in names]


def parse_popularities(names: Sequence[str]) -> list[Popularity]:
    """Raises ConfigError naming what is not known."""
    _check_known("popularity", names, get_args(Popularity))
    return [name for name in get_args(Popularity) if name in names]


def _check_known(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"no {what} {name!r}; there are {', '.join(known)}")
