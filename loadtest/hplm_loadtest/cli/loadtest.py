"""`hplm loadtest`."""

from __future__ import annotations

import itertools
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.console import Console

from hplm.errors import ConfigError
from hplm.reporting.benchmark_result import Goal, JsonOption, Report
from hplm.reporting.command_options import with_shared
from hplm.reporting.progress import progress_bars
from hplm_loadtest.scenarios.run import LATE_S, NOT_SENT, Run, goals_of
from hplm_loadtest.scenarios.stop import STOPS, stop_by_signals
from hplm_loadtest.workloads.arrivals import (
    Arrivals,
    BurstArrivals,
    GammaArrivals,
    PoissonArrivals,
    RampArrivals,
    TraceArrivals,
    require_positive,
)
from hplm_loadtest.workloads.deadlines import DeadlineClasses
from hplm_loadtest.workloads.plan import Mix, Plan
from hplm_loadtest.workloads.tenants import Tenants, UniformTenants, ZipfTenants

if TYPE_CHECKING:
    from hplm_loadtest.scenarios.locustfile import Outcome

OF_A_SLICE = ("offered_per_s", "in_time", "p50_ms", "p95_ms", "p99_ms", "refused", "lost", "kept_up")
app = typer.Typer(
    callback=lambda: stop_by_signals("loadtest"),
    no_args_is_help=True,
    help="Put load on a running server with Locust, over HTTP or gRPC, at planned times whatever the server does; latency "
    "counts from the planned time. Status 1 where requests were lost or failed, or where the load fell behind its plan.",
    epilog="Example: hplm loadtest steady --url grpc://127.0.0.1:8001 --rate 50 --duration 60",
)


def positive(option: typer.CallbackParam, value: float) -> float:
    """A callback of the option. Raises ConfigError where the value is not, or is infinite."""
    require_positive(**{option.opts[0]: value})
    return value


@dataclass(frozen=True)
class Scenario:
    """When requests come, independent of whom they are for and what they say."""

    name: str
    arrivals: Arrivals
    duration_s: float
    slices: int = 0  # of its time, each with a row of its own


@dataclass(frozen=True)
class Load:
    """The options of every scenario: where the load goes and what it is made of."""

    url: Annotated[
        str,
        typer.Option(
            envvar="HPLM_URL",
            help="http://HOST:PORT or grpc://HOST:PORT, with https or grpcs over TLS; with --protocol, HOST:PORT.",
        ),
    ] = "http://127.0.0.1:8000"
    protocol: Annotated[str | None, typer.Option(help="http or grpc, where the address does not say it.")] = None
    models: Annotated[Path, typer.Option(help="Model repository whose tenants are asked.")] = Path("build/demo/models")
    tenants_file: Annotated[
        Path | None, typer.Option("--tenants", help="Tenants to ask instead, a name a line, none of pairs.")
    ] = None
    zipf: Annotated[
        float, typer.Option(help="Tenant at rank r asked 1/r^ZIPF as often as the first; 0: all alike.")
    ] = 0
    text_file: Annotated[
        Path | None, typer.Option("--text", help="Texts, one a line; default: sentences of Wikipedia.")
    ] = None
    deadlines: Annotated[
        str | None, typer.Option(help="NAME=SECONDS:SHARE,... such as interactive=0.1:0.7,batch=2:0.3.")
    ] = None
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", min=0.1, callback=positive, help="Seconds after which a request counts as lost."),
    ] = 30.0
    seed: Annotated[int, typer.Option(min=0, help="The same seed draws the same requests at the same times.")] = 0
    web: Annotated[bool, typer.Option("--web", help="Locust's web page; runs start there.")] = False
    web_port: Annotated[
        int | None, typer.Option(help="Where the page is, with --web or without; 8089 if not given.")
    ] = None
    json_file: JsonOption = None

    @property
    def page_port(self) -> int | None:
        """Of Locust's page; None without one. Raises ConfigError where it is none."""
        port = self.web_port if self.web_port is not None or not self.web else 8089
        if port is not None and not 0 < port < 65536:
            raise ConfigError(f"--web-port is from 1 to 65535, not {port}")
        return port

    @property
    def address(self) -> str:
        """With its scheme. Raises ConfigError where --protocol says another."""
        scheme, found, _ = self.url.partition("://")
        if self.protocol not in (None, "http", "grpc"):
            raise ConfigError(f"--protocol is http or grpc, not {self.protocol!r}")
        if found and self.protocol not in (None, scheme.removesuffix("s")):
            raise ConfigError(
                f"--protocol {self.protocol} does not fit {self.url}; ports differ, so write the whole address"
            )
        return self.url if found or self.protocol is None else f"{self.protocol}://{self.url}"

    def mix(self) -> Mix:
        """What is sent. Raises ConfigError or DataError."""
        # Reading a store imports torch, which a load of files does not need.
        from hplm_loadtest.workloads import texts

        of_pairs: list[str] = []
        if self.tenants_file is not None:
            names = texts.lines(self.tenants_file)
        else:
            from hplm_loadtest.benchmarks.models import names_by_texts

            if not self.models.is_dir():
                raise ConfigError(
                    f"there is no {self.models}: `make serve` makes the demo, --models names other models, --tenants "
                    "names tenants without any"
                )
            names, of_pairs = names_by_texts(self.models)
            names = sorted([*names, *of_pairs])
        sent = texts.lines(self.text_file) if self.text_file is not None else texts.texts("unseen", self.models)
        tenants: Tenants = ZipfTenants(names, self.zipf) if self.zipf else UniformTenants(names)
        deadlines = DeadlineClasses.parse(self.deadlines) if self.deadlines is not None else None
        return Mix(tenants, sent, deadlines, frozenset(of_pairs))


