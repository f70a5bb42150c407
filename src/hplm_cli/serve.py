"""`hplm serve`."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from hplm_client import Client
from hplm_client.transport.headers import headers_from_environment
from rich.console import Console
from rich.markup import escape

from hplm.access.keys import HEADER, KEY_VARIABLE
from hplm.access.quota_keeper import QuotaKeeper
from hplm.adapters.bank import TenantBank, is_banked
from hplm.adapters.tenant import TenantCard
from hplm.core import roles, wire
from hplm.core.settings import ManagerSettings, load_settings
from hplm.errors import ArtifactError, HplmError, RegistryError, StartError
from hplm.manage.base_survey import unserved_bases
from hplm.models import base_folder
from hplm.registry.catalog import Catalog
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from hplm.triton.launcher.given_flags import check_flags, has_grpc_tls
from hplm.triton.launcher.install import find_triton
from hplm.triton.launcher.kept_server import KeptServer
from hplm.triton.launcher.log_files import is_plain
from hplm.triton.launcher.ports import Ports, check_free, free_ports, listening_address
from hplm.triton.launcher.server import TritonServer
from hplm_cli.health.endpoint import HealthEndpoint
from hplm_cli.health.questions import ANY_TEXT
from hplm_cli.health.readiness import Readiness
from hplm_cli.serve_access import ServeAccess, choose_access, record_last_uses
from hplm_cli.supervisor import Supervisor

DEFAULT_MODELS = Path("build/demo/models")
SHOWN_TENANTS = 8
# Signals that end serving.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ShownTenant(NamedTuple):
    """A tenant that is shown at the start, and the model by which clients call its base."""

    model: str
    card: TenantCard


class _LossyConsole(Console):
    """A console that drops output that cannot be written, so that a full disk does not end serving."""

    def print(self, *objects: Any, **options: Any) -> None:
        with suppress(OSError):
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Drop all further output. By default rich would end the program when nothing reads the output any more."""
        self.quiet = True


