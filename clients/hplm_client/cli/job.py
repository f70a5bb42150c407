"""`hplm job`."""

from __future__ import annotations

from typing import Annotated

import typer

from hplm.reporting.terminal_text import say
from hplm_client.cli.manage_commands import (
    DEFAULT_URL,
    JsonOption,
    UrlOption,
    cell,
    follow,
    lines_of,
    opened,
    show,
    show_all,
)
from hplm_client.manage.answers import Job

app = typer.Typer(
    no_args_is_help=True,
    help="Look after the jobs of a running server.\n\nExample: hplm job list --state running",
)
IdArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's id, as it was printed.")]
SHOWN = (
    "kind",
    "subject",
    "dry_run",
    "state",
    "step",
    "progress",
    "eta_s",
    "created_s",
    "started_s",
    "ended_s",
    "attempts",
)


@app.command(name="list")
def list_all(
    state: Annotated[
        list[str] | None, typer.Option(help="queued, running, done, failed or cancelled; repeat for more.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Jobs, the newest first.

    Examples:

      hplm job list

      hplm job list --state queued --state running --json
    """
    with opened(url) as client:
        found = client.list_jobs(state or None, limit=limit)
    show_all(found, ("id", "kind", "subject", "dry_run", "state", "step", "progress", "created_s", "failure"), as_json)


@app.command(name="show")
def show_one(job: IdArgument, as_json: JsonOption = False, url: UrlOption = DEFAULT_URL) -> None:
    """How far a job is, or how it ended.

    Example: hplm job show ID --json
    """
    with opened(url) as client:
        found = client.show_job(job)
    if as_json:
        show(found)
    else:
        say(_words(found))


@app.command()
def watch(job: IdArgument, as_json: JsonOption = False, url: UrlOption = DEFAULT_URL) -> None:
    """Follow a job to its end; status 1 where it failed or was cancelled. Ctrl-C ends the showing, not the job.

    Over grpc:// the server tells every change as it happens, over http:// it is asked twice a second.

    Examples:

      hplm job watch ID

      hplm job watch ID --json
    """
    with opened(url) as client:
        if as_json:
            client.wait(job, show)
        else:
            found = client.show_job(job)
            follow(client, job, found.subject.replace(":", " "))
            say(_words(client.show_job(job)))


@app.command()
def cancel(job: IdArgument, as_json: JsonOption = False, url: UrlOption = DEFAULT_URL) -> None:
    """End a job: at once where it waits, within seconds where it runs. What is served stays as it is.

    Example: hplm job cancel ID
    """
    with opened(url) as client:
        found = client.cancel_job(job)
    if as_json:
        show(found)
    elif found.state == "running":
        say(f"job {job} is told to end")
    else:
        say(f"job {job} is {found.state}")


def _words(job: Job) -> str:
    lines = [f"job {job.id}", *(f"  {name.removesuffix('_s')}: {cell(name, getattr(job, name))}" for name in SHOWN)]
    if job.failure is not None:
        lines.append(f"  error: {job.failure.wire()}")
    if job.result is not None:
        lines += [f"  {line}" for line in lines_of(job.result.get("plan", job.result))]
    return "\n".join(lines)
