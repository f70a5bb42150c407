"""Options that several of the operator's commands share, and the client that these options describe."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from hplm_client.cli.display import console, print_outcome, printing_errors
from hplm_client.manage.client import ManageClient
from hplm_client.transport.headers import headers_from_environment

DEFAULT_URL = "grpc://127.0.0.1:8001"

UrlOption = Annotated[
    str,
    typer.Option(
        envvar="HPLM_URL", help="Address of the server: grpc://HOST:PORT or http://HOST:PORT; grpcs or https over TLS."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object a line on standard output.")]
BaseOption = Annotated[str | None, typer.Option(help="Base of the domain. Default: the server's own base.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """The options of every command that submits a job."""

    seed: Annotated[int | None, typer.Option(help="Seed of the training, which makes a run repeatable.")] = None
    on_server: Annotated[
        bool,
        typer.Option(
            "--path-on-server",
            help="The files are on the server; upload nothing. The server's operator must allow this.",
        ),
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the files and print the cost of the job. Change nothing.")
    ] = False
    detach: Annotated[bool, typer.Option("--detach", help="Print the job's id and do not wait for the job.")] = False
    as_json: JsonOption = False
    url: UrlOption = DEFAULT_URL

    def __post_init__(self) -> None:
        if self.dry_run and self.detach:
            raise typer.BadParameter("--dry-run waits for the cost of the job: leave --detach out")

    def given(self, *names: str) -> dict[str, Any]:
        """Return the values of those of the named options that the user gave."""
        return {name: value for name in names if (value := getattr(self, name)) not in (None, [])}


def open_client(url: str, *, as_json: bool = False) -> ManageClient:
    """Return a client that sends the headers of `HPLM_HEADERS`. With `as_json` an error is printed as JSON too."""
    with printing_errors(as_json):
        return ManageClient(url, headers=headers_from_environment())


def delete(kind: str, name: str, url: str, *, yes: bool, as_json: bool, **base: str | None) -> None:
    """Delete a tenant or domain, after a question unless `yes`. Ends the program unless the answer is yes."""
    request = {kind: name, **base}
    with open_client(url) as client:
        if not yes:
            # A wrong name is an error before the question.
            client.ask(f"{kind}.show", **request)
            try:
                is_confirmed = typer.confirm(f"Delete {kind} {name} with all its versions?", err=True)
            except typer.Abort:
                console().print("Nothing was done. If no person can answer, give --yes.")
                raise
            if not is_confirmed:
                console().print("Nothing was done.")
                raise typer.Abort
        client.ask(f"{kind}.delete", **request)
    print_outcome({kind: name}, f"{kind} {name} is deleted", as_json)
