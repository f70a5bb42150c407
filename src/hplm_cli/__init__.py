"""The one command line program, `hplm`. Each sub-command lives with its package and is imported when it is used."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from io import TextIOWrapper
from typing import Annotated, NamedTuple, cast

import typer
from rich.console import Console

from hplm.errors import HplmError
from hplm.reporting.terminal_text import visible


class Command(NamedTuple):
    """Where a sub-command's function or application is, the extra that brings what it needs, its line in --help."""

    target: str
    extra: str
    about: str


COMMANDS = {
    "serve": Command("hplm_cli.serve:serve", "serve", "Start Triton over a model repository; builds the demo if none."),
    "build": Command(
        "hplm_builder.cli.build:app", "build", "Convert a base, make tables, fine-tune tenants, export models."
    ),
    "store": Command("hplm_cli.store:app", "serve", "Check a store, remove what nobody uses, register what is there."),
    "worker": Command("hplm_cli.worker:worker", "build", "Do the jobs that manage requests queue; serve starts one."),
    "domain": Command("hplm_client.cli.domain:app", "client", "Create, update and delete domains of a running server."),
    "tenant": Command("hplm_client.cli.tenant:app", "client", "Create, update, delete and roll back its tenants."),
    "job": Command("hplm_client.cli.job:app", "client", "Watch, list and cancel the jobs that make them."),
    "upload": Command("hplm_client.cli.upload:app", "client", "List and drop files that were sent for them."),
    "predict": Command("hplm_client.cli.predict:predict", "client", "Ask a tenant's model on a running server."),
    "bench": Command("hplm_loadtest.cli.bench:app", "loadtest", "Measure look-up, upper layers and whole requests."),
    "loadtest": Command("hplm_loadtest.cli.loadtest:app", "loadtest", "Put load on a running server with Locust."),
    "eval": Command("hplm_builder.cli.evaluate:app", "build", "Measure quality beside plain fine-tuning."),
}
# serve passes what it does not know to tritonserver.
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
    """The program with sub-command `wanted` imported and the others only named: `hplm predict` never waits for torch."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, epilog=EXAMPLES)
    app.callback()(_root)
    for name, command in COMMANDS.items():
        if name != wanted:
            app.command(name, help=command.about)(lambda: None)
            continue
        module, _, attribute = command.target.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise SystemExit(_lacking(name, error)) from error
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name, context_settings=PASSING if name == "serve" else None)(found)
    return app


def _lacking(name: str, error: ModuleNotFoundError) -> str:
    extra = COMMANDS[name].extra
    return f"hplm {name}: {error}; install hplm with its extra {extra}: `pip install 'PATH/TO/hplm[{extra}]'`"


def _said(error: HplmError | OSError) -> str:
    if isinstance(error, HplmError):
        return f"{error.code}: {error}"
    return ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)


def _give_up_output() -> None:
    """What standard output did not take, Python would try again at its end, and complain of."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Entry point: an HplmError, or a file that cannot be used, ends with status 1 and one line, never a traceback."""
    if sys.stdout is None:
        raise SystemExit("hplm: standard output is closed")
    if not sys.stdout.isatty() and sys.stdout.encoding.lower() != "utf-8":
        # Into a file or a pipe, on Windows too: answers hold whatever was asked.
        cast(TextIOWrapper, sys.stdout).reconfigure(encoding="utf-8")
    # Names of tenants, which are their keys, are in stores and logs. What the group may do stays the caller's choice.
    os.umask(os.umask(0o077) | 0o007)
    wanted = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    try:
        make_app(wanted)()
    except (HplmError, OSError) as error:
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print(visible(f"hplm: {_said(error)}"), style="red", markup=False)
        _give_up_output()
        sys.exit(1)
    except ModuleNotFoundError as error:
        # What a command imports when it is under way.
        if wanted not in COMMANDS or (error.name or "").startswith("hplm"):
            raise
        raise SystemExit(_lacking(wanted, error)) from error
