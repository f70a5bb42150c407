"""`hplm serve`."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from hplm_client import Client
from rich.console import Console

from hplm import config
from hplm.adapters import tenant as tenants
from hplm.adapters.bank_file import BankFile
from hplm.adapters.tenant import TenantCard
from hplm.errors import ArtifactError, HplmError, StartError
from hplm.nn import base as bases
from hplm.store.layout import Store
from hplm.triton.server import Ports, TritonServer, check_free, find_triton, free_ports

DEFAULT_MODELS = Path("build/demo/models")
SHOWN_TENANTS = 8
ANY_TEXT = "A short text, to see an answer."


def serve(
    context: typer.Context,
    models: Annotated[Path, typer.Option(help="Triton model repository to serve.")] = DEFAULT_MODELS,
    check: Annotated[
        bool, typer.Option("--check", help="On free ports: print predictions as one JSON list, stop, exit 0.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option()] = 8000,
    grpc_port: Annotated[int, typer.Option()] = 8001,
    metrics_port: Annotated[int, typer.Option()] = 8002,
    log: Annotated[Path | None, typer.Option(help="Triton's log; default: triton.log beside the models.")] = None,
) -> None:
    """Start a real Triton over a model repository and show how to call it, until Ctrl-C.

    Builds the default repository first where it is not there yet. Options it does not know go to tritonserver.

    Examples:

      hplm serve

      hplm serve --check

      hplm serve --models build/mine/models --host 0.0.0.0 --log-verbose=1
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    # `--check` takes free ports: it may run beside a server that holds the usual ones.
    ports = free_ports() if check else Ports(http_port, grpc_port, metrics_port, host)
    check_free(ports)
    if models == DEFAULT_MODELS:
        from hplm_builder.cli import show_scores
        from hplm_builder.demo import DEMO_FOLDER, build_demo

        if not models.is_dir():
            from hplm.progress import progress_bars

            console.print(f"No models in {models} yet: building them, a few minutes once.")
            with progress_bars() as progress:
                show_scores(build_demo(DEMO_FOLDER, progress))
    cards = served_tenants(models)
    install = find_triton()
    console.print(f"Triton: {install.origin} ({install.binary})")
    server = None
    try:
        log = log or models.parent / "triton.log"
        server = TritonServer(models, ports, install=install, flags=context.args, log=log)
        server.wait_ready()
        predictions = _predictions(console, ports.http_url, cards)
        if check:
            print(json.dumps(predictions, indent=2, ensure_ascii=False))
            return
        _explain(console, ports, predictions)
        while server.process.poll() is None:
            time.sleep(0.2)
        raise StartError(f"Triton ended by itself with status {server.process.returncode}; see {server.log_path}")
    except KeyboardInterrupt:
        console.print("Stopping ...")
        if check:
            raise typer.Exit(130) from None
    finally:
        # An impatient second Ctrl-C must not leave Triton behind.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if server is not None:
            server.stop()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def served_tenants(models: Path) -> list[TenantCard]:
    """The tenants behind a repository, of a bank file the first ones.

    Raises before Triton starts where settings, base or tables are not sound.
    """
    folder = models / "hbert_upper" / "1"
    settings = config.load(config.UpperSettings, folder / "settings.json")
    store = Store((folder / settings.store).resolve())
    base = bases.load(store.base(settings.base), verify=False)
    cards = []
    for name in store.tenant_names():
        try:
            cards.append(tenants.load_card(store.tenant(name)))
        except ArtifactError as error:
            Console(stderr=True, soft_wrap=True).print(f"tenant {name} cannot be served: {error}", style="yellow")
    for folder in store.banks():
        bank = BankFile(folder, base.fingerprint)
        cards += [bank.card(name) for name in bank.names[:SHOWN_TENANTS]]
    return cards


def _predictions(console: Console, url: str, cards: list[TenantCard]) -> list[dict[str, object]]:
    """One real answer of each tenant; a tenant that cannot answer is named and left out."""
    answers = []
    with Client(url) as client:
        for card in cards[:SHOWN_TENANTS]:
            try:
                answers.append(client.predict(card.name, card.example or ANY_TEXT))
            except HplmError as error:
                console.print(f"tenant {card.name} cannot answer: {error.wire()}", style="yellow", markup=False)
    return [{"tenant": a.tenant, "text": a.text, "label": a.label, "score": a.score} for a in answers]


def _explain(console: Console, ports: Ports, predictions: list[dict[str, object]]) -> None:
    for p in predictions:
        text = str(p["text"])
        shown = text if len(text) <= 70 else f"{text[:67]}..."
        score = f"{p['score']:.3f}" if isinstance(p["score"], float) else "-"
        console.print(f"  {p['tenant']!s:<12} {shown!r} -> [bold]{p['label']}[/bold] ({score})")
    if not predictions:
        console.print("  no tenants yet: `hplm build tenant --help`")
        return
    tenant, text = str(predictions[0]["tenant"]), str(predictions[0]["text"])
    body = json.dumps(
        {
            "inputs": [
                {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": [text]},
                {"name": "TENANT", "shape": [1, 1], "datatype": "BYTES", "data": [tenant]},
            ],
            "outputs": [{"name": "LABEL"}, {"name": "SCORE"}],
        }
    )
    console.print(
        f"\nServing HTTP on {ports.http_url}, gRPC on {ports.grpc_url}, metrics on http://{ports.host}:{ports.metrics}/metrics"
    )
    # JSON strings are Python strings, and double quotes need no quoting inside the shell's single ones.
    url, name, words = (json.dumps(value) for value in (ports.grpc_url, tenant, text))
    code = f"from hplm_client import Client; print(Client({url}).predict({name}, {words}).label)"
    call = ["predict", "--url", ports.http_url, "--tenant", tenant, text]
    lines = [
        shlex.join(["curl", "-s", f"{ports.http_url}/v2/models/hbert/infer", "-d", body]),
        shlex.join([sys.executable, "-c", code]),
        shlex.join([str(Path(sys.executable).parent / "hplm"), *call]),
    ]
    console.print("\n" + "\n\n".join(lines) + "\n\nCtrl-C stops it.", markup=False)
