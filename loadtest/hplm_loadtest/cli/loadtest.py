"""The command `hplm loadtest`."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.console import Console

from hplm.core.names import check_name
from hplm.errors import ConfigError, DataError, TenantNameError, TextCountError
from hplm.reporting.benchmark_result import Goal, JsonOption, Report, plain
from hplm.reporting.command_options import CommandGroup
from hplm.reporting.progress import progress_bars
from hplm.workloads.arrivals import (
    Arrivals,
    BurstArrivals,
    GammaArrivals,
    MmppArrivals,
    PoissonArrivals,
    RampArrivals,
    TraceArrivals,
    require_positive,
)
from hplm.workloads.deadlines import DeadlineClasses
from hplm.workloads.tenants import Tenants, UniformTenants, ZipfTenants
from hplm.workloads.traces import load_trace
from hplm.workloads.windows import WindowedArrivals, fit_windows
from hplm_loadtest.scenarios.outcomes import LATE_S, NOT_SENT, Run
from hplm_loadtest.scenarios.result_rows import load_goals
from hplm_loadtest.scenarios.stop_signals import stop_on_signals
from hplm_loadtest.workloads.load_plan import RequestMix

if TYPE_CHECKING:
    from hplm_loadtest.scenarios.locust_load import Outcome

SLICE_COLUMNS = ("offered_per_s", "in_time", "p50_ms", "p95_ms", "p99_ms", "refused", "lost", "kept_up")
app = CommandGroup(
    callback=lambda: stop_on_signals("loadtest"),
    no_args_is_help=True,
    help="Put load on a running server with Locust, over HTTP or gRPC, at planned times whatever the server does; latency "
    "counts from the planned time. Status 1 where requests were lost or failed, or where the load fell behind its plan.",
    epilog="Example: hplm loadtest steady --url grpc://127.0.0.1:8001 --rate 50 --duration 60",
)


def positive(option: typer.CallbackParam, value: float | None) -> float | None:
    """Check the value of an option, if it is given. Raises ConfigError if the value is not positive or is infinite."""
    if value is not None:
        require_positive(**{option.opts[0]: value})
    return value


@dataclass(frozen=True)
class Scenario:
    """The times at which requests arrive. `slices`: number of equal parts of the duration that get a row each."""

    name: str
    arrivals: Arrivals
    duration_s: float
    slices: int = 0


@dataclass(frozen=True)
class Load:
    """The options of every scenario: the server, the tenants, the texts and the deadlines."""

    url: Annotated[
        str,
        typer.Option(
            envvar="HPLM_URL",
            help="http://HOST:PORT or grpc://HOST:PORT, with https or grpcs over TLS; with --protocol, HOST:PORT.",
        ),
    ] = "http://127.0.0.1:8000"
    protocol: Annotated[str | None, typer.Option(help="http or grpc, if the address does not say which.")] = None
    models: Annotated[
        Path | None,
        typer.Option(
            help="Model repository whose tenants get requests. Tenants of pairs get two texts.",
            show_default="ask the server",
        ),
    ] = None
    tenants_option: Annotated[
        str | None,
        typer.Option(
            "--tenants",
            metavar="NAME,NAME|FILE",
            help="Tenants of single texts that get requests: names, or a file with one name per line.",
            show_default="all that the server's manager lists",
        ),
    ] = None
    zipf: Annotated[
        float,
        typer.Option(
            help="The tenant at rank r gets 1/r^ZIPF times the requests of the first; 0: all tenants equally."
        ),
    ] = 0
    text_file: Annotated[
        Path | None, typer.Option("--text", help="Texts, one per line; default: sentences of Wikipedia.")
    ] = None
    deadlines: Annotated[
        str | None, typer.Option(help="NAME=SECONDS:SHARE,... such as interactive=0.1:0.7,batch=2:0.3.")
    ] = None
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", min=0.1, callback=positive, help="Seconds after which a request counts as lost."),
    ] = 30.0
    seed: Annotated[int, typer.Option(min=0, help="The same seed draws the same requests at the same times.")] = 0
    web: Annotated[bool, typer.Option("--web", help="Open Locust's web page; runs start there.")] = False
    web_port: Annotated[
        int | None, typer.Option(help="Port of the page, which opens also without --web; 8089 if not given.")
    ] = None
    json_file: JsonOption = None

    @property
    def page_port(self) -> int | None:
        """Return the port of Locust's page, None without a page. Raises ConfigError for a number that is no port."""
        port = self.web_port if self.web_port is not None or not self.web else 8089
        if port is not None and not 0 < port < 65536:
            raise ConfigError(f"--web-port is from 1 to 65535, not {port}")
        return port

    @property
    def address(self) -> str:
        """Return the server's address with its scheme. Raises ConfigError if --protocol contradicts the scheme."""
        scheme, separator, _ = self.url.partition("://")
        if self.protocol not in (None, "http", "grpc"):
            raise ConfigError(f"--protocol is http or grpc, not {self.protocol!r}")
        if separator and self.protocol not in (None, scheme.removesuffix("s")):
            raise ConfigError(
                f"--protocol {self.protocol} does not fit {self.url}; ports differ, so write the whole address"
            )
        return self.url if separator or self.protocol is None else f"{self.protocol}://{self.url}"

    def mix(self) -> RequestMix:
        """Return the source of the load's requests. Raises ConfigError, DataError or UnreachableError."""
        from hplm_loadtest.workloads.texts import read_lines, wikipedia_sentences

        names, pair_tenants = self._tenants()
        texts = read_lines(self.text_file) if self.text_file is not None else wikipedia_sentences(200)
        tenants: Tenants = ZipfTenants(names, self.zipf) if self.zipf else UniformTenants(names)
        deadlines = DeadlineClasses.parse(self.deadlines) if self.deadlines is not None else None
        return RequestMix(tenants, texts, deadlines, frozenset(pair_tenants))

    def _tenants(self) -> tuple[list[str], list[str]]:
        """Return the names of all tenants that get requests, and the names of those that take pairs of texts."""
        if self.tenants_option is not None and self.models is not None:
            raise ConfigError("--tenants and --models both say which tenants to ask: leave one out")
        if self.tenants_option is not None:
            return parse_tenants(self.tenants_option), []
        if self.models is None:
            from hplm_loadtest.scenarios.locust_load import list_tenants

            listed = list_tenants(self.address, self.timeout_s)
            return [tenant.name for tenant in listed], [tenant.name for tenant in listed if tenant.texts == 2]
        # Imported here because reading a store imports torch, which other loads do not need.
        from hplm_loadtest.benchmarks.served_repository import tenants_by_texts

        if not self.models.is_dir():
            raise ConfigError(
                f"there is no {self.models}: without --models the server names its tenants, --tenants names some of them"
            )
        single, pairs = tenants_by_texts(self.models)
        return sorted([*single, *pairs]), pairs


