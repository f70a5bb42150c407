"""The benchmark `hplm bench cascade`: cascades beside each of their levels alone, and beside a vote of all levels."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from hplm_client import Client
from rich.progress import Progress

from hplm.core import wire
from hplm.core.roles import MANAGER, models_of, served_bases
from hplm.errors import ConfigError
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.charts import bar_chart, check_picture
from hplm.reporting.progress import progress_bars
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from hplm_loadtest.scenarios.grpc_load import closed_loop
from hplm_loadtest.scenarios.outcomes import ANSWERED, Run
from hplm_loadtest.scenarios.server_metrics import UP_TO_DATE_S, metric_value
from hplm_loadtest.scenarios.steady_rate import enough_requests, rate_columns, steady_rate
from hplm_loadtest.workloads.labelled_requests import LabelledRequest, as_load, read_labelled_requests

CASCADE, COCKTAIL = wire.CASCADE, "Cocktail"
# Goals against the slowest level alone.
MEAN_BELOW = 25.0  # percent of the mean latency
MOST_POINTS = 1.0  # percentage points of accuracy
P99_TIMES = 1.3
RATE_TIMES = 1.5
LOGIC_MS = 1.0
# Metrics of the model `cascade`: microseconds of its own logic, and answered texts.
LOGIC_US, ANSWERS = "hplm_cascade_logic_us_total", "hplm_cascade_answers_total"
# Requests of each round that are sent one at a time and do not count.
WARM_UP = 20


@dataclass
class TaskAnswers:
    """The answers of one variant to the requests of a task, one request at a time."""

    waits_ms: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    levels: list[str] = field(default_factory=list)
    late: int = 0


@dataclass(frozen=True)
class CascadeLoad:
    """How much is measured: rounds, requests of each task that are sent one at a time in a round, and the closed loop."""

    rounds: int = 5
    singles: int = 300
    in_flight: int = 256
    seconds: float = 20.0


def cascade(models: Path, requests_file: Path, load: CascadeLoad, picture: Path | None) -> Report:
    """Start a server over `models` and measure it, see `measure`.

    Raises ConfigError if the repository has no model `cascade` over two bases or more, and DataError for a bad file.
    """
    check_picture(picture)
    requests = read_labelled_requests(requests_file)
    bases = [base.name for base in served_bases(models)]
    if not (models / CASCADE).is_dir() or len(bases) < 2:
        raise ConfigError(
            f"{models} has no cascade over two bases or more: `hplm build export --models {models} --base BASE "
            "--name BASE` adds a second base and the model"
        )
    served = [name for name in models_of(models) if name != MANAGER.name]
    log = models.parent / "triton-bench.log"
    with TritonServer(models, free_ports(), models=served, log=log, tied=True) as server, progress_bars() as progress:
        server.wait_ready()
        report = measure(server, bases, requests, load, progress)
    if picture is not None:
        draw_picture(picture, bases, report.rows)
    return report


def measure(
    server: TritonServer,
    bases: Sequence[str],
    requests: Sequence[LabelledRequest],
    load: CascadeLoad,
    progress: Progress,
) -> Report:
    """Measure the model `cascade`, the models `bases`, and a vote of all bases, on one server, in turns.

    Each round sends `load.singles` requests of each task to all variants, one request at a time, and then a closed loop of all
    tasks' tenants mixed. Each tenant needs a version over every base. Raises the error of a tenant's first request.
    """
    url, rng = server.ports.grpc_url, np.random.default_rng(0)
    _answer_first(url, [*bases, CASCADE], requests)
    singles: dict[tuple[str, str], TaskAnswers] = defaultdict(TaskAnswers)
    loops: dict[str, list[Run]] = defaultdict(list)
    bar = progress.add_task("rounds", total=load.rounds * (1 + len(bases) + 1))
    logic = LogicMeter(server)
    for turn in range(load.rounds):
        chosen = draw_by_task(requests, load.singles, rng)
        with OneAtATime(url, bases) as senders:
            senders.send(chosen[:WARM_UP], defaultdict(TaskAnswers))
            senders.send(chosen, singles)
        progress.update(bar, advance=1)
        _saturate(url, [*bases, CASCADE], requests, load, turn, rng, loops, (progress, bar))
    logic_ms = logic.per_request_ms()
    slowest = slowest_base(bases, singles)
    rows = [*single_rows(bases, singles), *rate_rows(bases, loops)]
    settings = {
        **asdict(load),
        "tenants": len({request.tenant for request in requests}),
        "bases": list(bases),
        "slowest": slowest,
        "logic_ms": logic_ms,
    }
    return Report("cascade", settings, rows, goals_of(rows, slowest, loops, logic_ms))


def draw_by_task(requests: Sequence[LabelledRequest], count: int, rng: np.random.Generator) -> list[LabelledRequest]:
    """Return `count` requests of each task, or all of a smaller task, in random order."""
    by_task: dict[str, list[LabelledRequest]] = defaultdict(list)
    for request in requests:
        by_task[request.task].append(request)
    drawn = [members[i] for members in by_task.values() for i in rng.permutation(len(members))[:count].tolist()]
    return [drawn[i] for i in rng.permutation(len(drawn)).tolist()]


def _answer_first(url: str, models: Sequence[str], requests: Sequence[LabelledRequest]) -> None:
    """Send one request of each tenant to each model, which reads files. Raises the error of a request that is not answered."""
    first = {request.tenant: request.text for request in requests}
    for model in models:
        with Client(url, model=model) as client:
            for _ in client.predict_many(first.items()):
                pass


class OneAtATime:
    """Clients of all variants. Each request goes to all variants, one after another, which take turns at being the first.

    A context manager.
    """

    def __init__(self, url: str, bases: Sequence[str]) -> None:
        self._stack = ExitStack()
        self._clients = {name: self._stack.enter_context(Client(url, model=name)) for name in (*bases, CASCADE)}
        self._bases = bases
        self._pool = self._stack.enter_context(ThreadPoolExecutor(len(bases)))

    def __enter__(self) -> OneAtATime:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def send(self, requests: Sequence[LabelledRequest], answers: Mapping[tuple[str, str], TaskAnswers]) -> None:
        """Send requests; add what they got to `answers`, by task and variant."""
        variants = [*self._clients, COCKTAIL]
        for number, request in enumerate(requests):
            first = number % len(variants)
            for variant in variants[first:] + variants[:first]:
                found = answers[request.task, variant]
                start_s = time.perf_counter()
                label = self._vote(request) if variant == COCKTAIL else self._ask(variant, request, found)
                found.waits_ms.append(1000 * (time.perf_counter() - start_s))
                found.right.append(label == request.label)

    def _ask(self, variant: str, request: LabelledRequest, found: TaskAnswers) -> str | None:
        answer = self._clients[variant].predict(request.tenant, request.text)
        if variant == CASCADE:
            found.levels.append(answer.level or "")
            found.late += bool(answer.late)
        return answer.label

    def _vote(self, request: LabelledRequest) -> str | None:
        """Ask all bases at the same time. Most answers win; if several labels have as many, the largest sum of scores."""
        answers = self._pool.map(lambda base: self._clients[base].predict(request.tenant, request.text), self._bases)
        votes: dict[str | None, tuple[int, float]] = {}
        for answer in answers:
            count, score = votes.get(answer.label, (0, 0.0))
            votes[answer.label] = count + 1, score + (answer.score or 0.0)
        return max(votes, key=lambda label: votes[label])


def _saturate(
    url: str,
    models: Sequence[str],
    requests: Sequence[LabelledRequest],
    load: CascadeLoad,
    turn: int,
    rng: np.random.Generator,
    loops: dict[str, list[Run]],
    bar: tuple[Progress, Any],
) -> None:
    """Send each model a closed loop of about `load.seconds`; every second round goes through the models backwards."""

    def drawn(count: int) -> list[LabelledRequest]:
        return [requests[i] for i in rng.integers(len(requests), size=count).tolist()]

    for model in models[:: -1 if turn % 2 else 1]:
        if not loops[model]:
            warm = closed_loop(url, as_load(drawn(2 * load.in_flight)), load.in_flight, model=model)
            rate = len(warm) / warm.duration_s
        else:
            rate = steady_rate(loops[model][-1])[0]
        count = enough_requests(rate, load.seconds, load.in_flight)
        loops[model].append(closed_loop(url, as_load(drawn(count)), load.in_flight, model=model))
        bar[0].update(bar[1], advance=1)


class LogicMeter:
    """Reads from the server's metrics how long the model `cascade` takes for its own logic, from now on."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        self._before = self._read()

    def per_request_ms(self) -> float:
        """Return the milliseconds of own logic for each answered text; NaN if the model has answered none."""
        time.sleep(UP_TO_DATE_S)
        logic_us, texts = np.subtract(self._read(), self._before).tolist()
        return logic_us / 1000 / texts if texts else float("nan")

    def _read(self) -> tuple[float, float]:
        return metric_value(self._server, LOGIC_US), metric_value(self._server, ANSWERS)


