"""`hplm place`: plan which bases run on which devices, write what serves the plan, and check the prediction."""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from hplm_builder.placement.apply_plan import Source, apply_plan, serve_command
from hplm_builder.placement.cluster_file import read_cluster
from hplm_builder.placement.observed_load import LoadWindow
from hplm_builder.placement.plan_build import nodes_of, placement_of, stage_times_of
from hplm_builder.placement.plan_file import read_tenant_rates, write_plan
from hplm_builder.placement.planned_workload import Scales, planned_requests
from hplm_builder.placement.planning import (
    fewest_nodes,
    measured_bases,
    plan_placement,
    search_options,
    tenant_loads,
)
from hplm_builder.placement.proxy_config import CONFIG_FILE, ProxyAddress
from hplm_client.cli.display import console
from hplm_client.cli.options import JsonOption

from hplm.errors import HplmError
from hplm.placement.plan import Plan
from hplm.placement.search.explain import explain as explain_placement
from hplm.placement.simulation import simulate
from hplm.reporting.progress import bar_report, progress_bars
from hplm.reporting.terminal_text import say
from hplm.workloads.traces import load_trace
from hplm_cli.place.shown_plan import comparison_lines, outcome_lines, show_plan
from hplm_cli.place.watching import first_look, judge, look, verdict_lines
from hplm_cli.place.workload_options import (
    CvOption,
    DeadlineOption,
    RateOption,
    SecondsOption,
    SeedOption,
    TraceOption,
    assumed_workload,
    changed_workload,
    deadlines_ms,
    numbers_by_base,
)

app = typer.Typer(
    no_args_is_help=True,
    help="Plan which bases run on which devices, cut into which stages, so that requests meet their deadlines.",
    epilog="Example: hplm place plan --cluster cluster.json --rate hbert=40 --cv 4 --out plan.json",
)
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file that `hplm place plan` wrote.")]
ModelsOption = Annotated[
    Path, typer.Option(help="Triton model repository of the bases: their settings, and the store with their profiles.")
]
DEFAULT_MODELS = Path("build/demo/models")
DEFAULT_PLAN = Path("plan.json")