def perform(scenario: Scenario, load: Load) -> None:
    """Run, report, end with status 1 where the run was no good, with 128 and the signal's number where one ended it."""
    # First of all that is imported for a run: it patches the standard library.
    from hplm_loadtest.scenarios.locustfile import Errand, check_page, follow

    page_port = load.page_port
    if page_port is not None:
        check_page(page_port)
    mix = load.mix()
    rng = np.random.default_rng(load.seed)

    def make_plan() -> Plan:
        return mix.plan(scenario.arrivals, scenario.duration_s, rng)

    def name_of(deadline_s: float) -> str:
        return "predict" if mix.deadlines is None else mix.deadlines.name_of(deadline_s)

    with progress_bars(transient=True) as progress:
        errand = Errand(make_plan, name_of, load.timeout_s, progress)
        outcome = follow(load.address, scenario.name, errand, page_port)
    report(scenario, load, mix, outcome).publish(load.json_file)
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)
    is_good = judge(outcome.run)
    if not outcome.is_whole:
        log_rate_limited(
            f"stopped after {outcome.run.duration_s:.1f} of {scenario.duration_s:g} s, "
            f"{len(outcome.run)} of {outcome.planned} requests: these are figures of that part"
        )
        raise typer.Exit(128 + outcome.signal if outcome.signal else 1)
    if not is_good:
        raise typer.Exit(1)


def log_rate_limited(what: str) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"hplm loadtest: {what}", style="red")


def report(scenario: Scenario, load: Load, mix: Mix, outcome: Outcome) -> Report:
    """All requests in the first row, then one for each deadline class, then one for each slice of time."""
    run = outcome.run
    rows = [{"requests_of": "all", **run.row()}]
    if mix.deadlines is not None:
        for name, (deadline_s, _) in mix.deadlines.classes.items():
            chosen = run.deadlines_s == deadline_s
            if chosen.any():
                rows.append({"requests_of": f"{name} ({deadline_s:g} s)", **run.select(chosen).row()})
    edges_s = np.linspace(0.0, run.duration_s, scenario.slices + 1).tolist()
    for start_s, end_s in itertools.pairwise(edges_s):
        if len(part := run.between(start_s, end_s)):
            figures = part.row()
            rows.append({"seconds": f"{start_s:.4g}-{end_s:.4g}", **{key: figures[key] for key in OF_A_SLICE}})
    about = {
        "url": outcome.url,
        "arrivals": str(scenario.arrivals),
        "duration_s": run.duration_s,
        "planned_s": scenario.duration_s,
        "interrupted": not outcome.is_whole,
        "seed": load.seed,
        "tenants": len(mix.tenants.names),
        "of_pairs": len(mix.of_pairs),
        "zipf": load.zipf,
        "texts": len(mix.texts),
        "mean_words": round(float(np.mean([len(text.split()) for text in mix.texts])), 1),
        "timeout_s": load.timeout_s,
    }
    sent = len(run) - run.codes.count(NOT_SENT)
    whole = Goal("loadtest-whole", "share of the plan that was sent", 1, sent / outcome.planned, "", "higher")
    return Report(f"loadtest {scenario.name}", about, rows, [*goals_of("loadtest", rows[:1]), whole])