def serve(
    context: typer.Context,
    models: Annotated[Path, typer.Option(help="Triton model repository to serve.")] = DEFAULT_MODELS,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Use free ports, print predictions as one JSON list and stop; status 1 if a tenant gives none.",
        ),
    ] = False,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; 0.0.0.0 or :: for all. Beyond this machine only with --keys or --insecure."
        ),
    ] = "127.0.0.1",
    keys: Annotated[
        bool,
        typer.Option("--keys", help="Answer only requests with a key, see `hplm key`; also with HPLM_ACCESS=keys."),
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let other machines call every tenant and the manager without a key.")
    ] = False,
    http_port: Annotated[int, typer.Option(min=1, max=65_535)] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65_535)] = 8001,
    metrics_port: Annotated[int, typer.Option(min=1, max=65_535)] = 8002,
    health_port: Annotated[int, typer.Option(min=1, max=65_535, help="Port of /ready and /live.")] = 8003,
    log: Annotated[
        Path | None,
        typer.Option(help="Triton's log; default: triton.log beside the models, triton-check.log with --check."),
    ] = None,
    start_timeout: Annotated[
        float,
        typer.Option(min=1.0, help="Seconds until Triton must be ready; it first reads and checks the whole store."),
    ] = 120.0,
    drain_timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds at the end in which accepted requests are still answered.")
    ] = 10.0,
    worker: Annotated[
        bool | None,
        typer.Option("--worker/--no-worker", help="Start a worker for jobs; default: as the models' settings say."),
    ] = None,
) -> None:
    """Start a real Triton over a model repository and show how to call it, until Ctrl-C.

    Builds the default repository first if it does not exist yet. Unknown options go to tritonserver. A Triton that was killed
    or has crashed is started again. `hplm health` asks whether every model answers.

    Examples:

      hplm serve

      hplm serve --check

      hplm serve --models build/mine/models --keys --host 0.0.0.0 --log-verbose=1
    """
    console = _LossyConsole(stderr=True, soft_wrap=True, highlight=False)
    # SIGINT too, because a shell without job control starts background processes with SIGINT ignored.
    for number in ENDING:
        # An ignored SIGHUP comes from nohup: serving goes on when the terminal closes.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    # `--check` takes free ports, because another server may have the usual ones.
    ports = free_ports() if check else Ports(http_port, grpc_port, metrics_port, listening_address(host), health_port)
    check_flags(context.args)
    ports = replace(ports, has_grpc_tls=has_grpc_tls(context.args))
    access = choose_access(keys=keys, insecure=insecure, host=listening_address(host), flags=context.args)
    check_free(ports)
    readiness = Readiness(models, access, headers_from_environment())
    endpoint = None if check else HealthEndpoint(ports.host, health_port, readiness.verdict)
    if worker and models.is_dir() and not (models / wire.MANAGER).is_dir():
        raise StartError(
            f"--worker: {models} has no manager, so there are no jobs; `hplm build export --models {models} --keep-settings "
            f"--name {roles.served_base(models).name} --manager` adds it"
        )
    if models == DEFAULT_MODELS and not models.is_dir():
        from hplm_builder.cli.build import show_scores
        from hplm_builder.fleet.demo import DEMO_FOLDER, build_demo

        from hplm.reporting.progress import progress_bars

        console.print(f"No models in {models} yet: installing the demo, once.")
        with progress_bars() as progress:
            show_scores(build_demo(DEMO_FOLDER, progress))
    shown, more, damaged = served_tenants(models)
    unserved: list[str] = []
    with suppress(RegistryError):
        unserved = unserved_bases(models)
    for line in unserved:
        console.print(line, style="yellow", markup=False)
    install = find_triton()
    console.print(f"Triton: {install.origin} ({install.binary})")
    log = log or models.parent / ("triton-check.log" if check else "triton.log")
    environment = dict(access.environment)
    launch = partial(
        TritonServer,
        models,
        replace(ports, health=None),
        install=install,
        flags=[*access.flags, *context.args],
        log=log,
        tied=True,
        environment=environment,
    )
    server = KeptServer(
        models,
        launch,
        lambda message: console.print(message, style="yellow", markup=False),
        start_timeout_s=start_timeout,
    )
    readiness.follow(server, ports.http_url)
    jobs = uses = quotas = None
    try:
        uses = record_last_uses(access, models)
        if (quotas := start_quotas(models, console)) is not None:
            environment |= quotas.environment
        server.start("; ".join(unserved))
        predictions = _predictions(console, ports.http_url, shown, access)
        if check:
            print(json.dumps(predictions, indent=2, ensure_ascii=False))
            if damaged or len(predictions) < len(shown):
                raise typer.Exit(1)
            return
        beside = log if is_plain(log) else models  # not in /dev
        jobs = start_worker(models, wanted=worker, log=beside.with_name("worker.log"))
        # A model that calls the models of bases answers every tenant; the last one does so by a tenant's cascade too.
        calling = [name for name in roles.CALLING if (models / name).is_dir()]
        of_tenant = {t.card.name: calling[-1] if calling else t.model for t in shown}
        _explain(console, ports, predictions, more, of_tenant, needs_keys=access.mode.needs_keys)
        while True:
            for message in server.look():
                console.print(message, style="yellow", markup=False)
            time.sleep(0.2)
    except KeyboardInterrupt:
        if check:
            console.print("Stopping ...")
            raise typer.Exit(130) from None
        _drain(console, server, drain_timeout)
    finally:
        # A further Ctrl-C must leave neither Triton nor the worker behind.
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        ending = threading.Thread(target=jobs.stop) if jobs is not None else None
        if ending is not None:
            ending.start()
        try:
            server.stop()
        finally:
            if ending is not None:
                ending.join()
            if uses is not None:
                uses.close()
            if quotas is not None:
                quotas.stop()
            readiness.close()
            if endpoint is not None:
                endpoint.close()