def slowest_base(bases: Sequence[str], singles: Mapping[tuple[str, str], TaskAnswers]) -> str:
    """Return the base with the highest mean latency over all tasks: the single large level."""
    return max(
        bases, key=lambda base: fmean(fmean(found.waits_ms) for (_, name), found in singles.items() if name == base)
    )


def single_rows(bases: Sequence[str], singles: Mapping[tuple[str, str], TaskAnswers]) -> list[dict[str, Any]]:
    """Return a row for each task and variant: requests one at a time."""
    rows = []
    for task in dict.fromkeys(task for task, _ in singles):
        for variant in (*bases, COCKTAIL, CASCADE):
            found = singles[task, variant]
            p50, p75, p99 = np.percentile(found.waits_ms, [50, 75, 99]).tolist()
            row = {
                "task": task,
                "variant": variant,
                "requests": len(found.right),
                "accuracy": 100 * fmean(found.right),
                "mean_ms": fmean(found.waits_ms),
                "p50_ms": p50,
                "p75_ms": p75,
                "p99_ms": p99,
            }
            if variant == CASCADE:
                shares = Counter(found.levels)
                row["levels"] = {level: round(count / len(found.levels), 3) for level, count in shares.items()}
                row["late"] = found.late
            rows.append(row)
    return rows