def parse_tenants(option: str) -> list[str]:
    """Return the lines of a file, or else the names between commas. Raises DataError if the option is neither."""
    from hplm_loadtest.workloads.texts import read_lines

    # A misspelt path is refused here. A tenant called `a.txt` is named by `a.txt,`.
    if Path(option).is_file() or "/" in option or option.endswith(".txt"):
        return read_lines(Path(option))
    names = [name.strip() for name in option.split(",") if name.strip()]
    try:
        return [check_name(name) for name in names]
    except TenantNameError as error:
        raise DataError(f"--tenants {option!r} is neither a file nor names with commas between: {error}") from None


def run_scenario(scenario: Scenario, load: Load) -> None:
    """Run a scenario and publish its result.

    Exits with status 1 if requests were lost or failed or the generator fell behind, with 128 plus the signal's number if a
    signal stopped the run.
    """
    # Imported before anything else that a run needs, because the module patches the standard library.
    from hplm_loadtest.scenarios.locust_load import LoadTask, check_page, run_load

    page_port = load.page_port
    if page_port is not None:
        check_page(page_port)
    mix = load.mix()
    rng = np.random.default_rng(load.seed)
    make_plan = partial(mix.plan, scenario.arrivals, scenario.duration_s, rng)

    def name_of(deadline_s: float) -> str:
        return "predict" if mix.deadlines is None else mix.deadlines.name_of(deadline_s)

    with progress_bars(transient=True) as progress:
        load_task = LoadTask(make_plan, name_of, load.timeout_s, progress)
        outcome = run_load(load.address, scenario.name, load_task, page_port)
    make_result(scenario, load, mix, outcome).publish(load.json_file)
    is_good = judge(outcome.run)
    if not outcome.is_whole:
        print_error(
            f"stopped after {outcome.run.duration_s:.1f} of {plain(scenario.duration_s)} s, "
            f"{len(outcome.run):,} of {outcome.planned:,} requests: the figures are of that part"
        )
        raise typer.Exit(128 + outcome.signal if outcome.signal else 1)
    if not is_good:
        raise typer.Exit(1)