def _drain(console: Console, server: KeptServer, timeout_s: float) -> None:
    """Wait for the answers to all requests that Triton has accepted. New requests are refused. A second signal ends this."""
    is_cut_short = threading.Event()
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: is_cut_short.set())
    console.print(f"Stopping ... (accepted requests are answered for up to {timeout_s:g} s; a second Ctrl-C ends this)")
    if not server.drain(timeout_s, is_cut_short.is_set):
        console.print("requests that were accepted are not all answered: they are refused now", style="yellow")


def start_quotas(models: Path, console: Console) -> QuotaKeeper | None:
    """Start to lease quotas from the registry. Return None, and say so, if the registry cannot be written."""
    served = roles.served_base(models)
    try:
        keeper = QuotaKeeper(Store(served.store_root, served.settings.encode.registry))
    except (RegistryError, OSError) as error:
        console.print(f"limits of tenants are not shared with other servers: {error}", style="yellow", markup=False)
        return None
    keeper.start()
    return keeper


def start_worker(models: Path, *, wanted: bool | None, log: Path) -> Supervisor | None:
    """Start the worker of a repository with a manager. If `wanted` is None, the manager's settings decide."""
    folder = models / wire.MANAGER / "1"
    if not folder.is_dir():
        return None
    settings = load_settings(ManagerSettings, folder / "settings.json")
    if not (settings.worker if wanted is None else wanted):
        return None
    store = str((folder / settings.store).resolve())
    command = [sys.executable, "-m", "hplm_cli", "worker", "--store", store, "--parent", str(os.getpid())]
    # The registry is not an argument, because every user may read arguments, and the URL may have a password. An empty URL is
    # passed too: this process's own variable must not send the worker to another registry than the server's.
    return Supervisor(command, log, environment={"HPLM_REGISTRY": settings.registry})


def served_tenants(models: Path) -> tuple[list[ShownTenant], int, int]:
    """Return the first tenants of each base of a repository, how many more there are, and how many were left out as damaged.

    Tenants with a folder of their own come before tenants in a bank. Raises before Triton starts if settings, registry or
    a base are damaged.
    """
    shown: list[ShownTenant] = []
    more = damaged = 0
    for served in (roles.served_base(models), *roles.served_bases(models)[1:]):
        store = Store(served.store_root, served.settings.encode.registry)
        bring_up_to_date(store)
        base = base_folder.read(store.base(served.base), verify=False)
        with closing(Catalog(store, served.base)) as catalog:
            bank = TenantBank(store, catalog, base.fingerprint)
            tenants = sorted(
                catalog.served(), key=lambda tenant: (is_banked(store, store.path(tenant.path)), tenant.name)
            )
            cards: list[TenantCard] = []
            while tenants and len(cards) < SHOWN_TENANTS:
                tenant = tenants.pop(0)
                try:
                    cards.append(bank.card(tenant))
                except ArtifactError as error:
                    damaged += 1
                    console = _LossyConsole(stderr=True, soft_wrap=True)
                    console.print(f"tenant {tenant.name} cannot be served: {error}", style="yellow", markup=False)
            more += len(tenants)
        shown += [ShownTenant(served.name, card) for card in cards]
    return shown, more, damaged


def bring_up_to_date(store: Store) -> None:
    """Migrate the registry's tables from an older version, because the stages only read them. Raises RegistryError."""
    try:
        Registry.open(store).close()
    except RegistryError as error:
        # A registry that cannot be written may still be readable; if not, the first error says why.
        try:
            Registry.open_read_only(store).close()
        except RegistryError:
            raise error from None


