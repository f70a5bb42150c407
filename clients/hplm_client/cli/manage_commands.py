"""What the operator's commands share: options, uploads and jobs with bars, tables or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from hplm.core.columns import Columns, check_header, check_use
from hplm.core.wire import CORPUS_ENDINGS, DATA_ENDINGS
from hplm.errors import HplmError, UnknownJobError, check_ending
from hplm.reporting.command_options import with_shared
from hplm.reporting.terminal_text import say, visible
from hplm_client.manage.answers import JobEvent, Plan
from hplm_client.manage.client import ManageClient, Source
from hplm_client.transport.connection import headers_of_environment

DEFAULT_URL = "grpc://127.0.0.1:8001"
INTERRUPTED = 130

UrlOption = Annotated[
    str, typer.Option(envvar="HPLM_URL", help="grpc://HOST:PORT, or http://HOST:PORT; grpcs or https over TLS.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a line on standard output.")]
BaseOption = Annotated[str | None, typer.Option(help="A base of the store; without it the server's own.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")]


@dataclasses.dataclass(frozen=True)
class Way:
    """The options of every command that makes a job: how it goes on, and how it talks."""

    seed: Annotated[int | None, typer.Option(help="Makes a run repeatable.")] = None
    on_server: Annotated[
        bool,
        typer.Option(
            "--path-on-server", help="Files lie on the server, nothing is uploaded; its operator must allow it."
        ),
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the files, say what it would cost, change nothing.")
    ] = False
    detach: Annotated[bool, typer.Option("--detach", help="Print the job's id and do not wait for it.")] = False
    as_json: JsonOption = False
    url: UrlOption = DEFAULT_URL

    def __post_init__(self) -> None:
        if self.dry_run and self.detach:
            raise typer.BadParameter("--dry-run waits for what it would cost: leave --detach out")


job_command = partial(with_shared, Way)


def console() -> Console:
    """For people: standard error, so that standard output stays clean."""
    return Console(stderr=True, soft_wrap=True, highlight=False)


def bars() -> Progress:
    """Bars with an estimate that a task's field `left` gives; nothing is drawn where no terminal is."""
    shown = console()
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}", markup=False),
        console=shown,
        disable=not shown.is_terminal,
        # What is printed meanwhile would come out where the bars are drawn.
        redirect_stdout=False,
    )


def opened(url: str, *, as_json: bool = False) -> ManageClient:
    """With the headers that commands send. `as_json`: an error is printed so too."""
    with errors_shown(as_json):
        return ManageClient(url, headers=headers_of_environment())


def send(
    client: ManageClient, files: Mapping[str, Path | None], way: Way, columns: Columns | None = None
) -> dict[str, Source]:
    """The files that there are, by their part, uploaded unless they lie on the server.

    Labelled files have `columns`: a header without them is refused before anything is sent.
    """
    named = {part: path for part, path in files.items() if path is not None}
    if way.on_server:
        return {part: client.on_server(str(path)) for part, path in named.items()}
    sources: dict[str, Source] = {}
    with errors_shown(way.as_json):
        for part, path in named.items():
            check_ending(path.name, CORPUS_ENDINGS if part == "corpus" else DATA_ENDINGS)
        if columns is not None:
            check_use(columns, [path.name for path in named.values()])
            for part, path in named.items():
                check_header(path, columns, is_labelled=part != "unlabelled")
    with errors_shown(way.as_json), bars() as progress:
        for part, path in named.items():
            task = progress.add_task(f"upload {path.name}", total=None, left="")

            def sent(sent_bytes: int, total_bytes: int, task: Any = task) -> None:
                progress.update(task, completed=sent_bytes, total=total_bytes)

            try:
                sources[part] = client.upload(path, sent)
            except BaseException:
                _drop(client, sources.values())
                raise
    return sources


def submit(client: ManageClient, action: str, request: Mapping[str, Any], way: Way) -> JobEvent | None:
    """Ask for a job and follow it to its end, or for its plan; None where that is not waited for.

    With `as_json` what is known at the end is printed, also of a request or a job that came to nothing.
    """
    given = {key: value for key, value in request.items() if value not in (None, {})}
    job = ""
    try:
        with errors_shown(way.as_json):
            if way.dry_run:
                _show_plan(client.plan(action, told=_tell_waiting, **given, drop_uploads=True), way.as_json)
                return None
            # However it ends: nobody would name them again, and they would count against everybody's quota for a day.
            job = str(client.ask(action, **given, drop_uploads=True)["job"])
    finally:
        if not job:
            _drop(client, [*given.get("data", {}).values(), given.get("corpus", {})])
    if way.detach:
        show({"job": job}) if way.as_json else say(job)
        return None
    kind = action.partition(".")[0]
    event = follow(client, job, f"{kind} {given[kind]}", as_json=way.as_json)
    if way.as_json:
        show({"job": job, **dataclasses.asdict(event)})
    return event


