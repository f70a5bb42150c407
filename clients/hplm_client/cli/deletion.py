"""The deletion of a tenant, a domain or a base, after a question."""

from __future__ import annotations

from typing import Annotated

import typer

from hplm_client.cli.display import console, print_outcome
from hplm_client.cli.options import open_client

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def confirm(question: str) -> None:
    """Ask a question on standard error. Ends the program with status 1 unless the answer is yes."""
    try:
        is_confirmed = typer.confirm(question, err=True)
    except typer.Abort:
        console().print("Nothing was done. If no person can answer, give --yes.")
        raise
    if not is_confirmed:
        console().print("Nothing was done.")
        raise typer.Abort


def delete_confirmed(kind: str, name: str, url: str, *, yes: bool, as_json: bool, **base: str | None) -> None:
    """Delete a tenant or domain, after a question unless `yes`. Ends the program unless the answer is yes."""
    request = {kind: name, **base}
    over = f" over base {base['base']}" if base.get("base") else ""
    with open_client(url) as client:
        if not yes:
            # A wrong name is an error before the question.
            client.ask(f"{kind}.show", **request)
            confirm(f"Delete {kind} {name} with all its versions{over}?")
        client.ask(f"{kind}.delete", **request)
    print_outcome({kind: name}, f"{kind} {name} is deleted{over}", as_json)