def print_error(message: str, style: str | None = "red") -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"hplm loadtest: {message}", style=style, markup=False)


def make_result(scenario: Scenario, load: Load, mix: RequestMix, outcome: Outcome) -> Report:
    """Return the benchmark result: a row of all requests, one row per deadline class, one row per slice of time."""
    run = outcome.run
    rows = [{"requests_of": "all", **run.row()}]
    if mix.deadlines is not None:
        for name, (deadline_s, _) in mix.deadlines.classes.items():
            chosen = run.deadlines_s == deadline_s
            if chosen.any():
                rows.append({"requests_of": f"{name} ({plain(deadline_s)} s)", **run.select(chosen).row()})
    edges_s = np.linspace(0.0, run.duration_s, scenario.slices + 1).tolist()
    for start_s, end_s in itertools.pairwise(edges_s):
        if len(part := run.between(start_s, end_s)):
            figures = part.row()
            rows.append({"seconds": f"{plain(start_s)}-{plain(end_s)}", **{key: figures[key] for key in SLICE_COLUMNS}})
    settings = {
        "url": outcome.url,
        "arrivals": str(scenario.arrivals),
        "duration_s": run.duration_s,
        "planned_s": scenario.duration_s,
        "interrupted": not outcome.is_whole,
        "seed": load.seed,
        "tenants": len(mix.tenants.names),
        "of_pairs": len(mix.pair_tenants),
        "zipf": load.zipf,
        "texts": len(mix.texts),
        "mean_words": round(float(np.mean([len(text.split()) for text in mix.texts])), 1),
        "timeout_s": load.timeout_s,
    }
    sent = len(run) - run.codes.count(NOT_SENT)
    whole = Goal("loadtest-whole", "share of the plan that was sent", 1, sent / outcome.planned, "", "higher")
    return Report(f"loadtest {scenario.name}", settings, rows, [*load_goals("loadtest", rows[:1]), whole])


def judge(run: Run) -> bool:
    """Return whether the figures mean anything; print one line if requests were lost or failed, or if one side fell behind."""
    bad = run.kinds["lost"] + run.kinds["failed"]
    if (message := verdict(run)) is not None:
        print_error(message)
    return bad == 0 and run.kept_up and run.kinds["answered"] > 0


def verdict(run: Run) -> str | None:
    """Return what went wrong, on which side, and what to do; None if nothing did."""
    not_sent, kinds = run.codes.count(NOT_SENT), run.kinds
    counts = [
        f"{count:,} {outcome}"
        for count, outcome in (
            (not_sent, "not sent because too many were under way"),
            (kinds["lost"] - not_sent, "lost"),
            (kinds["refused"], "refused"),
            (kinds["failed"], "failed"),
        )
        if count
    ]
    summary = f"of {len(run):,} requests {', '.join(counts)}" if counts else ""
    match run.fell_behind:
        case "generator":
            late = f"{100 * (1 - run.sent_within(LATE_S)):.1f} % of the requests were sent more than 20 ms late"
            return (
                f"the load generator fell behind: {'; '.join(filter(None, [late, summary]))}. These figures are of the "
                "generator, not of the server: lower the rate, free a core for it, or run it on another machine"
            )
        case "server":
            slow = f"half of its answers took more than {np.median(run.answer_s):,.1f} s" if run.is_server_slow else ""
            return (
                f"the server fell behind: {'; '.join(filter(None, [summary, slow]))}. Lower the rate, or give the server more "
                "cores or processes"
            )
    if kinds["lost"] + kinds["failed"] == 0:
        return None
    pairs = "tenants of pairs take two texts, so name tenants by --models" if TextCountError.code in run.codes else ""
    return f"{summary}: {pairs or 'the row `errors` has their codes'}"


Rate = Annotated[float, typer.Option("--rate", callback=positive, help="Requests per second.")]
Duration = Annotated[float, typer.Option("--duration", min=0.1, callback=positive, help="Seconds.")]


@app.command()
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
    """Send requests at a constant mean rate.

    Example: hplm loadtest steady --rate 50 --deadlines interactive=0.1:0.7,batch=2:0.3
    """
    arrivals = PoissonArrivals(rate_per_s) if cv == 1 else GammaArrivals(rate_per_s, cv)
    run_scenario(Scenario("steady", arrivals, duration_s), load)


