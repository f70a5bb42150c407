"""`hplm tenant`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hplm.core.columns import Columns
from hplm.reporting.terminal_text import say, visible
from hplm.tasks.task_loader import task_named, task_names
from hplm_client.cli.manage_commands import (
    DEFAULT_URL,
    JsonOption,
    UrlOption,
    Way,
    YesOption,
    cell,
    errors_shown,
    job_command,
    opened,
    send,
    show,
    show_all,
    submit,
    sure,
    warn,
)
from hplm_client.manage.answers import TenantDetails

app = typer.Typer(
    no_args_is_help=True,
    help="Create, update and delete tenants of a running server.\n\n"
    "Example: hplm tenant create acme --train train.csv --test test.csv",
)
NameArgument = Annotated[str, typer.Argument(help="Name of the tenant.")]
TrainOption = Annotated[Path, typer.Option(help="Labelled examples: .jsonl, .csv, .tsv or .conll.")]
DevOption = Annotated[Path | None, typer.Option(help="To stop early by; without it a part of train.")]
TestOption = Annotated[Path | None, typer.Option(help="To report at the end.")]
UnlabelledOption = Annotated[
    Path | None,
    typer.Option(
        help="More texts of the kind, without labels: a model that trains all upper layers labels them first."
    ),
]
TextColumnOption = Annotated[
    str | None, typer.Option(help="The column of the text; without it `text`, `sentence` or `sentence1`, in any case.")
]
PairColumnOption = Annotated[
    str | None, typer.Option(help="Of pairs the column of the second text; without it `text_pair` or `sentence2`.")
]
LabelColumnOption = Annotated[
    str | None, typer.Option(help="The column of the label; without it `label`, `score` or `labels`, in any case.")
]
EpochsOption = Annotated[int | None, typer.Option(help="At most.")]
RatesOption = Annotated[list[float] | None, typer.Option("--learning-rate", help="Repeat for a search.")]
PatienceOption = Annotated[
    int | None, typer.Option(help="End so many epochs after the one that is kept by its dev score.")
]


@app.command()
@job_command
def create(
    way: Way,
    name: NameArgument,
    train: TrainOption,
    dev: DevOption = None,
    test: TestOption = None,
    unlabelled: UnlabelledOption = None,
    domain: Annotated[str | None, typer.Option(help="To stand on; without it the root of the base.")] = None,
    task: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(task_names())}, or another of the server's. Default: what the data look like."),
    ] = None,
    epochs: EpochsOption = None,
    learning_rates: RatesOption = None,
    patience: PatienceOption = None,
    text_column: TextColumnOption = None,
    pair_column: PairColumnOption = None,
    label_column: LabelColumnOption = None,
    pooling: Annotated[str | None, typer.Option(help="What a classification's head reads: mean or cls.")] = None,
    base: Annotated[
        str | None,
        typer.Option(help="The base that the server must serve; a tenant of another base is made by its server."),
    ] = None,
) -> None:
    """Fine-tune a new tenant and serve it, while the server runs. It answers by the end of the job, or within a second of it.

    Examples:

      hplm tenant create acme --train train.csv --dev dev.csv --test test.csv

      hplm tenant create notes --train notes.conll --domain medical --epochs 20 --learning-rate 1e-3 --learning-rate 3e-3

      hplm tenant create desk --train tickets.csv --text-column Body --label-column Category

      hplm tenant create acme --train train.jsonl --unlabelled more.jsonl --dry-run

      hplm tenant create acme --train acme/train.csv --path-on-server --detach
    """
    settings = {"epochs": epochs, "learning_rates": learning_rates, "patience": patience, "pooling": pooling}
    request = {"tenant": name, "domain": domain, "task": task, "base": base}
    files = {"train": train, "dev": dev, "test": test, "unlabelled": unlabelled}
    columns = {"text": text_column, "pair": pair_column, "label": label_column}
    _make("tenant.create", request, files, columns, settings, way)


@app.command()
@job_command
def update(
    way: Way,
    name: NameArgument,
    train: TrainOption,
    dev: DevOption = None,
    test: TestOption = None,
    unlabelled: UnlabelledOption = None,
    domain: Annotated[
        str | None, typer.Option(help="To stand on; without it the one it stands on, as it is now.")
    ] = None,
    epochs: EpochsOption = None,
    learning_rates: RatesOption = None,
    patience: PatienceOption = None,
    text_column: TextColumnOption = None,
    pair_column: PairColumnOption = None,
    label_column: LabelColumnOption = None,
) -> None:
    """Fine-tune a tenant's next version on the same labels; the one before is served until it is there.

    Where none is better on dev, the one before stays, and there is no next version.

    Examples:

      hplm tenant update acme --train more.csv

      hplm tenant update acme --train more.csv --epochs 5 --json
    """
    settings = {"epochs": epochs, "learning_rates": learning_rates, "patience": patience}
    files = {"train": train, "dev": dev, "test": test, "unlabelled": unlabelled}
    request = {"tenant": name, "domain": domain}
    columns = {"text": text_column, "pair": pair_column, "label": label_column}
    _make("tenant.update", request, files, columns, settings, way)


@app.command(name="show")
def show_one(name: NameArgument, as_json: JsonOption = False, url: UrlOption = DEFAULT_URL) -> None:
    """A tenant's version, domain, scores, and the versions to go back to.

    Examples:

      hplm tenant show acme

      hplm tenant show acme --json | jq .about.curve
    """
    with opened(url) as client:
        tenant = client.show_tenant(name)
    if as_json:
        show(tenant)
        return
    _show_current(tenant)
    show_all(tenant.versions, ("version", "created_s", "scores"), as_json=False)


@app.command(name="list")
def list_all(
    prefix: Annotated[str, typer.Option(help="Only names that start so.")] = "",
    after: Annotated[str, typer.Option(help="Only names after this one, to go on where a list ended.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 100,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Tenants by name.

    Examples:

      hplm tenant list

      hplm tenant list --prefix acme- --json
    """
    with opened(url) as client:
        found = client.list_tenants(prefix, after=after, limit=limit)
    show_all(found, ("name", "version", "domain", "domain_version", "base", "created_s"), as_json)
    if len(found) == limit and not as_json:
        typer.echo(visible(f"There may be more: --after {found[-1].name}"), err=True)


