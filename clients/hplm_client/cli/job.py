"""The commands `hplm job`."""

from __future__ import annotations

from typing import Annotated

import typer

from hplm.reporting.terminal_text import say
from hplm_client.cli.display import format_value, print_json, print_outcome, print_records, result_lines
from hplm_client.cli.options import DEFAULT_URL, JsonOption, UrlOption, open_client
from hplm_client.cli.submit_job import end_unpublished, follow_job
from hplm_client.manage.answers import Job

app = typer.Typer(
    no_args_is_help=True,
    help="Watch, list and cancel the jobs of a running server.\n\nExample: hplm job list --state running",
)
IdArgument = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job, as the command that made it printed.")]
LIST_COLUMNS = ("id", "kind", "subject", "dry_run", "state", "step", "progress", "created_s", "failure")
SHOW_FIELDS = (
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
def list_jobs(
    state: Annotated[
        list[str] | None,
        typer.Option(help="List only jobs that are queued, running, done, failed or cancelled. Repeat for several."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most jobs to list.")] = 20,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """List jobs, newest first.

    Examples:

      hplm job list

      hplm job list --state queued --state running --json
    """
    with open_client(url) as client:
        jobs = client.list_jobs(state or None, limit=limit)
    print_records(jobs, LIST_COLUMNS, as_json)


@app.command(name="show")
def show_job(job: IdArgument, as_json: JsonOption = False, url: UrlOption = DEFAULT_URL) -> None:
    """Show a job's progress, or how the job ended.

    Example: hplm job show ID --json
    """
    with open_client(url) as client:
        details = client.show_job(job)
    print_outcome(details, _describe(details), as_json)


@app.command()
def watch(job: IdArgument, as_json: JsonOption = False, url: UrlOption = DEFAULT_URL) -> None:
    """Follow a job to its end. Ctrl-C ends the watch, not the job.

    The exit status is 1 if the job fails or is cancelled, and 3 if an update is no better and publishes nothing.

    The command asks twice a second.

    Examples:

      hplm job watch ID

      hplm job watch ID --json
    """
    with open_client(url) as client:
        if as_json:
            event = client.wait(job, print_json)
        else:
            event = follow_job(client, job, client.show_job(job).subject.replace(":", " "))
            say(_describe(client.show_job(job)))
        end_unpublished(event.result)


@app.command()
def cancel(job: IdArgument, as_json: JsonOption = False, url: UrlOption = DEFAULT_URL) -> None:
    """Cancel a job. A queued job ends immediately, a running job within seconds. The version that is served stays.

    Example: hplm job cancel ID
    """
    with open_client(url) as client:
        details = client.cancel_job(job)
    outcome = "will end soon" if details.state == "running" else f"is {details.state}"
    print_outcome(details, f"job {job} {outcome}", as_json)


def _describe(job: Job) -> str:
    fields = (f"  {name.removesuffix('_s')}: {format_value(name, getattr(job, name))}" for name in SHOW_FIELDS)
    lines = [f"job {job.id}", *fields]
    if job.failure is not None:
        lines.append(f"  error: {job.failure.wire()}")
    if job.result is not None:
        lines += [f"  {line}" for line in result_lines(job.result.get("plan", job.result))]
    return "\n".join(lines)