def _tell_waiting(event: JobEvent) -> None:
    if event.state == "queued":
        console().print("Waiting for a worker (`hplm worker`), which makes the plan.", markup=False)


def _drop(client: ManageClient, sources: Iterable[Source]) -> None:
    for source in sources:
        with suppress(HplmError):
            client.drop_upload(source)


def follow(client: ManageClient, job: str, about: str, *, as_json: bool = False) -> JobEvent:
    """Show a job's progress until it has ended well. Raises the error it failed with.

    An interrupt, or a server that stays away, ends only the showing, not the job: its id is said. With `as_json` that is JSON,
    too, with the `error` of a job that has come to nothing.
    """
    told, has_ended, about = "", False, visible(about)
    with bars() as progress:
        task = progress.add_task(about, total=1.0, left="")

        def tell(event: JobEvent) -> None:
            nonlocal told, has_ended
            has_ended = event.ended
            words = visible(event.step or event.state)
            progress.update(task, description=f"{about}: {words}", completed=event.progress, left=left(event.eta_s))
            if progress.disable and words != told:
                console().print(f"{about}: {words}", markup=False)
                told = words

        def leave() -> None:
            progress.stop()
            console().print(f"The job goes on: `hplm job watch {job}`, `hplm job cancel {job}`.", markup=False)
            if as_json:
                show({"job": job})

        try:
            return client.wait(job, tell)
        except KeyboardInterrupt:
            leave()
            raise typer.Exit(INTERRUPTED) from None
        except HplmError as error:
            if not has_ended and not isinstance(error, UnknownJobError):
                leave()
            elif as_json:
                _show_error(error, job=job)
            raise


@contextmanager
def errors_shown(as_json: bool) -> Iterator[None]:
    """With `as_json` an error is printed so before it goes on."""
    try:
        yield
    except HplmError as error:
        if as_json:
            _show_error(error)
        raise


def _show_error(error: HplmError, **about: str) -> None:
    show({**about, "error": {"code": error.code, "message": str(error)}})


def left(eta_s: float | None) -> str:
    """An estimate in words, empty where there is none."""
    if eta_s is None:
        return ""
    if eta_s < 90:
        return f"about {eta_s:.0f} s left"
    return f"about {eta_s / 60:.0f} min left" if eta_s < 5400 else f"about {eta_s / 3600:.1f} h left"


def sure(question: str, yes: bool) -> None:
    """Ask before something that cannot be taken back; anything but yes ends the program."""
    if yes:
        return
    try:
        is_sure = typer.confirm(question, err=True)
    except typer.Abort:
        console().print("Nothing was done; where nobody can be asked, give --yes.")
        raise
    if not is_sure:
        console().print("Nothing was done.")
        raise typer.Abort


def show(value: Any) -> None:
    """A record or a dictionary as one line of JSON."""
    say(json.dumps(value if isinstance(value, dict) else dataclasses.asdict(value), ensure_ascii=False))


def show_all(records: Sequence[Any], columns: Sequence[str], as_json: bool) -> None:
    """Records, one a line: as JSON, or those `columns` of them below each other, never cut, for other programs read it too."""
    if as_json:
        for one in records:
            show(one)
        return
    rows = [[name.removesuffix("_s") for name in columns]]
    rows += [[visible(cell(name, getattr(one, name)), is_line=True) for name in columns] for one in records]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())


def cell(name: str, value: Any) -> str:
    """A field's value for people; times are those of this machine's clock."""
    if value is None:
        return "-"
    if isinstance(value, HplmError):
        return value.code
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "eta_s":
        return left(value).removesuffix(" left")
    if name.endswith("_s"):
        try:
            return datetime.fromtimestamp(value).isoformat(sep=" ", timespec="seconds")
        except (OverflowError, ValueError, OSError):
            # Of a clock that was set to no time there is.
            return str(value)
    if name == "progress":
        # What is not done is not 100%.
        return f"{100 if value == 1 else min(99, round(100 * value))}%"
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {one:.3f}" if isinstance(one, float) else f"{key} {one}" for key, one in value.items())
    return str(value)


def _show_plan(plan: Plan, as_json: bool) -> None:
    if as_json:
        show(plan.details)
        return
    for line in lines_of(plan.details):
        say(line)


def lines_of(told: Mapping[str, Any]) -> Iterator[str]:
    """A plan or a job's result for people."""
    for key, value in told.items():
        if key != "warnings":
            words = left(value).removesuffix(" left") if key == "estimated_s" else cell(key, value)
            yield f"{key.removesuffix('_s')}: {words}"
    for words in told.get("warnings", ()):
        yield f"warning: {words}"


def warn(told: Mapping[str, Any]) -> None:
    """What a plan or a job's result says is odd about the data, a line each."""
    for line in lines_of({"warnings": told.get("warnings", ())}):
        say(line)
