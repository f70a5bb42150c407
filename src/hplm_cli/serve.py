"""`hplm serve`."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import signal
import sys
import time
import urllib.error
import urllib.request
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from hplm_client import Client
from hplm_client.transport.connection import headers_of_environment
from rich.console import Console
from rich.markup import escape

from hplm.adapters.bank import TenantBank, is_banked
from hplm.adapters.tenant import TenantCard
from hplm.core import wire
from hplm.core.settings import EncodeSettings, ManagerSettings, load_settings
from hplm.errors import ArtifactError, HplmError, RegistryError, StartError
from hplm.models import base_folder
from hplm.registry.catalog import Catalog
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from hplm.triton.launcher.log_files import CrashWatch, is_plain
from hplm.triton.launcher.server import DIRECT, Ports, TritonServer, check_free, find_triton, free_ports
from hplm.triton.launcher.stubs import StubKeeper
from hplm_cli.supervisor import Supervisor

DEFAULT_MODELS = Path("build/demo/models")
SHOWN_TENANTS = 8
ANY_TEXT = "A short text, to see an answer."
# A Triton that has crashed says where it was and ends, or hangs and answers nobody.
CRASH_ENDS_S, ANSWERS_S = 5.0, 10.0


class _Watch:
    """Sees the end of a Triton, and makes one of a Triton that has crashed and hangs."""

    def __init__(self, server: TritonServer, log: Path) -> None:
        self._server, self._crash = server, CrashWatch(log)
        self.has_hung = False

    def is_over(self) -> bool:
        """Whether it has ended, or hung and was ended now."""
        if self.has_hung or self._server.has_ended:
            return True
        if self._crash.has_crashed() and not self._server.ends(CRASH_ENDS_S) and not _answers(self._server):
            self.has_hung = True
            with suppress(ProcessLookupError):
                os.kill(self._server.process.pid, signal.SIGKILL)
        return self.has_hung


class _Told(Console):
    """Serving goes on where nothing can be said, as on a full disk."""

    def print(self, *said: Any, **how: Any) -> None:
        with suppress(OSError):
            super().print(*said, **how)

    def on_broken_pipe(self) -> None:
        """Where nobody listens any more rich would end the program."""
        self.quiet = True


def serve(
    context: typer.Context,
    models: Annotated[Path, typer.Option(help="Triton model repository to serve.")] = DEFAULT_MODELS,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="On free ports: print predictions as one JSON list and stop; status 1 where a tenant gives none.",
        ),
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=1, max=65_535)] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65_535)] = 8001,
    metrics_port: Annotated[int, typer.Option(min=1, max=65_535)] = 8002,
    log: Annotated[
        Path | None,
        typer.Option(help="Triton's log; default: triton.log beside the models, triton-check.log of --check."),
    ] = None,
    start_timeout: Annotated[
        float,
        typer.Option(min=1.0, help="Seconds until it must be ready: a store of gigabytes is read and checked first."),
    ] = 120.0,
    worker: Annotated[
        bool | None, typer.Option("--worker/--no-worker", help="Start a worker for jobs; default: as the models say.")
    ] = None,
) -> None:
    """Start a real Triton over a model repository and show how to call it, until Ctrl-C.

    Builds the default repository first where it is not there yet. Options it does not know go to tritonserver.

    Examples:

      hplm serve

      hplm serve --check

      hplm serve --models build/mine/models --host 0.0.0.0 --log-verbose=1
    """
    console = _Told(stderr=True, soft_wrap=True, highlight=False)
    # SIGINT too: a shell without job control has it ignored in what it starts in the background.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Where SIGHUP is ignored, nohup asked for it: who closes the terminal means to be served on.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    # `--check` takes free ports: it may run beside a server that holds the usual ones.
    ports = free_ports() if check else Ports(http_port, grpc_port, metrics_port, host)
    check_free(ports)
    if worker and models.is_dir() and not (models / "manager").is_dir():
        raise StartError(
            f"--worker: {models} has no manager, so there are no jobs; `hplm build export --manager` adds it"
        )
    if models == DEFAULT_MODELS and not models.is_dir():
        from hplm_builder.cli.build import show_scores
        from hplm_builder.fleet.demo import DEMO_FOLDER, build_demo

        from hplm.reporting.progress import progress_bars

        console.print(f"No models in {models} yet: building them, a few minutes once.")
        with progress_bars() as progress:
            show_scores(build_demo(DEMO_FOLDER, progress))
    cards, left, damaged = served_tenants(models)
    install = find_triton()
    console.print(f"Triton: {install.origin} ({install.binary})")
    server = jobs = None
    try:
        log = log or models.parent / ("triton-check.log" if check else "triton.log")
        server = TritonServer(models, ports, install=install, flags=context.args, log=log, tied=True)
        server.wait_ready(start_timeout)
        watch = _Watch(server, log)
        stubs = StubKeeper(server, watch.is_over)
        predictions = _predictions(console, ports.http_url, cards)
        if check:
            print(json.dumps(predictions, indent=2, ensure_ascii=False))
            if damaged or len(predictions) < len(cards):
                raise typer.Exit(1)
            return
        beside = log if is_plain(log) else models  # not in /dev
        jobs = start_worker(models, wanted=worker, log=beside.with_name("worker.log"))
        _explain(console, ports, predictions, left)
        while not watch.is_over():
            for said in stubs.look():
                console.print(said, style="yellow", markup=False)
            if server.renew_reaper():
                console.print(
                    "the process that ends what a killed server leaves has ended: starting another", style="yellow"
                )
            time.sleep(0.2)
        raise server.ended(was_hung=watch.has_hung)
    except KeyboardInterrupt:
        console.print("Stopping ...")
        if check:
            raise typer.Exit(130) from None
    finally:
        # An impatient second Ctrl-C must leave neither Triton nor the worker behind.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        try:
            if jobs is not None:
                jobs.stop()
        finally:
            if server is not None:
                server.stop()


def _answers(server: TritonServer) -> bool:
    """Whether Triton still answers a request, with an error too, or writes down for an operator what it died of."""
    inputs = [{"name": name, "shape": [1, 1], "datatype": "BYTES", "data": [""]} for name in (wire.TEXT, wire.TENANT)]
    url = f"{server.ports.http_url}/v2/models/hbert/infer"
    request = urllib.request.Request(url, json.dumps({"inputs": inputs}).encode(), {"Content-Type": "application/json"})
    try:
        with DIRECT.open(request, timeout=ANSWERS_S):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, http.client.HTTPException):
        with suppress(OSError):
            return "CoreDumping:\t1" in Path(f"/proc/{server.process.pid}/status").read_text()
        return False


def start_worker(models: Path, *, wanted: bool | None, log: Path) -> Supervisor | None:
    """The worker of a repository with a manager, where it is `wanted` or, with None, where the manager's settings say so."""
    folder = models / "manager" / "1"
    if not folder.is_dir():
        return None
    settings = load_settings(ManagerSettings, folder / "settings.json")
    if not (settings.worker if wanted is None else wanted):
        return None
    store = str((folder / settings.store).resolve())
    command = [sys.executable, "-m", "hplm_cli", "worker", "--store", store, "--parent", str(os.getpid())]
    # Not as an argument: everybody on the machine may read those, and the URL may hold a password. Also where it is empty:
    # a variable of this process's own must not send the worker to another registry than the server's.
    return Supervisor(command, log, environment={"HPLM_REGISTRY": settings.registry})