def _predictions(
    console: Console, url: str, tenants: list[ShownTenant], access: ServeAccess
) -> list[dict[str, object]]:
    """Return a real answer of each tenant. A tenant that cannot answer is named and left out."""
    answers = []
    for model, card in tenants:
        # The server's options may require headers, which the commands take from the environment too.
        headers = {**headers_from_environment(), **access.headers(card.name)}
        with Client(url, model=model, headers=headers) as client:
            try:
                pair = (card.example_pair or ANY_TEXT) if card.texts == 2 else None
                answers.append(client.predict(card.name, card.example or ANY_TEXT, pair))
            except HplmError as error:
                console.print(f"tenant {card.name} cannot answer: {error.wire()}", style="yellow", markup=False)
    shown = ("tenant", "text", "pair", "label", "score")
    return [{key: a.as_dict()[key] for key in shown if key != "pair" or a.pair is not None} for a in answers]


def _explain(
    console: Console,
    ports: Ports,
    predictions: list[dict[str, object]],
    more: int,
    models: Mapping[str, str],
    *,
    needs_keys: bool,
) -> None:
    """Show the answers of tenants, the addresses, and how to call the first tenant; `models` are by tenant."""
    for p in predictions:
        text = str(p["text"])
        shown = text if len(text) <= 70 else f"{text[:67]}..."
        score = f"{p['score']:.3f}" if isinstance(p["score"], float) else "-"
        line = escape(f"  {p['tenant']!s:<12} {shown!r} -> ")
        console.print(f"{line}[bold]{escape(str(p['label']))}[/bold] ({score})")
    if more:
        console.print(f"  and {more:,} more tenants")
    if not predictions:
        console.print(
            "  no tenant answers: `hplm build tenant --help`, or `hplm tenant create --help` while this serves"
        )
    console.print(
        f"\nServing HTTP on {ports.http_url}, gRPC on {ports.grpc_url}, metrics on {ports.metrics_url}, "
        f"readiness on {ports.health_url}/ready"
    )
    if needs_keys:
        console.print("Each request needs a key of its tenant: `hplm key create TENANT`, then `export HPLM_KEY=...`.")
    if predictions:
        _show_calls(console, ports, predictions[0], models[str(predictions[0]["tenant"])], needs_keys=needs_keys)
    console.print("\nCtrl-C stops it.")


def _show_calls(console: Console, ports: Ports, prediction: dict[str, object], model: str, *, needs_keys: bool) -> None:
    """Show how to request one of the predictions: with curl, in Python, and of a model that clients find `hplm predict`.

    The commands take a key from the variable HPLM_KEY.
    """
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
    # JSON strings are Python strings, and double quotes need no escape inside the shell's single quotes.
    arguments = ", ".join(json.dumps(value) for value in (tenant, *texts))
    is_usual = model in (wire.MODEL, *roles.CALLING)
    server = json.dumps(ports.grpc_url) if is_usual else f"{json.dumps(ports.grpc_url)}, model={json.dumps(model)}"
    # A key is never an argument, because every user of the machine may read arguments.
    imports, key = ("import os; ", f', key=os.environ["{KEY_VARIABLE}"]') if needs_keys else ("", "")
    code = f"{imports}from hplm_client import Client; print(Client({server}{key}).predict({arguments}).label)"
    call = ["predict", "--url", ports.http_url, "--tenant", tenant, texts[0]]
    call += ["--pair", *texts[1:]] if len(texts) == 2 else []
    url = f"{ports.http_url}/v2/models/{model}/infer"
    with_header = f"printf '{HEADER}: Bearer %s' \"${KEY_VARIABLE}\" | " if needs_keys else ""
    lines = [
        with_header + shlex.join(["curl", "-s", *(["-H", "@-"] if needs_keys else []), url, "-d", body]),
        shlex.join([sys.executable, "-c", code]),
        *([shlex.join([str(Path(sys.executable).parent / "hplm"), *call])] if is_usual else []),
    ]
    console.print("\n" + "\n\n".join(lines), markup=False)
