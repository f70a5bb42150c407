"""The command line program `hplm`. Each sub-command is in its own package and is imported when it is used."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import traceback
from http.client import HTTPException
from io import TextIOWrapper
from typing import Annotated, NamedTuple, cast

import typer
from rich.console import Console

from hplm import errors
from hplm.core.characters import shown
from hplm.errors import DataError, HplmError, InternalError, StoreUnavailableError, UnreachableError


class Command(NamedTuple):
    """A sub-command: its function or application, the extra with its dependencies, its line and its panel in --help."""

    target: str
    extra: str
    panel: str
    help: str


# In the order of --help: the path of the demo first.
COMMANDS = {
    "serve": Command("hplm_cli.serve:serve", "serve", "Serve", "Start Triton over a model repository, or over a demo."),
    "predict": Command(
        "hplm_client.cli.predict:predict", "client", "Serve", "Ask a tenant's model on a running server."
    ),
    "health": Command(
        "hplm_cli.health.command:health",
        "client",
        "Serve",
        "Ask whether every model of a server answers: status 0 or 1.",
    ),
    "build": Command("hplm_builder.cli.build:app", "build", "Serve", "Convert a base, make tables, export models."),
    "tenant": Command(
        "hplm_client.cli.tenant:app", "client", "Tenants", "Create, update, delete and roll back tenants."
    ),
    "domain": Command("hplm_client.cli.domain:app", "client", "Tenants", "Create, update and delete domains."),
    "job": Command("hplm_client.cli.job:app", "client", "Tenants", "Watch, list and cancel the jobs of a server."),
    "upload": Command("hplm_client.cli.upload:app", "client", "Tenants", "List and drop files uploaded for jobs."),
    "base": Command("hplm_cli.base:app", "serve", "Operate", "List the bases that a server serves, or take one out."),
    "key": Command("hplm_cli.key:app", "client", "Operate", "Create, list and revoke keys of tenants and operators."),
    "audit": Command("hplm_cli.audit:audit", "client", "Operate", "Show who asked the manager for what."),
    "store": Command(
        "hplm_cli.store:app", "serve", "Operate", "Check a store, remove unused files, register artifacts."
    ),
    "worker": Command("hplm_cli.worker:worker", "build", "Operate", "Run queued jobs; `hplm serve` starts a worker."),
    "profile": Command("hplm_cli.profile:profile", "build", "Plan", "Measure a served base: latency, memory, loading."),
    "place": Command("hplm_cli.place.commands:app", "place", "Plan", "Plan which bases run on which devices."),
    "eval": Command("hplm_builder.cli.evaluate:app", "loadtest", "Measure", "Measure quality beside plain fine-tuning."),
    "loadtest": Command("hplm_loadtest.cli.loadtest:app", "loadtest", "Measure", "Load a running server with Locust."),
    "bench": Command("hplm_loadtest.cli.bench:app", "loadtest", "Measure", "Run the benchmarks of the pages."),
}
# `serve` passes options that it does not know to tritonserver.
PASSING = {"allow_extra_args": True, "ignore_unknown_options": True}
EXAMPLES = """Examples:

hplm serve    builds what is missing, starts Triton, shows how to call it

hplm serve --check    the same, prints predictions as JSON and stops

hplm predict -t films "A moving film."    asks a running server

hplm build --help    every step from a pretrained model to model folders"""


def _version(shown: bool) -> None:
    if shown:
        print(f"hplm {importlib.metadata.version('hplm')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show and exit.")
    ] = False,
) -> None:
    """Thousands of tenants' own language models from one machine, on NVIDIA Triton."""


def make_app(wanted: str | None) -> typer.Typer:
    """Make the program. Only sub-command `wanted` is imported, so that `hplm predict` never waits for torch."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, epilog=EXAMPLES)
    app.callback()(_root)
    for name, command in COMMANDS.items():
        if name != wanted:
            app.command(name, help=command.help, rich_help_panel=command.panel)(lambda: None)
            continue
        module, _, attribute = command.target.partition(":")
        try:
            loaded = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise SystemExit(_missing_extra(name, error)) from error
        if isinstance(loaded, typer.Typer):
            app.add_typer(loaded, name=name, rich_help_panel=command.panel)
        else:
            app.command(name, context_settings=PASSING if name == "serve" else None)(loaded)
    return app


def _missing_extra(name: str, error: ModuleNotFoundError) -> str:
    extra = COMMANDS[name].extra
    return f"hplm {name}: {error}; install hplm with its extra {extra}: `pip install 'PATH/TO/hplm[{extra}]'`"


def _message(error: Exception) -> str:
    """Return an error in one line, with a code. Errors that no command expects name the place in the program."""
    if isinstance(error, HplmError):
        return error.wire()
    if isinstance(error, ConnectionError | TimeoutError | HTTPException):
        return UnreachableError(f"a connection was cut: {type(error).__name__} {error}").wire()
    if isinstance(error, OSError):
        words = ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)
        return (StoreUnavailableError if error.errno in errors.PASSING else DataError)(words).wire()
    *_, place = traceback.extract_tb(error.__traceback__)
    return InternalError(
        f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno}). This is a mistake of hplm: please report "
        "this line with your command"
    ).wire()


def _give_up_output() -> None:
    """Drop output that standard output refused. Otherwise Python would try to write it again at the end, and report it."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Run the program. An error ends it with status 1 and one line that has a code, never with a traceback."""
    if sys.stdout is None:
        raise SystemExit("hplm: standard output is closed")
    if not sys.stdout.isatty() and sys.stdout.encoding.lower() != "utf-8":
        # A file or a pipe gets UTF-8 on every system, because answers repeat any text.
        cast(TextIOWrapper, sys.stdout).reconfigure(encoding="utf-8")
    # Stores and logs have the names of tenants, which are their keys, so other users may not read them. The caller's umask
    # decides what the group may do.
    os.umask(os.umask(0o077) | 0o007)
    wanted = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    try:
        make_app(wanted)()
    except Exception as error:
        # A command may import more while it runs.
        if isinstance(error, ModuleNotFoundError) and wanted in COMMANDS and not (error.name or "").startswith("hplm"):
            raise SystemExit(_missing_extra(wanted, error)) from error
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print(shown(f"hplm: {_message(error)}"), style="red", markup=False)
        _give_up_output()
        sys.exit(1)