def served_tenants(models: Path) -> tuple[list[TenantCard], int, int]:
    """The first tenants behind a repository, those with a folder of their own before those in a bank, how many more, and
    how many were left out because their files are not sound.

    Raises before Triton starts where settings, registry or base are not sound.
    """
    folder = models / "hbert_upper" / "1"
    settings = load_settings(EncodeSettings, folder / "settings.json")
    store = Store((folder / settings.store).resolve(), settings.registry)
    bring_up_to_date(store)
    base = base_folder.read(store.base(settings.base), verify=False)
    with closing(Catalog(store, settings.base)) as catalog:
        bank = TenantBank(store, catalog, base.fingerprint)
        cards: list[TenantCard] = []
        served = catalog.served()
        left, damaged = len(served), 0
        for tenant in sorted(served, key=lambda one: (is_banked(store, store.path(one.path)), one.name)):
            if len(cards) == SHOWN_TENANTS:
                break
            left -= 1
            try:
                cards.append(bank.card(tenant))
            except ArtifactError as error:
                damaged += 1
                where = _Told(stderr=True, soft_wrap=True)
                where.print(f"tenant {tenant.name} cannot be served: {error}", style="yellow", markup=False)
    return cards, left, damaged


def bring_up_to_date(store: Store) -> None:
    """The registry's tables, where they are of an older version: the stages only read. Raises RegistryError."""
    try:
        Registry.open(store).close()
    except RegistryError as error:
        # What cannot be written may be fit to be read all the same; if not, this says why.
        try:
            Registry.open_read_only(store).close()
        except RegistryError:
            raise error from None


