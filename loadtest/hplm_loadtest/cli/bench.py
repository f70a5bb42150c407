"""The command `hplm bench`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from hplm.core.settings import Quantization
from hplm.errors import ConfigError
from hplm.reporting.benchmark_result import JsonOption
from hplm.reporting.command_options import CommandGroup
from hplm.scheduling.policy_loader import load_policy
from hplm_loadtest.benchmarks.access.flood import FloodLoad, access_flood
from hplm_loadtest.benchmarks.access.key_check import key_check
from hplm_loadtest.benchmarks.access.quotas import SCENARIOS as QUOTA_SCENARIOS
from hplm_loadtest.benchmarks.access.quotas import QuotaLoad, access_quotas
from hplm_loadtest.benchmarks.access.revocation import access_revocation
from hplm_loadtest.benchmarks.access.throughput import access_throughput
from hplm_loadtest.benchmarks.all_benchmarks import run_all
from hplm_loadtest.benchmarks.attacks.example_proxy import EXAMPLE
from hplm_loadtest.benchmarks.attacks.malformed import malformed
from hplm_loadtest.benchmarks.attacks.wrong_keys import wrong_keys
from hplm_loadtest.benchmarks.engine.adapters import adapters
from hplm_loadtest.benchmarks.engine.importance import importance
from hplm_loadtest.benchmarks.engine.int8 import int8
from hplm_loadtest.benchmarks.engine.limit import limit
from hplm_loadtest.benchmarks.engine.lookup import plot_lookup
from hplm_loadtest.benchmarks.engine.upper import upper_layers
from hplm_loadtest.benchmarks.failures.recovery import recovery
from hplm_loadtest.benchmarks.papers.batching import MODES, batching
from hplm_loadtest.benchmarks.papers.schedulers import POLICIES, SETTINGS, schedulers
from hplm_loadtest.benchmarks.placement.encode_stages import encode_stages
from hplm_loadtest.benchmarks.placement.placement import FIGURES as PLACEMENT_FIGURES
from hplm_loadtest.benchmarks.placement.placement import placement
from hplm_loadtest.benchmarks.served_repository import DEMO
from hplm_loadtest.benchmarks.serving.burst import burst
from hplm_loadtest.benchmarks.serving.cascade import CascadeLoad, cascade
from hplm_loadtest.benchmarks.serving.memory import COUNTS as MEMORY_TENANTS
from hplm_loadtest.benchmarks.serving.memory import memory_by_tenants
from hplm_loadtest.benchmarks.serving.mixed import mixed
from hplm_loadtest.benchmarks.serving.overload import TIMES as OVERLOAD_TIMES
from hplm_loadtest.benchmarks.serving.overload import overload
from hplm_loadtest.benchmarks.serving.pipeline import pipeline
from hplm_loadtest.benchmarks.serving.request import whole_requests
from hplm_loadtest.benchmarks.serving.response import TENANTS as RESPONSE_TENANTS
from hplm_loadtest.benchmarks.serving.response import response
from hplm_loadtest.benchmarks.serving.route import route
from hplm_loadtest.benchmarks.serving.students import StudentsLoad, students
from hplm_loadtest.benchmarks.serving.throughput_by_tenants import TENANTS as THROUGHPUT_TENANTS
from hplm_loadtest.benchmarks.serving.throughput_by_tenants import (
    Load,
    Popularity,
    throughput_by_tenants,
)
from hplm_loadtest.benchmarks.serving.trace import trace
from hplm_loadtest.benchmarks.serving.waves import SIZES as WAVE_SIZES
from hplm_loadtest.benchmarks.serving.waves import waves
from hplm_loadtest.peers.systems import Limits, Shape, SystemName
from hplm_loadtest.scenarios.stop_signals import stop_on_signals

app = CommandGroup(
    callback=lambda: stop_on_signals("bench"),
    no_args_is_help=True,
    help="Measure look-up, upper layers, whole requests and response under load. Variants take turns; medians are shown. "
    "The status is 0 also if goals are missed.",
    epilog="Example: hplm bench request --json request.json",
)
REQUEST_SIZES = [1, 16, 64]
SYSTEMS: list[str] = list(get_args(SystemName))
POPULARITIES: list[str] = list(get_args(Popularity))
FLEET = Path("build/fleet-bert-base-10000/models")
BATCHING_MODES = list(MODES)
FIGURE_NAMES = list(PLACEMENT_FIGURES)
BATCHING_RATES = [0.5, 1.0, 2.0]
ModelsOption = Annotated[Path, typer.Option("--models", help="Triton model repository.")]
PictureOption = Annotated[Path | None, typer.Option("--picture", help="Also draw the result: a .svg or .png file.")]
TextsOption = Annotated[
    str,
    typer.Option(
        "--texts",
        help="pool: texts that a fleet's tables know; unseen: sentences of Wikipedia; shuffled: their words in random orders; "
        "examples: the tenants' example texts; or a file of texts, one a line.",
    ),
]
LookUpThreadsOption = Annotated[
    int, typer.Option(min=0, help="Threads that compute n-grams that no table has; 0: one, as served.")
]
QuickOption = Annotated[bool, typer.Option("--quick", help="Take seconds or minutes: one round, less load.")]
RegistryOption = Annotated[
    str,
    typer.Option(
        help="URL of an empty PostgreSQL database for keys and quotas; default: a copy of the registry's file."
    ),
]
RoundsOption = Annotated[int, typer.Option(min=1, help="Rounds that count.")]


@dataclass(frozen=True)
class Output:
    """The options of every benchmark that draws its result."""

    quick: QuickOption = False
    picture: PictureOption = None
    json_file: JsonOption = None


def choose(what: str, names: Collection[str], choices: Sequence[str]) -> list[Any]:
    """Return the named choices, in the order of `choices`. Raises ConfigError for a name that is no choice."""
    if unknown := sorted(set(names) - set(choices)):
        raise ConfigError(f"no {what} {unknown[0]!r}; there are {', '.join(choices)}")
    return [name for name in choices if name in names]


def check_policies(names: list[str]) -> None:
    """Check the names of policies before a server is started. Raises ConfigError with the names of all policies."""
    for name in names:
        load_policy(name, {})


@app.command(name="plot-lookup")
def bench_lookup(models: ModelsOption = DEMO, rounds: RoundsOption = 9, json_file: JsonOption = None) -> None:
    """Measure a 128-token look-up from memory, and how many windows of unseen text each level answers.

    Example: hplm bench plot-lookup --json plot-lookup.json
    """
    plot_lookup(models, rounds).publish(json_file)


@app.command(name="access-check")
def bench_access_check(
    checks: Annotated[int, typer.Option(min=60, help="Checks of keys that are refused.")] = 100_000,
    tenants: Annotated[int, typer.Option(min=2, help="Tenants, each with a key.")] = 200,
    json_file: JsonOption = None,
) -> None:
    """Measure in this process how long the check of a key takes, by the reason for which the key is refused.

    Example: hplm bench access-check --json access-check.json
    """
    key_check(checks, tenants).publish(json_file)


@app.command(name="access-throughput")
def bench_access_throughput(
    models: ModelsOption = DEMO,
    rounds: RoundsOption = 6,
    in_flight: Annotated[int, typer.Option(min=1, help="Requests under way.")] = 256,
    seconds: Annotated[float, typer.Option("--seconds", min=0.5, help="Seconds of saturation per round.")] = 10.0,
    texts: TextsOption = "unseen",
    quick: QuickOption = False,
    json_file: JsonOption = None,
) -> None:
    """Measure the throughput of a server with keys and quotas, over that of a server without, in turns.

    Example: hplm bench access-throughput --models build/demo/models --json access-throughput.json
    """
    if quick:
        rounds, seconds = 2, min(seconds, 2.0)
    access_throughput(models, texts, rounds, in_flight, seconds).publish(json_file)


@app.command(name="access-quotas")
def bench_access_quotas(
    models: ModelsOption = DEMO,
    scenario: Annotated[
        list[str], typer.Option(help="one server, SIGTERM, kill -9 or two servers; again for more.")
    ] = QUOTA_SCENARIOS,
    clients: Annotated[int, typer.Option(min=6, help="Clients that race for quotas.")] = QuotaLoad.clients,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, help="Seconds of load of each scenario.")
    ] = QuotaLoad.seconds,
    look_up_instances: Annotated[
        int, typer.Option(min=1, help="Processes of the look-up stage of each server.")
    ] = QuotaLoad.look_up_instances,
    requests_per_s: Annotated[
        float,
        typer.Option("--requests-per-second", min=1, help="Quota; the server must be able to answer twice as many."),
    ] = QuotaLoad.requests_per_s,
    tokens_per_s: Annotated[
        float, typer.Option("--tokens-per-second", min=10, help="Quota of another tenant.")
    ] = QuotaLoad.tokens_per_s,
    registry: RegistryOption = "",
    texts: TextsOption = "unseen",
    quick: QuickOption = False,
    json_file: JsonOption = None,
) -> None:
    """Measure how far racing clients get beyond quotas, across restarts and with two servers, and whether others are refused.

    Servers are `hplm serve --keys`. Example: hplm bench access-quotas --json access-quotas.json
    """
    scenarios = choose("scenario", scenario, QUOTA_SCENARIOS)
    if quick:
        seconds = min(seconds, 5.0)
    load = QuotaLoad(seconds, clients, look_up_instances, requests_per_s, tokens_per_s)
    access_quotas(models, scenarios, load, texts, registry).publish(json_file)


@app.command(name="access-revocation")
def bench_access_revocation(
    models: ModelsOption = DEMO,
    trials: Annotated[int, typer.Option(min=1, help="Keys that are revoked; 3 s for each.")] = 50,
    clients: Annotated[int, typer.Option(min=4, help="Clients that send requests without pause.")] = 16,
    registry: RegistryOption = "",
    texts: TextsOption = "unseen",
    json_file: JsonOption = None,
) -> None:
    """Measure how long two servers under load, of `hplm serve --keys`, still answer requests with a revoked key.

    Example: hplm bench access-revocation --json access-revocation.json
    """
    access_revocation(models, trials, clients, texts, registry).publish(json_file)


@app.command(name="access-flood")
def bench_access_flood(
    models: ModelsOption = DEMO,
    rounds: RoundsOption = FloodLoad.rounds,
    duration_s: Annotated[float, typer.Option("--duration", min=1, help="Seconds of each run.")] = FloodLoad.duration_s,
    tenants: Annotated[int, typer.Option(min=2, help="Tenants that send requests.")] = FloodLoad.tenants,
    load: Annotated[
        float, typer.Option(min=0.01, help="What each other tenant sends, in shares of the capacity.")
    ] = FloodLoad.load,
    times: Annotated[float, typer.Option(min=1, help="What the flooding tenant sends, in shares.")] = FloodLoad.times,
    quota: Annotated[
        float, typer.Option(min=0.1, help="Each tenant's quota, in shares, in the runs with quotas.")
    ] = FloodLoad.quota,
    texts: TextsOption = "unseen",
    quick: QuickOption = False,
    json_file: JsonOption = None,
) -> None:
    """Measure other tenants' response times without and with a tenant at ten times its share: fair shares alone, and quotas.

    Example: hplm bench access-flood --json access-flood.json
    """
    if quick:
        rounds, duration_s = 1, min(duration_s, 3.0)
    access_flood(models, FloodLoad(rounds, duration_s, tenants, load, times, quota), texts).publish(json_file)


@app.command(name="malformed")
def bench_malformed(
    models: ModelsOption = DEMO,
    count: Annotated[int, typer.Option("--count", min=100, help="Malformed requests.")] = 100_000,
    connections: Annotated[int, typer.Option(min=1, help="Connections over HTTP, and as many over gRPC.")] = 8,
    every: Annotated[int, typer.Option(min=10, help="Ask every model a good question after so many requests.")] = 1000,
    seed: Annotated[int, typer.Option(help="Another seed gives other requests.")] = 1,
    proxy: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="Rules of nginx.")] = EXAMPLE,
    json_file: JsonOption = None,
) -> None:
    """Send malformed requests through the example proxy to a copy of a server with keys: no crash, hang, leak or traceback.

    Needs nginx and openssl. Example: hplm bench malformed --models build/fleet-minilm-1000/models --json malformed.json
    """
    malformed(models, count, connections, every, seed, proxy).publish(json_file)


@app.command(name="wrong-keys")
def bench_wrong_keys(
    models: ModelsOption = DEMO,
    count: Annotated[
        int, typer.Option("--count", min=50, help="Requests with keys, nearly all of them wrong.")
    ] = 10_250,
    connections: Annotated[int, typer.Option(min=1, help="Connections over HTTP, and as many over gRPC.")] = 8,
    seed: Annotated[int, typer.Option(help="Another seed gives other keys.")] = 1,
    json_file: JsonOption = None,
) -> None:
    """Send keys that are nearly right, revoked, expired or of someone else to every model of a copy: none is let in.

    Example: hplm bench wrong-keys --models build/fleet-minilm-1000/models --json wrong-keys.json
    """
    wrong_keys(models, count, connections, seed).publish(json_file)


@app.command(name="upper")
def bench_upper(
    models: ModelsOption = DEMO,
    rounds: RoundsOption = 9,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json_file: JsonOption = None,
) -> None:
    """Measure the tokens per second of the upper layers, packed and padded, and the share of the machine's matrix peak.

    Example: hplm bench upper --threads 2
    """
    upper_layers(models, rounds, threads, device).publish(json_file)


@app.command(name="request")
def bench_request(
    models: ModelsOption = DEMO,
    rounds: RoundsOption = 5,
    count: Annotated[int, typer.Option(min=8, help="Texts per round.")] = 2000,
    concurrency: Annotated[int, typer.Option(min=1, help="Texts under way at saturation.")] = 256,
    together: Annotated[
        list[int], typer.Option(min=1, max=64, help="Texts in a request; again for more.")
    ] = REQUEST_SIZES,
    json_file: JsonOption = None,
) -> None:
    """Measure the latency of one request at a time and the throughput of many, over gRPC and HTTP, on a real server.

    Example: hplm bench request --concurrency 64 --together 1
    """
    whole_requests(models, rounds, count, concurrency, together).publish(json_file)


@app.command(name="route")
def bench_route(
    models: ModelsOption = DEMO,
    rounds: RoundsOption = 5,
    pairs: Annotated[int, typer.Option(min=10, help="Requests to each model, one at a time, per round.")] = 400,
    in_flight: Annotated[int, typer.Option(min=1, help="Requests under way at saturation.")] = 256,
    seconds: Annotated[float, typer.Option("--seconds", min=0.5, help="Seconds of saturation per round.")] = 10.0,
    texts: TextsOption = "unseen",
    quick: QuickOption = False,
    json_file: JsonOption = None,
) -> None:
    """Measure the cost of the model `hplm`, which routes by tenant, over calling the base's model: alone and at saturation.

    Example: hplm bench route --models build/fleet-minilm-10000/models --texts pool --json route.json
    """
    if quick:
        rounds, pairs, seconds = 1, min(pairs, 100), min(seconds, 3.0)
    route(models, texts, rounds, pairs, in_flight, seconds).publish(json_file)


@app.command(name="stages")
def bench_stages(
    models: ModelsOption = DEMO,
    rounds: RoundsOption = 5,
    singles: Annotated[int, typer.Option(min=10, help="Requests to each server, one at a time, per round.")] = 200,
    in_flight: Annotated[int, typer.Option(min=1, help="Requests under way at saturation.")] = 256,
    seconds: Annotated[float, typer.Option("--seconds", min=0.5, help="Seconds of saturation per round.")] = 5.0,
    texts: TextsOption = "pool",
    quick: QuickOption = False,
    json_file: JsonOption = None,
) -> None:
    """Measure one encode stage against two on the same two cores: single requests and saturation, in turns.

    Example: hplm bench stages --models build/fleet-minilm-16/models --json stages.json
    """
    if quick:
        rounds, singles, seconds = 2, min(singles, 50), min(seconds, 2.0)
    encode_stages(models, texts, rounds, singles, in_flight, seconds).publish(json_file)


@app.command(name="mixed")
def bench_mixed(
    rates: Annotated[
        list[str], typer.Option("--rate", help="NAME=REQUESTS_PER_SECOND of a base's model; once for each base.")
    ],
    models: ModelsOption = DEMO,
    texts: TextsOption = "unseen",
    rounds: RoundsOption = 5,
    duration_s: Annotated[float, typer.Option("--duration", min=0.5, help="Seconds of each load.")] = 8.0,
    json_file: JsonOption = None,
) -> None:
    """Measure response times of two bases or more of one server: each alone, and all together at the same rates.

    Example: hplm bench mixed --models models --rate hbert=120 --rate minilm=60
    """
    mixed(models, rates_of(rates), texts, rounds, duration_s).publish(json_file)


def rates_of(values: Sequence[str]) -> dict[str, float]:
    """Read `NAME=REQUESTS_PER_SECOND`. Raises ConfigError for anything else, and for a name that is given twice."""
    rates: dict[str, float] = {}
    for value in values:
        name, _, rate = value.partition("=")
        try:
            per_s = float(rate)
        except ValueError:
            raise ConfigError(f"--rate {value!r} is not NAME=REQUESTS_PER_SECOND, for example hbert=120") from None
        if name in rates:
            raise ConfigError(f"--rate names {name!r} twice")
        rates[name] = per_s
    return rates


@app.command(name="cascade")
def bench_cascade(
    output: Output,
    requests: Annotated[
        Path, typer.Option(help="JSON lines of task, tenant, text, label: `hplm eval cascade --requests`.")
    ],
    models: ModelsOption = DEMO,
    rounds: RoundsOption = CascadeLoad.rounds,
    singles: Annotated[
        int, typer.Option(min=10, help="Requests of each task, one at a time, per round.")
    ] = CascadeLoad.singles,
    in_flight: Annotated[int, typer.Option(min=1, help="Requests under way at saturation.")] = CascadeLoad.in_flight,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.5, help="Seconds of saturation per model and round.")
    ] = CascadeLoad.seconds,
) -> None:
    """Measure cascades beside each base alone and a vote of all bases: one request at a time, and saturated (Tabi Table 2).

    Example: hplm bench cascade --models models --requests requests.jsonl --json cascade.json --picture cascade.svg
    """
    if output.quick:
        rounds, singles, seconds = 1, min(singles, 40), min(seconds, 3.0)
    load = CascadeLoad(rounds, singles, in_flight, seconds)
    cascade(models, requests, load, output.picture).publish(output.json_file)


@app.command(name="students")
def bench_students(
    output: Output,
    trace: Annotated[Path, typer.Option(help="Recorded arrivals: a CSV file with a column TIMESTAMP.")],
    models: ModelsOption = Path("build/fleet-students/models"),
    requests: Annotated[
        Path | None,
        typer.Option(help="JSON lines of task, tenant, text, label; default: the fleet's texts to all tenants."),
    ] = None,
    rounds: RoundsOption = StudentsLoad.rounds,
    singles: Annotated[
        int, typer.Option(min=10, help="Requests to each variant, one at a time, per round.")
    ] = StudentsLoad.singles,
    in_flight: Annotated[int, typer.Option(min=1, help="Requests under way at saturation.")] = StudentsLoad.in_flight,
    seconds: Annotated[float, typer.Option("--seconds", min=0.5, help="Seconds of each load.")] = StudentsLoad.seconds,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch in the engines that are timed here.")] = 1,
) -> None:
    """Measure students by their number beside other bases: engine, latency, throughput, a burst (Student Parallelism, Table 2).

    The repository serves one trunk and other bases, with the same tenants: `hplm build fleet --students 6`.

    Example: hplm bench students --trace trace.csv --models build/fleet-students/models --json students.json --picture burst.svg
    """
    if output.quick:
        rounds, singles, seconds = 1, min(singles, 30), min(seconds, 3.0)
    load = StudentsLoad(rounds, singles, in_flight, seconds)
    students(models, trace, requests, load, threads, output.picture).publish(output.json_file)


@app.command(name="response")
def bench_response(
    output: Output,
    models: ModelsOption = DEMO,
    rounds: RoundsOption = 3,
    tenants: Annotated[list[int], typer.Option(min=1, help="Number of tenants; again for more.")] = RESPONSE_TENANTS,
    duration_s: Annotated[float, typer.Option("--duration", min=1, help="Seconds per run.")] = 60.0,
    texts: TextsOption = "unseen",
    quantization: Annotated[
        list[str] | None,
        typer.Option(help="none or int8, of both stages. Give it twice, and two servers take turns. Default: as set."),
    ] = None,
) -> None:
    """Measure response times by number of tenants that each send a request every 20 s, on a real server (HMI Fig. 12).

    Example: hplm bench response --models build/fleet-minilm-10000/models --json response.json --picture response.svg
    """
    if output.quick:
        tenants, rounds, duration_s = sorted(tenants)[:2], 1, min(duration_s, 10.0)
    quantizations = choose("quantization", quantization or (), get_args(Quantization))
    report = response(models, tenants, rounds, duration_s, texts, output.picture, quantizations)
    report.publish(output.json_file)


@app.command(name="burst")
def bench_burst(
    output: Output,
    models: ModelsOption = DEMO,
    rounds: RoundsOption = 3,
    scale: Annotated[float, typer.Option(min=0.004, help="Number of clients, divided by 250.")] = 1.0,
    count: Annotated[int, typer.Option(min=1, help="Requests of each client.")] = 50,
    texts: TextsOption = "unseen",
) -> None:
    """Measure response times of 250 clients, started 0.05 s apart, that send 50 requests each, every 1.2 s (HMI Fig. 13).

    Example: hplm bench burst --models build/fleet-minilm-10000/models --json burst.json --picture burst.svg
    """
    if output.quick:
        rounds, scale, count = 1, 0.1 * scale, min(count, 5)
    burst(models, scale, count, rounds, texts, output.picture).publish(output.json_file)


@app.command(name="waves")
def bench_waves(
    output: Output,
    models: ModelsOption = DEMO,
    at_once: Annotated[list[int], typer.Option(min=1, help="Requests per wave; again for more.")] = WAVE_SIZES,
    count: Annotated[int, typer.Option(min=1, help="Waves of each size, one a second.")] = 20,
    texts: TextsOption = "unseen",
) -> None:
    """Measure response times of a few requests at once to a server that is idle before and after.

    Example: hplm bench waves --at-once 8 --at-once 96 --json waves.json
    """
    if output.quick:
        at_once, count = sorted(at_once)[:3], min(count, 5)
    waves(models, at_once, count, texts, output.picture).publish(output.json_file)


@app.command(name="overload")
def bench_overload(
    output: Output,
    models: ModelsOption = DEMO,
    times: Annotated[
        list[float], typer.Option(min=0.1, help="Offered load, times the capacity; again for more.")
    ] = OVERLOAD_TIMES,
    rounds: RoundsOption = 3,
    duration_s: Annotated[float, typer.Option("--duration", min=1, help="Seconds per load.")] = 20.0,
    deadline_s: Annotated[
        float, typer.Option("--deadline", min=0.01, help="Deadline of each request, in seconds.")
    ] = 2.0,
    texts: TextsOption = "shuffled",
) -> None:
    """Measure answers in time, and how soon requests are refused, if more arrive than can be answered.

    Example: hplm bench overload --models build/fleet-minilm-10000/models --times 3 --times 10 --json overload.json
    """
    if output.quick:
        rounds, duration_s = 1, min(duration_s, 5.0)
    overload(models, times, rounds, duration_s, deadline_s, texts, output.picture).publish(output.json_file)


@app.command(name="recovery")
def bench_recovery(
    models: ModelsOption = DEMO,
    trials: Annotated[int, typer.Option(min=1, help="Kills of a stub, and as many of Triton; 40 s for both.")] = 20,
    json_file: JsonOption = None,
) -> None:
    """Measure the seconds until the next good answer of `hplm serve` after kill -9 of a stage's process, and of Triton.

    Example: hplm bench recovery --trials 20 --json recovery.json
    """
    recovery(models, trials).publish(json_file)


@app.command(name="tenants")
def bench_tenants(
    output: Output,
    shape: Annotated[Shape, typer.Option(help="Which fleet: the size of its base.")] = "minilm",
    fleet: Annotated[Path | None, typer.Option(help="Default: build/fleet-SHAPE-10000.")] = None,
    system: Annotated[list[str], typer.Option(help="System to measure; again for more.")] = SYSTEMS,
    tenants: Annotated[list[int], typer.Option(min=1, help="Number of tenants; again for more.")] = THROUGHPUT_TENANTS,
    popularity: Annotated[list[str], typer.Option(help="How requests choose tenants.")] = POPULARITIES,
    duration_s: Annotated[float, typer.Option("--seconds", min=0.5, help="Seconds per point.")] = Load.duration_s,
    warm_up_s: Annotated[
        float,
        typer.Option(
            "--warm-up-seconds", min=0, help="Most seconds for first requests to all tenants, before a point."
        ),
    ] = Load.warm_up_s,
    rounds: RoundsOption = Load.rounds,
    in_flight: Annotated[int, typer.Option(min=1, help="Requests under way at once.")] = Load.in_flight,
    generators: Annotated[
        int, typer.Option(min=1, help="Processes that send requests: one may be too slow for a GPU.")
    ] = Load.generators,
    response_s: Annotated[
        float, typer.Option("--response-seconds", min=0, help="Seconds of open load after that; 0: none.")
    ] = Load.response_s,
    response_share: Annotated[
        float, typer.Option(min=0.05, max=0.95, help="Rate of the open load, as a share of hBERT's throughput.")
    ] = Load.response_share,
    threads: Annotated[
        int,
        typer.Option(
            min=1,
            help="Computing threads of every system: one process each, but threads of one process for whole models. hBERT's "
            "look-up stage has one more process, on a GPU as many more.",
        ),
    ] = Limits.num_threads,
    budget_mb: Annotated[int, typer.Option(min=1, help="Memory for a peer's whole models.")] = Limits.budget_mb,
    disk_mb: Annotated[int, typer.Option(min=1, help="Disk for the files of a peer's models.")] = Limits.disk_mb,
    slots: Annotated[
        int, typer.Option(min=0, help="num_slots of each encode process of hBERT; 0: as in the fleet, else 64.")
    ] = 0,
    texts: TextsOption = "pool",
) -> None:
    """Measure throughput by number of tenants, beside whole models, a shared body and adapters without PLOT (HMI Fig. 11).

    Build the fleet before: `hplm build fleet --shape minilm --tenants 10000`. Examples:

      hplm bench tenants --shape bert-base --json tenants.json --picture tenants.svg

      hplm bench tenants --quick --system hbert --system dedicated
    """
    if output.quick:
        tenants, rounds, warm_up_s = sorted(tenants)[:4], 1, min(warm_up_s, 2.0)
        duration_s, response_s = min(duration_s, 2.0), min(response_s, 5.0)
    report = throughput_by_tenants(
        fleet or Path(f"build/fleet-{shape}-10000"),
        shape,
        choose("system", system, get_args(SystemName)),
        tenants,
        choose("popularity", popularity, get_args(Popularity)),
        Load(duration_s, warm_up_s, rounds, in_flight, response_s, response_share, generators),
        Limits(threads, budget_mb, disk_mb),
        output.picture,
        texts,
        {"num_slots": slots} if slots else None,
    )
    report.publish(output.json_file)


FleetOption = Annotated[
    Path, typer.Option("--models", help="Repository of a fleet: `hplm build fleet --shape bert-base`.")
]
SecondsOption = Annotated[float, typer.Option("--seconds", min=1, help="Seconds per point.")]


@app.command(name="adapters")
def bench_adapters(
    rounds: RoundsOption = 9,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json_file: JsonOption = None,
) -> None:
    """Measure one layer's adapters of 1 to 64 tenants: in batched products, text by text, in a plain loop, by grouped_mm.

    Example: hplm bench adapters --json adapters.json
    """
    adapters(rounds, threads, device).publish(json_file)


@app.command(name="importance")
def bench_importance(
    rounds: RoundsOption = 9,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json_file: JsonOption = None,
) -> None:
    """Measure what importances of words, by which a cascade prunes texts, cost beside the batch of the level.

    Example: hplm bench importance --json importance.json
    """
    importance(rounds, threads, device).publish(json_file)


@app.command(name="batching")
def bench_batching(
    output: Output,
    models: FleetOption = FLEET,
    mode: Annotated[list[str], typer.Option(help="Batching mode; again for more.")] = BATCHING_MODES,
    rounds: RoundsOption = 3,
    seconds: SecondsOption = 15.0,
    rate: Annotated[
        list[float], typer.Option(help="Arrival rate, times the first mode's throughput; again for more.")
    ] = BATCHING_RATES,
    policy: Annotated[
        str,
        typer.Option(help="Policy of every mode except slotted: fcfs as in Figs. 11 and 12, das as in 9 and 10."),
    ] = "fcfs",
) -> None:
    """Measure batching modes: saturated throughput, throughput and utility by rate, speed by row slots (TCB Figs. 9 to 14).

    Examples:

      hplm bench batching --json batching.json --picture batching.svg

      hplm bench batching --policy das --mode packed --mode turbo --mode naive
    """
    choose("batching mode", mode, BATCHING_MODES)
    if output.quick:
        rounds, seconds, rate = 1, 3.0, []
    check_policies([policy])
    batching(models, mode, rounds, seconds, rate, output.picture, policy).publish(output.json_file)


@app.command(name="schedulers")
def bench_schedulers(
    output: Output,
    models: FleetOption = FLEET,
    policy: Annotated[list[str], typer.Option(help="Scheduling policy; again for more.")] = POLICIES,
    rounds: RoundsOption = 3,
    seconds: SecondsOption = 15.0,
) -> None:
    """Measure policies at twice the capacity: utility, deadlines met, and the policies' own cost (TCB Figs. 15 and 16).

    Example: hplm bench schedulers --policy das --policy sjf --json schedulers.json
    """
    check_policies(policy)
    settings = list(SETTINGS)
    if output.quick:
        rounds, seconds, settings = 1, min(seconds, 5.0), settings[1:2]
    schedulers(models, policy, settings, rounds, seconds, output.picture).publish(output.json_file)


@app.command(name="pipeline")
def bench_pipeline(
    output: Output,
    models: FleetOption = FLEET,
    rounds: RoundsOption = 3,
    seconds: SecondsOption = 15.0,
    look_up_threads: LookUpThreadsOption = 0,
) -> None:
    """Measure the speed-up of look-up and swapping at the same time as computing (HMI Table 6).

    Example: hplm bench pipeline --models build/fleet-minilm-10000/models --look-up-threads 2 --json pipeline.json
    """
    if output.quick:
        rounds, seconds = 1, min(seconds, 4.0)
    pipeline(models, rounds, seconds, output.picture, look_up_threads=look_up_threads).publish(output.json_file)


@app.command(name="limit")
def bench_limit(
    output: Output,
    models: FleetOption = FLEET,
    rounds: RoundsOption = 5,
    seconds: SecondsOption = 10.0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda, of the engine and of the server.")] = "auto",
) -> None:
    """Measure the saturated upper layers' share of the machine's matrix peak, and the share of that through Triton.

    Example: hplm bench limit --json limit.json --picture limit.svg
    """
    if output.quick:
        rounds, seconds = 1, 4.0
    limit(models, rounds, seconds, device, output.picture).publish(output.json_file)


@app.command(name="int8")
def bench_int8(
    output: Output,
    models: FleetOption = FLEET,
    rounds: RoundsOption = 5,
    seconds: SecondsOption = 10.0,
    look_up_threads: LookUpThreadsOption = 0,
) -> None:
    """Measure the speed-up of the setting `quantization: int8`, for known and for new text, and how far int8 moves values.

    Example: hplm bench int8 --json int8.json --picture int8.svg
    """
    if output.quick:
        rounds, seconds = 1, 4.0
    int8(models, rounds, seconds, output.picture, look_up_threads=look_up_threads).publish(output.json_file)


@app.command(name="trace")
def bench_trace(
    models: FleetOption = FLEET,
    count: Annotated[int, typer.Option(min=64, help="Requests per pass.")] = 512,
    slots: Annotated[int, typer.Option(min=2, help="Adapter slots.")] = 65,
    perfetto: Annotated[Path | None, typer.Option(help="File for a trace that ui.perfetto.dev opens.")] = None,
    picture: PictureOption = None,
    json_file: JsonOption = None,
) -> None:
    """Trace what each thread of both stages does while requests are under way (HMI Fig. 17).

    Example: hplm bench trace --perfetto trace.json --picture trace.png
    """
    trace(models, count, slots, perfetto, picture).publish(json_file)


@app.command(name="all")
def bench_all(
    out: Annotated[Path, typer.Option(help="Folder for results and pictures.")] = Path("build/bench"),
    quick: QuickOption = False,
) -> None:
    """Run every benchmark, one after another, with results and pictures in a folder; build missing fleets.

    Build the demo before: `make serve` or `hplm build demo`.

    Example: hplm bench all --quick
    """
    run_all(out, quick)


@app.command(name="placement")
def bench_placement(
    figure: Annotated[
        list[str], typer.Option("--figure", help=f"{', '.join(PLACEMENT_FIGURES)}; again for more; default: all.")
    ] = FIGURE_NAMES,
    trace: Annotated[
        Path | None, typer.Option(help="CSV trace with a column TIMESTAMP for Figs 12 and 14; default: Gamma arrivals.")
    ] = None,
    models: Annotated[Path, typer.Option(help="Model repository of the base for the figure `fidelity`.")] = DEMO,
    pictures: Annotated[Path | None, typer.Option(help="Folder for a picture of each figure.")] = None,
    quick: QuickOption = False,
    json_file: JsonOption = None,
) -> None:
    """Reproduce AlpaServe's figures by simulation, and measure how well the simulation predicts real servers.

    Example: hplm bench placement --figure 12 --trace trace.csv --pictures pictures
    """
    placement(figure, quick=quick, trace=trace, pictures=pictures, models=models).publish(json_file)


@app.command(name="memory")
def bench_memory(
    output: Output,
    shape: Annotated[Shape, typer.Option(help="Which fleet: the size of its base.")] = "minilm",
    fleet: Annotated[Path | None, typer.Option(help="Default: build/fleet-SHAPE-10000.")] = None,
    tenants: Annotated[list[int], typer.Option(min=1, help="Number of tenants; again for more.")] = MEMORY_TENANTS,
) -> None:
    """Measure device, host and disk bytes of an added tenant, on a real server with all tenants in memory (HMI Table 2).

    Build the fleet before: `hplm build fleet`. Example: hplm bench memory --shape bert-base --json memory.json
    """
    counts = sorted(tenants)[:2] if output.quick else tenants
    memory_by_tenants(fleet or Path(f"build/fleet-{shape}-10000"), shape, counts, output.picture).publish(
        output.json_file
    )