def judge(run: Run) -> bool:
    """Whether the figures mean anything; says loudly why not."""
    bad = run.kinds["lost"] + run.kinds["failed"]
    if bad:
        log_rate_limited(f"{run.kinds['lost']} requests lost, {run.kinds['failed']} failed")
    if crowded := run.codes.count(NOT_SENT):
        log_rate_limited(
            f"{crowded} of them were not sent, for too many were under way: the server is slower than the load"
        )
    if not run.kept_up:
        log_rate_limited(
            f"the load fell behind its plan ({100 * run.sent_within(LATE_S):.1f} % of the requests were sent "
            "within 20 ms of it): this run measured the load generator; lower the rate or free a core for it"
        )
    return bad == 0 and run.kept_up


command = partial(with_shared, Load)
Rate = Annotated[float, typer.Option("--rate", callback=positive, help="Requests per second.")]
Duration = Annotated[float, typer.Option("--duration", min=0.1, callback=positive, help="Seconds.")]


@app.command()
@command
def steady(
    load: Load,
    rate_per_s: Rate = 20.0,
    duration_s: Duration = 30.0,
    cv: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=100,
            callback=positive,
            help="Coefficient of variation of the gaps: 1 is Poisson, 4 is uneven.",
        ),
    ] = 1.0,
) -> None:
    """The same mean rate all the time.

    Example: hplm loadtest steady --rate 50 --deadlines interactive=0.1:0.7,batch=2:0.3
    """
    arrivals = PoissonArrivals(rate_per_s) if cv == 1 else GammaArrivals(rate_per_s, cv)
    perform(Scenario("steady", arrivals, duration_s), load)


@app.command()
@command
def ramp(
    load: Load,
    from_per_s: Annotated[float, typer.Option("--from", min=0, help="Requests per second at the start.")] = 5.0,
    to_per_s: Annotated[float, typer.Option("--to", min=0, help="Requests per second at the end.")] = 100.0,
    duration_s: Duration = 60.0,
) -> None:
    """A mean rate that grows in a straight line, to see where answers start to be late.

    Example: hplm loadtest ramp --from 5 --to 200 --duration 120 --web
    """
    perform(Scenario("ramp", RampArrivals(from_per_s, to_per_s), duration_s, slices=10), load)


@app.command()
@command
def burst(
    load: Load,
    clients: Annotated[int, typer.Option(min=1, help="Senders.")] = 250,
    stagger_s: Annotated[
        float, typer.Option("--stagger", min=0, help="Seconds from one's start to the next's.")
    ] = 0.05,
    period_s: Annotated[
        float, typer.Option("--every", callback=positive, help="Seconds from one's request to its next.")
    ] = 1.2,
    count: Annotated[int, typer.Option(min=1, help="Requests of each.")] = 50,
) -> None:
    """Senders that start one after another, each a request every so often (HMI Fig. 13).

    Example: hplm loadtest burst --clients 100 --count 20 --zipf 1
    """
    arrivals = BurstArrivals(clients, stagger_s, period_s, count)
    perform(Scenario("burst", arrivals, arrivals.lasts_s), load)


@app.command()
@command
def replay(
    load: Load,
    trace: Annotated[Path, typer.Option(help="CSV file with a column TIMESTAMP.")],
    rate_per_s: Rate = 20.0,
    burstiness: Annotated[float, typer.Option(help="0: evenly spaced, 1: as recorded, 2: more bursty.")] = 1.0,
    duration_s: Duration = 60.0,
) -> None:
    """A recorded trace of arrivals, at a mean rate and burstiness of one's own.

    Example: hplm loadtest replay --trace azure_llm_conv_2023.csv --rate 30 --burstiness 1.5
    """
    perform(Scenario("replay", TraceArrivals(trace, rate_per_s, burstiness), duration_s), load)
