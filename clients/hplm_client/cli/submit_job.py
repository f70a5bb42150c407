"""The steps of a command that submits a job: upload its files, submit the job, follow the job to its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from hplm.core.columns import Columns, check_header, check_use
from hplm.core.text_lines import refuse_model
from hplm.core.wire import CORPUS_ENDINGS, DATA_ENDINGS
from hplm.errors import HplmError, UnknownJobError, check_ending
from hplm.reporting.terminal_text import visible
from hplm_client.cli.display import (
    console,
    print_error,
    print_json,
    print_outcome,
    printing_errors,
    progress_bars,
    remaining_time,
    result_lines,
)
from hplm_client.cli.options import JobOptions
from hplm_client.manage.answers import JobEvent
from hplm_client.manage.client import ManageClient, Source

# Exit status after Ctrl-C, as of a shell.
INTERRUPTED = 130


def upload_files(
    client: ManageClient, files: Mapping[str, Path | None], options: JobOptions, columns: Columns | None = None
) -> dict[str, Source]:
    """Upload the files that are not None, unless they are on the server. Return their names for the request, by their key.

    `columns` are those of labelled files. A file whose header lacks them is refused before anything is uploaded.
    """
    paths = {key: path for key, path in files.items() if path is not None}
    if options.on_server:
        return {key: client.on_server(str(path)) for key, path in paths.items()}
    sources: dict[str, Source] = {}
    with printing_errors(options.as_json):
        for key, path in paths.items():
            refuse_model(path)
            check_ending(path.name, CORPUS_ENDINGS if key == "corpus" else DATA_ENDINGS)
        if columns is not None:
            check_use(columns, [path.name for path in paths.values()])
            for key, path in paths.items():
                check_header(path, columns, is_labelled=key != "unlabelled")
        with progress_bars() as progress:
            for key, path in paths.items():
                task = progress.add_task(f"upload {path.name}", total=None, remaining="")

                def show_progress(sent_bytes: int, total_bytes: int, task: Any = task) -> None:
                    progress.update(task, completed=sent_bytes, total=total_bytes)

                try:
                    sources[key] = client.upload(path, show_progress)
                except BaseException:
                    _drop_uploads(client, sources.values())
                    raise
    return sources


def submit_job(
    client: ManageClient, action: str, request: Mapping[str, Any], options: JobOptions, *, has_files: bool = True
) -> dict[str, Any] | None:
    """Submit a job and follow it to its end. A dry run prints the plan. `has_files`: the job's request names files.

    Returns the job's result to show, or None for a dry run or a detached job. With `--json` the outcome is printed, also that
    of a request or a job that failed, and the return value is None.
    """
    # The server drops the uploads however the job ends. Otherwise they would count against the room for uploads for a day.
    request = {**request, "drop_uploads": True} if has_files else request
    job = ""
    try:
        with printing_errors(options.as_json):
            if options.dry_run:
                plan = client.plan(action, told=_show_waiting, **request)
                print_outcome(plan.details, "\n".join(result_lines(plan.details)), options.as_json)
                return None
            job = str(client.ask(action, **request)["job"])
    finally:
        if not job:
            unused = [*request.get("data", {}).values(), request.get("corpus", {}), *request.get("dev", [])]
            _drop_uploads(client, unused)
    if options.detach:
        print_outcome({"job": job}, job, options.as_json)
        return None
    kind = action.partition(".")[0]
    event = follow_job(client, job, f"{kind} {request[kind]}", as_json=options.as_json)
    if options.as_json:
        print_json({"job": job, **dataclasses.asdict(event)})
        return None
    return event.result or {}


def _show_waiting(event: JobEvent) -> None:
    if event.state == "queued":
        console().print("Waiting for a worker process (`hplm worker`), which makes the plan.", markup=False)


def _drop_uploads(client: ManageClient, sources: Iterable[Source]) -> None:
    for source in sources:
        with suppress(HplmError):
            client.drop_upload(source)


def follow_job(client: ManageClient, job: str, description: str, *, as_json: bool = False) -> JobEvent:
    """Show a job's progress until the job is done. Raises the job's error.

    Ctrl-C or a server that stays away ends only the following, not the job. Then the job's id is printed, with `as_json` as
    JSON. With `as_json` the error of a failed job is printed as JSON too.
    """
    shown_step, has_ended, description = "", False, visible(description)
    with progress_bars() as progress:
        task = progress.add_task(description, total=1.0, remaining="")

        def show_event(event: JobEvent) -> None:
            nonlocal shown_step, has_ended
            has_ended = event.ended
            step = visible(event.step or event.state)
            progress.update(
                task,
                description=f"{description}: {step}",
                completed=event.progress,
                remaining=remaining_time(event.eta_s),
            )
            if progress.disable and step != shown_step:
                console().print(f"{description}: {step}", markup=False)
                shown_step = step

        def show_id() -> None:
            progress.stop()
            console().print(f"The job goes on: `hplm job watch {job}`, `hplm job cancel {job}`.", markup=False)
            if as_json:
                print_json({"job": job})

        try:
            return client.wait(job, show_event)
        except KeyboardInterrupt:
            show_id()
            raise typer.Exit(INTERRUPTED) from None
        except HplmError as error:
            if not has_ended and not isinstance(error, UnknownJobError):
                show_id()
            elif as_json:
                print_error(error, job=job)
            raise
