"""`hplm bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from hplm.core.settings import Quantization
from hplm.errors import ConfigError
from hplm.reporting.benchmark_result import JsonOption
from hplm.scheduling.policy_loader import load_policy
from hplm_loadtest.benchmarks.engine.adapters import adapters
from hplm_loadtest.benchmarks.engine.int8 import int8
from hplm_loadtest.benchmarks.engine.limit import limit
from hplm_loadtest.benchmarks.engine.lookup import plot_lookup
from hplm_loadtest.benchmarks.engine.upper import upper_layers
from hplm_loadtest.benchmarks.everything import everything
from hplm_loadtest.benchmarks.models import DEMO
from hplm_loadtest.benchmarks.papers.batching import MODES, batching
from hplm_loadtest.benchmarks.papers.schedulers import POLICIES, SETTINGS, schedulers
from hplm_loadtest.benchmarks.serving.burst import burst
from hplm_loadtest.benchmarks.serving.memory import COUNTS as MEMORY_COUNTS
from hplm_loadtest.benchmarks.serving.memory import memory_by_tenants
from hplm_loadtest.benchmarks.serving.overload import TIMES, overload
from hplm_loadtest.benchmarks.serving.pipeline import pipeline
from hplm_loadtest.benchmarks.serving.request import whole_requests
from hplm_loadtest.benchmarks.serving.response import TENANTS, response
from hplm_loadtest.benchmarks.serving.tenants_bench import TENANTS as SIZES
from hplm_loadtest.benchmarks.serving.tenants_bench import (
    Load,
    Popularity,
    parse_popularities,
    parse_systems,
    throughput_by_tenants,
)
from hplm_loadtest.benchmarks.serving.trace import trace
from hplm_loadtest.benchmarks.serving.waves import SIZES as AT_ONCE
from hplm_loadtest.benchmarks.serving.waves import waves
from hplm_loadtest.peers.systems import Limits, Shape, SystemName
from hplm_loadtest.scenarios.stop import stop_by_signals

app = typer.Typer(
    callback=lambda: stop_by_signals("bench"),
    no_args_is_help=True,
    help="Measure look-up, upper layers, whole requests and response under load; variants run in turn, medians are shown. "
    "Status 0 also where goals are missed.",
    epilog="Example: hplm bench request --json request.json",
)
COUNTS = list(TENANTS)
TOGETHER = [1, 16, 64]
MULTIPLES = list(TIMES)
WAVES = list(AT_ONCE)
FLEETS = list(SIZES)
RESIDENT = list(MEMORY_COUNTS)
SYSTEMS: list[str] = list(get_args(SystemName))
POPULARITIES: list[str] = list(get_args(Popularity))
FLEET = Path("build/fleet-bert-base-10000/models")
BATCHINGS = list(MODES)
RATES = [0.5, 1.0, 2.0]
POLICY_NAMES = list(POLICIES)
ModelsOption = Annotated[Path, typer.Option("--models", help="Triton model repository.")]
PictureOption = Annotated[Path | None, typer.Option("--picture", help="Also draw it: a .svg or .png file.")]
TextsOption = Annotated[
    str,
    typer.Option(
        "--texts",
        help="pool: what a fleet's tables know; unseen: sentences of Wikipedia; shuffled: their words in random orders; "
        "examples: the tenants' own.",
    ),
]
LookUpThreadsOption = Annotated[int, typer.Option(min=0, help="That compute what no table has; 0: one, as served.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="A look in seconds or minutes: one round, less load.")]
RoundsOption = Annotated[int, typer.Option(min=1, help="Rounds that count.")]


def check_policies(names: list[str]) -> None:
    """Before a server is started. Raises ConfigError naming the policies there are."""
    for name in names:
        load_policy(name, {})


@app.command(name="plot-lookup")
def bench_lookup(models: ModelsOption = DEMO, rounds: RoundsOption = 9, json_file: JsonOption = None) -> None:
    """Time of a 128-token look-up from memory, and which level answers how many windows of unseen text.

    Example: hplm bench plot-lookup --json plot-lookup.json
    """
    plot_lookup(models, rounds).publish(json_file)


@app.command(name="upper")
def bench_upper(
    models: ModelsOption = DEMO,
    rounds: RoundsOption = 9,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json_file: JsonOption = None,
) -> None:
    """Tokens per second of the upper layers, packed against padded, and the share of the machine's matrix peak.

    Example: hplm bench upper --threads 2
    """
    upper_layers(models, rounds, threads, device).publish(json_file)


@app.command(name="request")
def bench_request(
    models: ModelsOption = DEMO,
    rounds: RoundsOption = 5,
    count: Annotated[int, typer.Option(min=8, help="Texts a round.")] = 2000,
    concurrency: Annotated[int, typer.Option(min=1, help="Texts under way at saturation.")] = 256,
    together: Annotated[list[int], typer.Option(min=1, max=64, help="Texts in a request; again for more.")] = TOGETHER,
    json_file: JsonOption = None,
) -> None:
    """Latency of one request at a time, throughput of many, over gRPC and HTTP, on a real server started for it.

    Example: hplm bench request --concurrency 64 --together 1
    """
    whole_requests(models, rounds, count, concurrency, together).publish(json_file)


@app.command(name="response")
def bench_response(
    models: ModelsOption = DEMO,
    rounds: RoundsOption = 3,
    tenants: Annotated[list[int], typer.Option(min=1, help="Number of tenants; again for more.")] = COUNTS,
    duration_s: Annotated[float, typer.Option("--duration", min=1, help="Seconds a run.")] = 60.0,
    texts: TextsOption = "unseen",
    quantization: Annotated[
        list[str] | None,
        typer.Option(help="none or int8, of both stages; give it twice and two servers take turns. Default: as set."),
    ] = None,
    quick: QuickOption = False,
    picture: PictureOption = None,
    json_file: JsonOption = None,
) -> None:
    """Response time by number of tenants, each one request every 20 s (HMI Fig. 12), on a real server started for it.

    Example: hplm bench response --models build/fleet-minilm-10000/models --json response.json --picture response.svg
    """
    if quick:
        tenants, rounds, duration_s = sorted(tenants)[:2], 1, min(duration_s, 10.0)
    if unknown := sorted(set(quantization or ()) - set(get_args(Quantization))):
        raise ConfigError(f"no quantization {unknown[0]!r}; there are {', '.join(get_args(Quantization))}")
    response(models, tenants, rounds, duration_s, texts, picture, quantization or ()).publish(json_file)


@app.command(name="burst")
def bench_burst(
    models: ModelsOption = DEMO,
    rounds: RoundsOption = 3,
    scale: Annotated[float, typer.Option(min=0.004, help="Times 250 clients.")] = 1.0,
    count: Annotated[int, typer.Option(min=1, help="Requests of each client.")] = 50,
    texts: TextsOption = "unseen",
    quick: QuickOption = False,
    picture: PictureOption = None,
    json_file: JsonOption = None,
) -> None:
    """Response times of 250 clients started 0.05 s apart, each 50 requests, one every 1.2 s (HMI Fig. 13).

    Example: hplm bench burst --models build/fleet-minilm-10000/models --json burst.json --picture burst.svg
    """
    if quick:
        rounds, scale, count = 1, 0.1 * scale, min(count, 5)
    burst(models, scale, count, rounds, texts, picture).publish(json_file)


@app.command(name="waves")
def bench_waves(
    models: ModelsOption = DEMO,
    at_once: Annotated[list[int], typer.Option(min=1, help="Requests of a wave; again for more.")] = WAVES,
    count: Annotated[int, typer.Option(min=1, help="Waves of each size, one a second.")] = 20,
    texts: TextsOption = "unseen",
    quick: QuickOption = False,
    picture: PictureOption = None,
    json_file: JsonOption = None,
) -> None:
    """Response times of a few requests at once to a server that is idle before and after.

    Example: hplm bench waves --at-once 8 --at-once 96 --json waves.json
    """
    if quick:
        at_once, count = sorted(at_once)[:3], min(count, 5)
    waves(models, at_once, count, texts, picture).publish(json_file)


@app.command(name="overload")
def bench_overload(
    models: ModelsOption = DEMO,
    times: Annotated[
        list[float], typer.Option(min=0.1, help="Offered, times the capacity; again for more.")
    ] = MULTIPLES,
    rounds: RoundsOption = 3,
    duration_s: Annotated[float, typer.Option("--duration", min=1, help="Seconds a load.")] = 20.0,
    deadline_s: Annotated[float, typer.Option("--deadline", min=0.01, help="Of each request, seconds.")] = 2.0,
    texts: TextsOption = "shuffled",
    quick: QuickOption = False,
    picture: PictureOption = None,
    json_file: JsonOption = None,
) -> None:
    """What is answered in time, and how soon the rest is refused, where more comes than can be done.

    Example: hplm bench overload --models build/fleet-minilm-10000/models --times 3 --times 10 --json overload.json
    """
    if quick:
        rounds, duration_s = 1, min(duration_s, 5.0)
    overload(models, times, rounds, duration_s, deadline_s, texts, picture).publish(json_file)


@app.command(name="tenants")
def bench_tenants(
    shape: Annotated[Shape, typer.Option(help="Which fleet: the size of its base.")] = "minilm",
    fleet: Annotated[Path | None, typer.Option(help="Default: build/fleet-SHAPE-10000.")] = None,
    system: Annotated[list[str], typer.Option(help="Whom to measure; again for more.")] = SYSTEMS,
    tenants: Annotated[list[int], typer.Option(min=1, help="Number of tenants; again for more.")] = FLEETS,
    popularity: Annotated[list[str], typer.Option(help="How requests choose tenants.")] = POPULARITIES,
    duration_s: Annotated[float, typer.Option("--seconds", min=0.5, help="Seconds a point.")] = Load.duration_s,
    warm_up_s: Annotated[
        float, typer.Option("--warm-up-seconds", min=0, help="At most so long every tenant is asked once before.")
    ] = Load.warm_up_s,
    rounds: RoundsOption = Load.rounds,
    in_flight: Annotated[int, typer.Option(min=1, help="Requests under way at once.")] = Load.in_flight,
    generators: Annotated[
        int, typer.Option(min=1, help="Processes that send them: one may be too slow for a GPU.")
    ] = Load.generators,
    response_s: Annotated[
        float, typer.Option("--response-seconds", min=0, help="Seconds of open load after it; 0: none.")
    ] = Load.response_s,
    response_share: Annotated[
        float, typer.Option(min=0.05, max=0.95, help="Of hBERT's throughput, offered as the open load.")
    ] = Load.response_share,
    threads: Annotated[
        int,
        typer.Option(
            min=1,
            help="That compute, of every system: processes, but of whole models threads of one. hBERT's look-up has one more, "
            "on a GPU as many.",
        ),
    ] = Limits.num_threads,
    budget_mb: Annotated[int, typer.Option(min=1, help="Memory for a peer's whole models.")] = Limits.budget_mb,
    disk_mb: Annotated[int, typer.Option(min=1, help="Disk for the files of a peer's models.")] = Limits.disk_mb,
    slots: Annotated[
        int, typer.Option(min=0, help="num_slots of each of hBERT's upper stages; 0: as the fleet has them, else 64.")
    ] = 0,
    texts: TextsOption = "pool",
    quick: QuickOption = False,
    picture: PictureOption = None,
    json_file: JsonOption = None,
) -> None:
    """Throughput by number of tenants beside whole models, a shared body and adapters alone (HMI Fig. 11).

    The fleet is built before: `hplm build fleet --shape minilm --tenants 10000`. Examples:

      hplm bench tenants --shape bert-base --json tenants.json --picture tenants.svg

      hplm bench tenants --quick --system hbert --system dedicated
    """
    if quick:
        tenants, rounds, warm_up_s = sorted(tenants)[:4], 1, min(warm_up_s, 2.0)
        duration_s, response_s = min(duration_s, 2.0), min(response_s, 5.0)
    report = throughput_by_tenants(
        fleet or Path(f"build/fleet-{shape}-10000"),
        shape,
        parse_systems(system),
        tenants,
        parse_popularities(popularity),
        Load(duration_s, warm_up_s, rounds, in_flight, response_s, response_share, generators),
        Limits(threads, budget_mb, disk_mb),
        picture,
        texts,
        {"num_slots": slots} if slots else None,
    )
    report.publish(json_file)


FleetOption = Annotated[
    Path, typer.Option("--models", help="Repository of a fleet: `hplm build fleet --shape bert-base`.")
]
SecondsOption = Annotated[float, typer.Option("--seconds", min=1, help="Seconds a point.")]


@app.command(name="adapters")
def bench_adapters(
    rounds: RoundsOption = 9,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json_file: JsonOption = None,
) -> None:
    """One layer's adapters of 1 to 64 tenants: gathered into batched products, text by text, in a plain loop, by grouped_mm.

    Example: hplm bench adapters --json adapters.json
    """
    adapters(rounds, threads, device).publish(json_file)


@app.command(name="batching")
def bench_batching(
    models: FleetOption = FLEET,
    mode: Annotated[list[str], typer.Option(help="Batching mode; again for more.")] = BATCHINGS,
    rounds: RoundsOption = 3,
    seconds: SecondsOption = 15.0,
    rate: Annotated[
        list[float], typer.Option(help="Arrival rate over the first mode's throughput; again for more.")
    ] = RATES,
    policy: Annotated[
        str,
        typer.Option(
            help="Who comes first, in every mode but slotted: fcfs as in Figs. 11 and 12, das as in 9 and 10."
        ),
    ] = "fcfs",
    quick: QuickOption = False,
    picture: PictureOption = None,
    json_file: JsonOption = None,
) -> None:
    """Batching modes: throughput at saturation, throughput and utility by arrival rate, speed by slots (TCB Figs. 9 to 14).

    Examples:

      hplm bench batching --json batching.json --picture batching.svg

      hplm bench batching --policy das --mode packed --mode turbo --mode naive
    """
    if unknown := sorted(set(mode) - set(BATCHINGS)):
        raise ConfigError(f"no batching mode {unknown[0]!r}; there are {', '.join(BATCHINGS)}")
    if quick:
        rounds, seconds, rate = 1, 3.0, []
    check_policies([policy])
    batching(models, mode, rounds, seconds, rate, picture, policy).publish(json_file)


@app.command(name="schedulers")
def bench_schedulers(
    models: FleetOption = FLEET,
    policy: Annotated[list[str], typer.Option(help="Scheduling policy; again for more.")] = POLICY_NAMES,
    rounds: RoundsOption = 3,
    seconds: SecondsOption = 15.0,
    quick: QuickOption = False,
    picture: PictureOption = None,
    json_file: JsonOption = None,
) -> None:
    """Policies at twice the capacity: utility, deadlines met, and their own cost (TCB Figs. 15 and 16).

    Example: hplm bench schedulers --policy das --policy sjf --json schedulers.json
    """
    check_policies(policy)
    settings = list(SETTINGS)
    if quick:
        rounds, seconds, settings = 1, min(seconds, 5.0), settings[1:2]
    schedulers(models, policy, settings, rounds, seconds, picture).publish(json_file)


@app.command(name="pipeline")
def bench_pipeline(
    models: FleetOption = FLEET,
    rounds: RoundsOption = 3,
    seconds: SecondsOption = 15.0,
    look_up_threads: LookUpThreadsOption = 0,
    quick: QuickOption = False,
    picture: PictureOption = None,
    json_file: JsonOption = None,
) -> None:
    """What look-up and swapping at the same time as computing are worth (HMI Table 6).

    Example: hplm bench pipeline --models build/fleet-minilm-10000/models --look-up-threads 2 --json pipeline.json
    """
    if quick:
        rounds, seconds = 1, min(seconds, 4.0)
    pipeline(models, rounds, seconds, picture, look_up_threads=look_up_threads).publish(json_file)


@app.command(name="limit")
def bench_limit(
    models: FleetOption = FLEET,
    rounds: RoundsOption = 5,
    seconds: SecondsOption = 10.0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda, for the part in-process.")] = "auto",
    quick: QuickOption = False,
    picture: PictureOption = None,
    json_file: JsonOption = None,
) -> None:
    """Share of the machine's matrix peak in the saturated upper layers, and what Triton leaves of it.

    Example: hplm bench limit --json limit.json --picture limit.svg
    """
    if quick:
        rounds, seconds = 1, 4.0
    limit(models, rounds, seconds, device, picture).publish(json_file)


@app.command(name="int8")
def bench_int8(
    models: FleetOption = FLEET,
    rounds: RoundsOption = 5,
    seconds: SecondsOption = 10.0,
    look_up_threads: LookUpThreadsOption = 0,
    quick: QuickOption = False,
    picture: PictureOption = None,
    json_file: JsonOption = None,
) -> None:
    """What the stages' setting `quantization: int8` is worth, for known and for new text, and how far it moves values.

    Example: hplm bench int8 --json int8.json --picture int8.svg
    """
    if quick:
        rounds, seconds = 1, 4.0
    int8(models, rounds, seconds, picture, look_up_threads=look_up_threads).publish(json_file)


@app.command(name="trace")
def bench_trace(
    models: FleetOption = FLEET,
    count: Annotated[int, typer.Option(min=64, help="Requests a pass.")] = 512,
    slots: Annotated[int, typer.Option(min=2, help="Adapter slots.")] = 65,
    perfetto: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev here.")] = None,
    picture: PictureOption = None,
    json_file: JsonOption = None,
) -> None:
    """What each thread of both stages does while requests are under way (HMI Fig. 17).

    Example: hplm bench trace --perfetto trace.json --picture trace.png
    """
    trace(models, count, slots, perfetto, picture).publish(json_file)


@app.command(name="all")
def bench_all(
    out: Annotated[Path, typer.Option(help="Folder for reports and pictures.")] = Path("build/bench"),
    quick: QuickOption = False,
) -> None:
    """Every benchmark, one after another, each with its report and picture in a folder; builds the fleets it lacks.

    The demo is built before: `make serve` or `hplm build demo`.

    Example: hplm bench all --quick
    """
    everything(out, quick)


@app.command(name="memory")
def bench_memory(
    shape: Annotated[Shape, typer.Option(help="Which fleet: the size of its base.")] = "minilm",
    fleet: Annotated[Path | None, typer.Option(help="Default: build/fleet-SHAPE-10000.")] = None,
    tenants: Annotated[list[int], typer.Option(min=1, help="Number of tenants; again for more.")] = RESIDENT,
    quick: QuickOption = False,
    picture: PictureOption = None,
    json_file: JsonOption = None,
) -> None:
    """Device, host and disk bytes of an added tenant (HMI Table 2), on a real server that keeps all tenants in memory.

    The fleet is built before: `hplm build fleet`. Example: hplm bench memory --shape bert-base --json memory.json
    """
    counts = sorted(tenants)[:2] if quick else tenants
    memory_by_tenants(fleet or Path(f"build/fleet-{shape}-10000"), shape, counts, picture).publish(json_file)