@app.command()
def delete(
    name: NameArgument, yes: YesOption = False, as_json: JsonOption = False, url: UrlOption = DEFAULT_URL
) -> None:
    """Serve a tenant no more, within a second, and remove all its versions.

    Example: hplm tenant delete acme --yes
    """
    with opened(url) as client:
        if not yes:
            # Whoever mistook the name is told so, not asked.
            client.show_tenant(name)
        sure(f"Delete tenant {name} with all its versions?", yes)
        client.delete_tenant(name)
    if as_json:
        show({"tenant": name})
    else:
        say(f"tenant {name} is deleted")


@app.command()
def rollback(
    name: NameArgument,
    version: Annotated[
        int | None, typer.Option(min=1, help="Without it, of the lower ones that which was served last.")
    ] = None,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Serve another kept version again, within a second. Refused while an update runs: `hplm job cancel` ends that.

    Examples:

      hplm tenant rollback acme

      hplm tenant rollback acme --version 3
    """
    with opened(url) as client:
        number = client.rollback_tenant(name, version)
    if as_json:
        show({"tenant": name, "version": number})
    else:
        say(f"tenant {name} is at version {number}")


def _make(
    action: str,
    request: dict[str, Any],
    files: dict[str, Path | None],
    columns: dict[str, str | None],
    settings: dict[str, Any],
    way: Way,
) -> None:
    given = {key: value for key, value in {**settings, "seed": way.seed}.items() if value not in (None, [])}
    with opened(way.url, as_json=way.as_json) as client:
        with errors_shown(way.as_json):
            named = Columns(**columns)
        data = send(client, files, way, named)
        asked = {**request, "data": data, "columns": named.named, "settings": given}
        event = submit(client, action, asked, way)
        if event is not None and not way.as_json:
            result = event.result or {}
            warn(result)
            if why := result.get("why"):
                say(why)
            _show_current(client.show_tenant(request["tenant"]))


def _show_current(tenant: TenantDetails) -> None:
    scores = cell("scores", tenant.about.get("scores", {}))
    words = ", ".join(filter(None, (_kind(tenant.about), scores)))
    say(f"tenant {tenant.name} is at version {tenant.version} over {tenant.domain} {tenant.domain_version}: {words}")


def _kind(about: dict[str, Any]) -> str:
    """What it learned: labels that were taken for something else are found out here. Empty where it is not told."""
    task, labels = about.get("task", ""), about.get("labels", ())
    # A server may have tasks of third parties that are not installed here.
    return task_named(task).describe(labels) if task in task_names() else task