@app.command()
def ramp(
    load: Load,
    from_per_s: Annotated[float, typer.Option("--from", min=0, help="Requests per second at the start.")] = 5.0,
    to_per_s: Annotated[float, typer.Option("--to", min=0, help="Requests per second at the end.")] = 100.0,
    duration_s: Duration = 60.0,
) -> None:
    """Send requests at a mean rate that changes linearly, to see from which rate on answers are late.

    Example: hplm loadtest ramp --from 5 --to 200 --duration 120 --web
    """
    run_scenario(Scenario("ramp", RampArrivals(from_per_s, to_per_s), duration_s, slices=10), load)


@app.command()
def burst(
    load: Load,
    clients: Annotated[int, typer.Option(min=1, help="Senders.")] = 250,
    stagger_s: Annotated[
        float, typer.Option("--stagger", min=0, help="Seconds from the start of a sender to the start of the next.")
    ] = 0.05,
    period_s: Annotated[
        float, typer.Option("--every", callback=positive, help="Seconds between two requests of a sender.")
    ] = 1.2,
    count: Annotated[int, typer.Option(min=1, help="Requests of each sender.")] = 50,
) -> None:
    """Send a burst: senders start one after another, and each sends a request at a fixed interval (HMI Fig. 13).

    Example: hplm loadtest burst --clients 100 --count 20 --zipf 1
    """
    arrivals = BurstArrivals(clients, stagger_s, period_s, count)
    run_scenario(Scenario("burst", arrivals, arrivals.duration_s), load)


@app.command()
def mmpp(
    load: Load,
    states: Annotated[
        list[str] | None,
        typer.Option(
            "--state", help="RATE:SECONDS, requests per second and how long they last on average; two or more."
        ),
    ] = None,
    duration_s: Duration = 60.0,
) -> None:
    """Send requests at a rate that jumps between states at random times (a Markov-modulated Poisson process).

    Example: hplm loadtest mmpp --state 5:20 --state 80:3
    """
    pairs = [_state(text) for text in states or ("5:20", "80:3")]
    arrivals = MmppArrivals(tuple(rate for rate, _ in pairs), tuple(stay_s for _, stay_s in pairs))
    run_scenario(Scenario("mmpp", arrivals, duration_s), load)


def _state(text: str) -> tuple[float, float]:
    rate, _, stay_s = text.partition(":")
    try:
        return float(rate), float(stay_s)
    except ValueError:
        raise ConfigError(f"--state: RATE:SECONDS was expected, such as 80:3, got {text!r}") from None


@app.command()
def replay(
    load: Load,
    trace: Annotated[Path, typer.Option(help="CSV file with a column TIMESTAMP.")],
    rate_per_s: Rate = 20.0,
    burstiness: Annotated[
        float | None, typer.Option(help="0: evenly spaced, 1: as recorded, 2: more bursty.", show_default="1")
    ] = None,
    window_s: Annotated[
        float | None,
        typer.Option(
            "--window",
            callback=positive,
            help="Draw arrivals anew in each window of this many seconds, with its rate and cv (Clockwork's way). The "
            "trace must have dates or seconds.",
        ),
    ] = None,
    cv_scale: Annotated[
        float | None, typer.Option(callback=positive, help="With --window: factor on the cv of each window.")
    ] = None,
    duration_s: Duration = 60.0,
) -> None:
    """Replay a recorded trace of arrivals at a given mean rate and burstiness.

    Example: hplm loadtest replay --trace azure_llm_conv_2023.csv --rate 30 --burstiness 1.5

    Example: hplm loadtest replay --trace azure_llm_conv_2023.csv --rate 30 --window 60 --cv-scale 4
    """
    if window_s is None and cv_scale is not None:
        raise ConfigError("--cv-scale changes the cv of windows: give --window too")
    if window_s is not None and burstiness is not None:
        raise ConfigError("--burstiness is for a replay without windows: give --cv-scale in its place")
    arrivals: Arrivals = TraceArrivals(trace, rate_per_s, 1.0 if burstiness is None else burstiness)
    recorded = load_trace(trace)
    for line in recorded.lines():
        print_error(line, style="yellow" if line.startswith("warning") else None)
    if window_s is not None:
        # The windows that the run reaches have the mean rate, not those of the whole trace.
        windows = fit_windows(recorded.times_s, float(recorded.times_s[-1]), window_s)[
            : math.ceil(duration_s / window_s)
        ]
        if not (count := WindowedArrivals(windows).expected_count(duration_s)):
            raise ConfigError(f"the first {plain(duration_s)} s of {trace} have no arrivals: give a longer --duration")
        arrivals = WindowedArrivals(windows, rate_per_s * duration_s / count, cv_scale or 1.0)
    run_scenario(Scenario("replay", arrivals, duration_s), load)
