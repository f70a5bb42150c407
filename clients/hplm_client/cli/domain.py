"""`hplm domain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hplm.reporting.terminal_text import say
from hplm_client.cli.manage_commands import (
    DEFAULT_URL,
    BaseOption,
    JsonOption,
    UrlOption,
    Way,
    YesOption,
    job_command,
    opened,
    send,
    show,
    show_all,
    submit,
    sure,
)

app = typer.Typer(
    no_args_is_help=True,
    help="Create, update and delete domains of a running server.\n\n"
    "Example: hplm domain create medical --corpus notes.txt",
)
NameArgument = Annotated[str, typer.Argument(help="Name of the domain.")]
CorpusOption = Annotated[Path, typer.Option(help="Text: .txt, or .jsonl with `text`; .gz of both too.")]
TokensOption = Annotated[int | None, typer.Option(help="How many to train on; without it 2,000,000.")]
WarmUpOption = Annotated[
    int | None,
    typer.Option(
        "--warmup-tokens", help="Before them, for the head that names masked words alone; without it 400,000."
    ),
]
RateOption = Annotated[float | None, typer.Option(help="Of the lower layers at its highest; without it 5e-5.")]
TopOption = Annotated[float | None, typer.Option("--top", help="Percent of the corpus's n-grams that the table holds.")]


@app.command()
@job_command
def create(
    way: Way,
    name: NameArgument,
    corpus: CorpusOption,
    parent: Annotated[str | None, typer.Option(help="To branch from; without it the root of the base.")] = None,
    tokens: TokensOption = None,
    warmup_tokens: WarmUpOption = None,
    learning_rate: RateOption = None,
    top_percent: TopOption = None,
    base: BaseOption = None,
) -> None:
    """Pretrain the lower layers further on a corpus, kept as a table over the parent's.

    Examples:

      hplm domain create medical --corpus notes.txt

      hplm domain create cardiology --parent medical --corpus cardiology.txt --top 20 --detach

      hplm domain create medical --corpus notes.txt --dry-run
    """
    request = {"domain": name, "parent": parent, "base": base}
    steps = {"tokens": tokens, "warmup_tokens": warmup_tokens}
    settings = {**steps, "learning_rate": learning_rate, "top_percent": top_percent}
    _make("domain.create", request, corpus, settings, way)


@app.command()
@job_command
def update(
    way: Way,
    name: NameArgument,
    corpus: CorpusOption,
    tokens: TokensOption = None,
    warmup_tokens: WarmUpOption = None,
    learning_rate: RateOption = None,
    top_percent: TopOption = None,
    base: BaseOption = None,
) -> None:
    """Pretrain a domain's next version; tenants stay on the version they stand on until they are updated.

    Example: hplm domain update medical --corpus more-notes.txt
    """
    request = {"domain": name, "base": base}
    steps = {"tokens": tokens, "warmup_tokens": warmup_tokens}
    settings = {**steps, "learning_rate": learning_rate, "top_percent": top_percent}
    _make("domain.update", request, corpus, settings, way)


@app.command(name="show")
def show_one(
    name: NameArgument, base: BaseOption = None, as_json: JsonOption = False, url: UrlOption = DEFAULT_URL
) -> None:
    """A domain's parent and versions.

    Example: hplm domain show medical --json
    """
    with opened(url) as client:
        domain = client.show_domain(name, base=base)
    if as_json:
        show(domain)
        return
    place = f"below {domain.parent}" if domain.parent else "the root"
    say(f"domain {domain.name} of base {domain.base} is at version {domain.version}, {place}")
    show_all(domain.versions, ("version", "created_s"), as_json=False)


@app.command(name="list")
def list_all(
    base: Annotated[str | None, typer.Option(help="Only domains of this base; without it of all.")] = None,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Domains of all bases, or of one.

    Example: hplm domain list
    """
    with opened(url) as client:
        show_all(client.list_domains(base), ("name", "parent", "version", "base"), as_json)


@app.command()
def delete(
    name: NameArgument,
    base: BaseOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Delete a domain that nothing stands on; else it says which tenants, domains and jobs are in the way.

    Example: hplm domain delete medical --yes
    """
    with opened(url) as client:
        if not yes:
            # Whoever mistook the name is told so, not asked.
            client.show_domain(name, base=base)
        sure(f"Delete domain {name} with all its versions?", yes)
        client.delete_domain(name, base=base)
    if as_json:
        show({"domain": name})
    else:
        say(f"domain {name} is deleted")


def _make(action: str, request: dict[str, Any], corpus: Path, settings: dict[str, Any], way: Way) -> None:
    given = {key: value for key, value in {**settings, "seed": way.seed}.items() if value is not None}
    with opened(way.url, as_json=way.as_json) as client:
        sources = send(client, {"corpus": corpus}, way)
        if (event := submit(client, action, {**request, **sources, "settings": given}, way)) and not way.as_json:
            say(f"domain {request['domain']} is at version {(event.result or {}).get('version')}")
