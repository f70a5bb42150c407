"""The commands `hplm domain`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hplm.reporting.command_options import CommandGroup
from hplm.reporting.terminal_text import say
from hplm_client.cli.deletion import YesOption, delete_confirmed
from hplm_client.cli.display import print_json, print_records, warning_lines
from hplm_client.cli.options import DEFAULT_URL, BaseOption, JobOptions, JsonOption, SeedOption, UrlOption, open_client
from hplm_client.cli.submit_job import submit_job, upload_files

app = CommandGroup(
    no_args_is_help=True,
    help="Create, update and delete domains of a running server.\n\n"
    "Example: hplm domain create medical --corpus notes.txt",
)
NameArgument = Annotated[str, typer.Argument(help="Name of the domain.")]


@dataclasses.dataclass(frozen=True)
class PretrainingOptions:
    """The options of every command that trains a domain, in front of those of every job."""

    corpus: Annotated[Path, typer.Option(help="Text to train on: .txt, or .jsonl with `text`; also with .gz.")]
    tokens: Annotated[int | None, typer.Option(help="Tokens to train on. Default: 2,000,000.")] = None
    warmup_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens on which only the head that predicts masked words is trained, before the others. Default: 400,000."
        ),
    ] = None
    learning_rate: Annotated[
        float | None, typer.Option(help="Highest learning rate of the lower layers. Default: 5e-5.")
    ] = None
    top_percent: Annotated[
        float | None,
        typer.Option(
            "--top",
            help="Percent of the corpus's n-grams that the table holds. 0: no table, so the domain's own encoder computes "
            "every n-gram. Default: 10; an update of a domain without a table makes none.",
        ),
    ] = None
    dev: Annotated[
        list[Path] | None,
        typer.Option(
            help="Labelled examples of a tenant's kind, to measure whether the domain helps: .jsonl, .csv, .tsv or .conll. "
            "Repeat for several files."
        ),
    ] = None
    base: BaseOption = None
    seed: SeedOption = None


@app.command()
def create(
    training: PretrainingOptions,
    job: JobOptions,
    name: NameArgument,
    parent: Annotated[str | None, typer.Option(help="Domain to branch from. Default: the root of the base.")] = None,
) -> None:
    """Create a domain: train the lower layers further on a corpus, and say whether that helps.

    The result is a table over the parent's, or with --top 0 another encoder alone.

    Examples:

      hplm domain create medical --corpus notes.txt --dev clinic.csv

      hplm domain create medical --corpus notes.txt --top 0

      hplm domain create cardiology --parent medical --corpus cardiology.txt --top 20 --detach

      hplm domain create medical --corpus notes.txt --dry-run
    """
    _submit("domain.create", {"domain": name, "parent": parent}, training, job)


@app.command()
def update(training: PretrainingOptions, job: JobOptions, name: NameArgument) -> None:
    """Train a domain's next version. Tenants keep the domain version that they use until you update them.

    Example: hplm domain update medical --corpus more-notes.txt
    """
    _submit("domain.update", {"domain": name}, training, job)


@app.command(name="show")
def show_domain(
    name: NameArgument, base: BaseOption = None, as_json: JsonOption = False, url: UrlOption = DEFAULT_URL
) -> None:
    """Show a domain's parent and versions, and whether its current version helps.

    Example: hplm domain show medical --json
    """
    with open_client(url) as client:
        domain = client.show_domain(name, base=base)
    if as_json:
        print_json(domain)
        return
    place = f"below {domain.parent}" if domain.parent else "the root"
    say(f"domain {domain.name} of base {domain.base} is at version {domain.version}, {place}")
    _print_verdict(domain.about.get("benefit", {}))
    for line in warning_lines(domain.about):
        say(line)
    print_records(domain.versions, ("version", "created_s"), as_json=False)


@app.command(name="list")
def list_domains(
    base: Annotated[str | None, typer.Option(help="List only domains of this base. Default: of all bases.")] = None,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """List the domains of one base, or of all bases.

    Example: hplm domain list
    """
    with open_client(url) as client:
        print_records(client.list_domains(base), ("name", "parent", "version", "base"), as_json)


@app.command()
def delete(
    name: NameArgument,
    base: BaseOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Delete a domain with all its versions. Refused, with their names, if tenants, domains or jobs use the domain.

    Example: hplm domain delete medical --yes
    """
    delete_confirmed("domain", name, url, yes=yes, as_json=as_json, base=base)


def _submit(action: str, request: dict[str, Any], training: PretrainingOptions, job: JobOptions) -> None:
    names = ("tokens", "warmup_tokens", "learning_rate", "top_percent", "seed")
    settings = {name: getattr(training, name) for name in names}
    numbered = {f"dev{number}": path for number, path in enumerate(training.dev or ())}
    with open_client(job.url, as_json=job.as_json) as client:
        sources = upload_files(client, {"corpus": training.corpus, **numbered}, job)
        files = {"corpus": sources["corpus"], "dev": [sources[key] for key in numbered]}
        request = {**request, "base": training.base, **files, "settings": settings}
        if (result := submit_job(client, action, request, job)) is not None:
            say(f"domain {request['domain']} is at version {result.get('version')}")
            _print_verdict(result)
            for line in warning_lines(result):
                say(line)


def _print_verdict(benefit: Mapping[str, Any]) -> None:
    """Print whether a domain helps and what to do. Nothing was measured for a version of an older server."""
    if "why" in benefit:
        say(benefit["why"])
        say(benefit["advice"])
