"""Options that several of the operator's commands share, and the client that these options describe."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from hplm_client.cli.display import printing_errors
from hplm_client.manage.client import ManageClient
from hplm_client.transport.access_keys import keys_from_environment, one_key
from hplm_client.transport.headers import headers_from_environment

DEFAULT_URL = "grpc://127.0.0.1:8001"

UrlOption = Annotated[
    str,
    typer.Option(
        envvar="HPLM_URL", help="Address of the server: grpc://HOST:PORT or http://HOST:PORT; grpcs or https over TLS."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object a line on standard output.")]
SeedOption = Annotated[int | None, typer.Option(help="Seed of the training, which makes a run repeatable.")]
BaseOption = Annotated[
    str | None, typer.Option(help="Base of the domain: `hplm base list` names them. Default: the server's first base.")
]


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """The options of every command that submits a job, behind those of its training."""

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


def open_client(url: str, *, as_json: bool = False) -> ManageClient:
    """Return a client that sends the headers of `HPLM_HEADERS` and the key of `HPLM_KEY`.

    With `as_json` an error is printed as JSON too.
    """
    with printing_errors(as_json):
        return ManageClient(url, headers=headers_from_environment(), key=one_key(keys_from_environment()))