def _predictions(console: Console, url: str, cards: list[TenantCard]) -> list[dict[str, object]]:
    """One real answer of each tenant; a tenant that cannot answer is named and left out."""
    answers = []
    # Where its own options have it guarded, this asks as the commands do.
    with Client(url, headers=headers_of_environment()) as client:
        for card in cards:
            try:
                # Jobs once kept a text of their data in the card: it is a customer's, and this is printed.
                example = card.example if "job" not in card.about else ""
                pair = (card.example_pair if example else "") or ANY_TEXT
                answers.append(client.predict(card.name, example or ANY_TEXT, pair if card.texts == 2 else None))
            except HplmError as error:
                console.print(f"tenant {card.name} cannot answer: {error.wire()}", style="yellow", markup=False)
    shown = ("tenant", "text", "pair", "label", "score")
    return [{key: a.as_dict()[key] for key in shown if key != "pair" or a.pair is not None} for a in answers]


def _explain(console: Console, ports: Ports, predictions: list[dict[str, object]], left: int) -> None:
    for p in predictions:
        text = str(p["text"])
        shown = text if len(text) <= 70 else f"{text[:67]}..."
        score = f"{p['score']:.3f}" if isinstance(p["score"], float) else "-"
        told = escape(f"  {p['tenant']!s:<12} {shown!r} -> ")
        console.print(f"{told}[bold]{escape(str(p['label']))}[/bold] ({score})")
    if left:
        console.print(f"  and {left:,} more tenants")
    if not predictions:
        console.print(
            "  no tenant answers: `hplm build tenant --help`, or `hplm tenant create --help` while this serves"
        )
    console.print(
        f"\nServing HTTP on {ports.http_url}, gRPC on {ports.grpc_url}, metrics on http://{ports.host}:{ports.metrics}/metrics"
    )
    if predictions:
        _show_calls(console, ports, predictions[0])
    console.print("\nCtrl-C stops it.")


def _show_calls(console: Console, ports: Ports, prediction: dict[str, object]) -> None:
    """How to ask for one of the predictions: with curl, in Python and by our command."""
    tenant = str(prediction["tenant"])
    texts = [str(prediction[key]) for key in ("text", "pair") if key in prediction]
    body = json.dumps(
        {
            "inputs": [
                {"name": "TEXT", "shape": [1, len(texts)], "datatype": "BYTES", "data": texts},
                {"name": "TENANT", "shape": [1, 1], "datatype": "BYTES", "data": [tenant]},
            ],
            "outputs": [{"name": "LABEL"}, {"name": "SCORE"}],
        }
    )
    # JSON strings are Python strings, and double quotes need no quoting inside the shell's single ones.
    asked = ", ".join(json.dumps(value) for value in (tenant, *texts))
    code = f"from hplm_client import Client; print(Client({json.dumps(ports.grpc_url)}).predict({asked}).label)"
    call = ["predict", "--url", ports.http_url, "--tenant", tenant, texts[0]]
    call += ["--pair", *texts[1:]] if len(texts) == 2 else []
    lines = [
        shlex.join(["curl", "-s", f"{ports.http_url}/v2/models/hbert/infer", "-d", body]),
        shlex.join([sys.executable, "-c", code]),
        shlex.join([str(Path(sys.executable).parent / "hplm"), *call]),
    ]
    console.print("\n" + "\n\n".join(lines), markup=False)