def rate_rows(bases: Sequence[str], loops: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """Return a row for each variant: requests per second at saturation.

    The rate of Cocktail is computed: each request is work for all bases, so the times of an answer add up.
    """
    rows = [
        {
            "saturated": model,
            **rate_columns(runs),
            "unanswered": sum(code != ANSWERED for run in runs for code in run.codes),
        }
        for model, runs in loops.items()
    ]
    rates = {row["saturated"]: row["requests_per_s"] for row in rows}
    together = 1 / sum(1 / rates[base] for base in bases)
    return [*rows, {"saturated": COCKTAIL, "requests_per_s": together, "spread": "computed", "unanswered": 0}]


def goals_of(
    rows: Sequence[Mapping[str, Any]], slowest: str, loops: Mapping[str, Sequence[Run]], logic_ms: float
) -> list[Goal]:
    """Return the goals of the cascade against the slowest level alone."""
    by_task = {(row["task"], row["variant"]): row for row in rows if "task" in row}
    pairs = [(by_task[task, slowest], row) for (task, variant), row in by_task.items() if variant == CASCADE]
    below = fmean(100 * (1 - row["mean_ms"] / large["mean_ms"]) for large, row in pairs)
    rates = [
        steady_rate(ours)[0] / steady_rate(large)[0] for ours, large in zip(loops[CASCADE], loops[slowest], strict=True)
    ]
    unanswered = float(sum(row["unanswered"] for row in rows if "saturated" in row))
    against = f"of the cascade against {slowest} alone"
    return [
        Goal("cascade-mean", f"mean latency {against}, average over tasks", MEAN_BELOW, below, "% below", "higher"),
        Goal(
            "cascade-accuracy",
            f"accuracy lost {against}, average over tasks",
            MOST_POINTS,
            fmean(large["accuracy"] - row["accuracy"] for large, row in pairs),
            "points",
            "lower",
        ),
        Goal(
            "cascade-p99",
            f"p99 {against}, the worst task",
            P99_TIMES,
            max(row["p99_ms"] / large["p99_ms"] for large, row in pairs),
            "x",
            "lower",
        ),
        Goal("cascade-rate", f"throughput {against}, tenants mixed", RATE_TIMES, median(rates), "x", "higher"),
        Goal("cascade-logic", "own logic of the model cascade for a request", LOGIC_MS, logic_ms, "ms", "lower"),
        Goal("cascade-unanswered", "requests not answered at saturation", 0, unanswered, "requests", "lower"),
    ]


def draw_picture(path: Path, bases: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the mean latency of each task, one request at a time, by variant."""
    by_task = {(row["task"], row["variant"]): row["mean_ms"] for row in rows if "task" in row}
    tasks = [*dict.fromkeys(task for task, _ in by_task)]
    bars = {variant: [by_task[task, variant] for task in tasks] for variant in (*bases, COCKTAIL, CASCADE)}
    bar_chart(path, tasks, bars, title="Mean latency, one request at a time", y_label="mean latency (ms)")