@app.command()
def plan(
    cluster: Annotated[Path, typer.Option(help="JSON file of the nodes and their devices; see docs/placement.md.")],
    models: ModelsOption = DEFAULT_MODELS,
    rate: RateOption = None,
    cv: CvOption = None,
    trace: TraceOption = None,
    deadline_ms: DeadlineOption = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a usual text.")] = 32,
    hop_ms: Annotated[
        float,
        typer.Option(min=0, max=60_000, help="Milliseconds from a stage to the next, besides the time of the bytes."),
    ] = 1.0,
    seconds: SecondsOption = None,
    seed: SeedOption = None,
    max_stages: Annotated[
        int, typer.Option(min=1, help="Cut a base into at most so many stages; 1 only replicates.")
    ] = 4,
    survive_any_node: Annotated[
        bool, typer.Option("--survive-any-node", help="Place each base on two nodes or more.")
    ] = False,
    fewest: Annotated[
        bool, typer.Option("--fewest-devices", help="Use only as many devices as --target needs.")
    ] = False,
    target: Annotated[
        float, typer.Option(min=0, max=1, help="Share of requests to answer by their deadline, for --fewest-devices.")
    ] = 0.99,
    tenant_rates: Annotated[
        Path | None,
        typer.Option(help="CSV file with TENANT and RATE: requests a second of tenants, to find the hot ones."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Simulate every choice in place of the fast heuristic; takes far longer.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Plan file to write; an earlier one is replaced.")] = DEFAULT_PLAN,
    as_json: JsonOption = False,
) -> None:
    """Search for the placement with the most requests in time. Print it, and write it as a plan.

    The bases are those of --rate, or all bases of the repository with --trace alone. Each needs a profile (`hplm profile`).

    Examples:

      hplm place plan --cluster cluster.json --models /srv/hplm/models --rate hbert=40 --rate mpnet=10 --cv 4

      hplm place plan --cluster cluster.json --trace requests.csv --deadline-ms 200 --fewest-devices --target 0.99
    """
    source, nodes = Source.read(models), read_cluster(cluster)
    _tell_trace(trace)
    known = [base.name for base in source.bases]
    rates = numbers_by_base("--rate", rate, known)
    measured = measured_bases(source, list(rates) or known, tokens, hop_ms / 1000, nodes)
    deadlines = deadlines_ms(deadline_ms, measured.models, measured.outside_ms)
    assumed = assumed_workload(measured.models, rates, cv, trace, deadlines, tokens, seconds, seed, measured.outside_ms)
    by_tenant = read_tenant_rates(tenant_rates) if tenant_rates else {}
    loads = tenant_loads(source, measured, assumed.rates, by_tenant)
    options = replace(search_options(max_stages, survive_any_node=survive_any_node), method="full" if full else "fast")
    for warning in measured.warnings:
        console().print(f"warning: {warning}: measure again on such a device", style="yellow", markup=False)
    with progress_bars() as bars:
        report = bar_report(bars, "search", of_all=True)
        if fewest:
            nodes = fewest_nodes(target, measured, nodes, assumed, options, report)
        made = plan_placement(measured, nodes, assumed, options, loads, report)
    write_plan(made, out)
    _print(made, as_json)
    console().print(
        f"wrote {out}; `hplm place apply {out} --models {models} --out DIR` writes what serves it", markup=False
    )


@app.command(name="simulate")
def simulate_plan(
    plan: PlanArgument,
    rate: RateOption = None,
    cv: CvOption = None,
    trace: TraceOption = None,
    deadline_ms: DeadlineOption = None,
    seconds: SecondsOption = None,
    seed: SeedOption = None,
    rate_scale: Annotated[float, typer.Option(help="Multiply all rates.")] = 1.0,
    cv_scale: Annotated[float, typer.Option(help="Multiply the burstiness.")] = 1.0,
    deadline_scale: Annotated[float, typer.Option(help="Multiply all deadlines.")] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Predict how a plan answers another workload. What is not given is as in the plan.

    Examples:

      hplm place simulate plan.json --rate-scale 2

      hplm place simulate plan.json --rate hbert=80 --cv 6 --deadline-ms 100
    """
    planned = Plan.load(plan)
    assumed = planned.assumptions
    changed = changed_workload(
        assumed,
        rates=numbers_by_base("--rate", rate, list(assumed.rates)),
        cv=cv,
        trace=trace,
        deadline_ms=deadlines_ms(deadline_ms, planned.models, assumed.outside_ms) if deadline_ms else None,
        seconds=seconds,
        seed=seed,
    )
    _tell_trace(Path(changed.trace) if changed.trace else None)
    requests = planned_requests(changed, Scales(rate_scale, cv_scale, deadline_scale))
    outcomes = simulate(placement_of(planned), stage_times_of(planned), requests)
    if as_json:
        shares = {
            name: float(outcomes.in_time[requests.models == number].mean())
            for number, name in enumerate(requests.names)
            if (requests.models == number).any()
        }
        say(json.dumps({"attainment": outcomes.attainment, "requests": len(requests), "of_base": shares}))
        return
    for line in outcome_lines(outcomes, assumed.outside_ms):
        say(line)


@app.command()
def explain(
    plan: PlanArgument,
    pictures: Annotated[
        Path | None,
        typer.Option(help="Also draw pictures to this folder: utilisation, and the share in time by workload."),
    ] = None,
    png: Annotated[bool, typer.Option("--png", help="Draw .png files in place of .svg files.")] = False,
    max_stages: Annotated[int, typer.Option(min=1, help="Stages that a new search tries at most.")] = 4,
    as_json: JsonOption = False,
) -> None:
    """Say why each base is where it is, which bases limit, and what more devices or longer deadlines would bring.

    Example: hplm place explain plan.json --pictures pictures
    """
    planned = Plan.load(plan)
    explanation = explain_placement(
        placement_of(planned),
        planned.models,
        nodes_of(planned).cluster(),
        planned_requests(planned.assumptions),
        search_options(max_stages, survive_any_node=planned.survives_any_node),
    )
    if as_json:
        say(json.dumps(dataclasses.asdict(explanation), ensure_ascii=False))
    else:
        for line in explanation.lines():
            say(line)
    if pictures is not None:
        # Imported here, because matplotlib takes a second.
        from hplm_cli.place.pictures import draw_pictures

        for path in draw_pictures(planned, pictures, "png" if png else "svg", max_stages):
            console().print(f"wrote {path}", markup=False)


@app.command()
def apply(
    plan: PlanArgument,
    out: Annotated[Path, typer.Option(help="Folder to write; an earlier applied plan there is replaced in one step.")],
    models: ModelsOption = DEFAULT_MODELS,
    host: Annotated[str, typer.Option(help="Address on which the proxy listens.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=1, max=65535, help="The proxy's port for HTTP.")] = 8080,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535, help="The proxy's port for gRPC.")] = 8081,
) -> None:
    """Write a model repository for each node, and the configuration of HAProxy before the nodes.

    The repositories name the store by a relative path: the nodes need the folder and the store at the same places, for
    instance on a shared file system.

    Example: hplm place apply plan.json --models /srv/hplm/models --out /srv/hplm/placed
    """
    planned, source = Plan.load(plan), Source.read(models)
    listen = ProxyAddress(host.strip("[]"), http_port, grpc_port)
    needs_keys = source.has_keys()
    apply_plan(planned, source, out, listen)
    say(f"wrote {out}. Serve each node on its machine, and run the proxy:")
    for node in planned.nodes:
        if any(group.node == node.name for group in planned.groups):
            say(f"  {node.name}: {serve_command(node, out, needs_keys=needs_keys)}")
    say(f"  proxy: haproxy -f {shlex.quote(str(out / CONFIG_FILE))}")
    if needs_keys:
        say("The store has keys, so each node answers only requests with a key: docs/access.md.")
    say(f"Clients connect to {' or '.join(listen.client_urls)}.")
    say(f'To drain a node, use the socket "{listen.socket}" as docs/placement.md says.')


@app.command()
def check(
    plan: PlanArgument,
    models: ModelsOption = DEFAULT_MODELS,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of the workload to replay.")] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Serve the plan on this machine, replay its workload, and print predicted beside measured. Note the result in the plan.

    Each node is an `hplm serve` of its own on 127.0.0.1, behind HAProxy if it is installed. Measure on an idle machine with
    as many cores as the plan's devices have.

    Example: hplm place check plan.json --models /srv/hplm/models --seconds 120
    """
    # Imported here, because it needs the load test.
    from hplm_cli.place.checking import check_plan

    planned = Plan.load(plan)
    found = check_plan(planned, Source.read(models), seconds)
    write_plan(replace(planned, check=found.result), plan)
    if as_json:
        say(json.dumps({**dataclasses.asdict(found.result), "error": found.result.error}))
        return
    for line in comparison_lines(found.predicted, found.measured, planned.assumptions.outside_ms):
        say(line)
    say(f"predicted {found.result.predicted:.2%}, measured {found.result.measured:.2%}: error {found.result.error:.3f}")
    console().print(f"noted in {plan}", markup=False)


@app.command()
def watch(
    plan: PlanArgument,
    metrics: Annotated[
        list[str], typer.Option("--metrics", help="Metrics page of a node: http://HOST:8002/metrics. Repeat it.")
    ],
    window_s: Annotated[
        float, typer.Option(min=1, max=2_592_000, help="Seconds that are compared with the plan.")
    ] = 3600.0,
    every_s: Annotated[
        float,
        typer.Option(min=0.1, max=86_400, help="Seconds between two looks. The counters change every five seconds."),
    ] = 15.0,
    max_stages: Annotated[int, typer.Option(min=1, help="Stages of a new plan at most.")] = 4,
    once: Annotated[bool, typer.Option("--once", help="End after the first verdict.")] = False,
) -> None:
    """Compare the plan's assumptions with what the nodes count, and say when a new plan would win, and by how much.

    Each node must answer at the start. The first verdict comes when the window is full, the next ones every quarter of it. If
    pages or requests are missing then, the command says so in place of a verdict, and with --once its status is 1. Ctrl-C ends
    the command.

    Example: hplm place watch plan.json --metrics http://10.0.0.1:8002/metrics --metrics http://10.0.0.2:8002/metrics
    """
    planned = Plan.load(plan)
    bases = list(planned.assumptions.rates)
    window, seen = LoadWindow(bases, window_s), first_look(metrics, planned)
    due_s = time.monotonic() + window_s
    silent: set[str] = set()
    while True:
        for url in seen.missing.keys() - silent:
            console().print(f"{seen.missing[url]}: its requests are missing", style="yellow", markup=False)
        silent = set(seen.missing)
        window.add(seen.pages, time.monotonic())
        if time.monotonic() >= due_s:
            try:
                for line in verdict_lines(planned, judge(planned, window.observed(metrics), max_stages)):
                    say(line)
            except HplmError as error:
                if once:
                    raise
                console().print(str(error), style="yellow", markup=False)
            if once:
                return
            due_s = time.monotonic() + window_s / 4
        time.sleep(every_s)
        seen = look(metrics, bases)


def _tell_trace(trace: Path | None) -> None:
    """Print what a trace was read as, and what looks like a mistake in it."""
    for line in load_trace(trace).lines() if trace is not None else ():
        console().print(line, style="yellow" if line.startswith("warning") else None, markup=False)


def _print(planned: Plan, as_json: bool) -> None:
    if as_json:
        values: dict[str, Any] = dataclasses.asdict(planned)
        say(json.dumps(values, ensure_ascii=False))
    else:
        show_plan(planned)
