"""The commands `hplm tenant`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hplm.core.columns import Columns
from hplm.errors import BadInputError
from hplm.reporting.command_options import CommandGroup
from hplm.reporting.student_lines import student_lines
from hplm.reporting.tenant_lines import width_and_baselines
from hplm.reporting.terminal_text import say, visible
from hplm.tasks.task_loader import task_named, task_names
from hplm_client.cli.cascade import candidate_lines, cascade_lines
from hplm_client.cli.deletion import YesOption, delete_confirmed
from hplm_client.cli.display import (
    format_value,
    print_json,
    print_outcome,
    print_records,
    printing_errors,
    warning_lines,
)
from hplm_client.cli.options import DEFAULT_URL, JobOptions, JsonOption, SeedOption, UrlOption, open_client
from hplm_client.cli.students import StudentOptions
from hplm_client.cli.submit_job import end_unpublished, submit_job, upload_files
from hplm_client.manage.answers import TenantDetails

# A request of 64 texts of 256 tokens each minute, which is the longest debt of `hplm.quotas.token_bucket`.
BOUNDING_TOKENS_PER_S = 273.0
app = CommandGroup(
    no_args_is_help=True,
    help="Create, update and delete tenants of a running server.\n\n"
    "Example: hplm tenant create acme --train train.csv --test test.csv",
)
NameArgument = Annotated[str, typer.Argument(help="Name of the tenant.")]


TRAIN_HELP = "Labelled examples to train on: .jsonl, .csv, .tsv or .conll."


@dataclasses.dataclass(frozen=True, kw_only=True)
class FurtherTrainingOptions:
    """The options of every command that trains a tenant, without the examples to train on."""

    dev: Annotated[
        Path | None, typer.Option(help="Labelled examples that decide when to stop. Default: a part of --train.")
    ] = None
    test: Annotated[Path | None, typer.Option(help="Labelled examples for the scores reported at the end.")] = None
    unlabelled: Annotated[
        Path | None,
        typer.Option(
            help="More texts of the same kind, without labels. A model that trains all upper layers labels them first."
        ),
    ] = None
    epochs: Annotated[int | None, typer.Option(help="Most epochs to train.")] = None
    learning_rates: Annotated[
        list[float] | None, typer.Option("--learning-rate", help="Learning rate. Repeat to try several.")
    ] = None
    adapter_width: Annotated[
        str | None,
        typer.Option(
            help="narrow, wide, or auto, which trains both and takes twice as long: --dev decides. Default: auto; an "
            "update keeps the width."
        ),
    ] = None
    patience: Annotated[
        int | None, typer.Option(help="Stop this many epochs after the epoch with the best score on --dev.")
    ] = None
    text_column: Annotated[
        str | None,
        typer.Option(help="Column of the text. Default: `text`, `sentence` or `sentence1`, in any case."),
    ] = None
    pair_column: Annotated[
        str | None, typer.Option(help="Column of the second text of pairs. Default: `text_pair` or `sentence2`.")
    ] = None
    label_column: Annotated[
        str | None, typer.Option(help="Column of the label. Default: `label`, `score` or `labels`, in any case.")
    ] = None
    seed: SeedOption = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions(FurtherTrainingOptions):
    """The options of every command that trains a tenant, in front of those of every job."""

    train: Annotated[Path, typer.Option(help=TRAIN_HELP)]


@dataclasses.dataclass(frozen=True)
class TargetOptions:
    """The options for what a tenant with several levels is promised."""

    accuracy: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=0.9999,
            help="Share of right answers to promise. Default: the fastest within 1 point of the best.",
        ),
    ] = None
    latency_ms: Annotated[
        float | None, typer.Option(min=0.01, help="Most mean milliseconds of a request, one request at a time.")
    ] = None
    deterministic: Annotated[
        bool | None,
        typer.Option(
            "--deterministic/--not-deterministic", help="Re-route only texts whose confidence is below the cut-off."
        ),
    ] = None
    on_late: Annotated[
        Literal["answer", "refuse"] | None,
        typer.Option(
            help="A text that cannot be re-routed in time: answer it with the small level (default), or refuse it."
        ),
    ] = None

    @property
    def named(self) -> dict[str, Any]:
        """The targets that were given."""
        return {key: value for key, value in vars(self).items() if value is not None}


ProofOption = Annotated[
    Path | None,
    typer.Option(help="Labelled examples that only prove the accuracy of a cascade. Default: 40 % of --dev."),
]


@app.command()
def create(
    training: TrainingOptions,
    target: TargetOptions,
    student_options: StudentOptions,
    job: JobOptions,
    name: NameArgument,
    domain: Annotated[
        str | None, typer.Option(help="Domain of the tenant's texts. Default: the root of the base.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(task_names())}, or another of the server's. Default: what the data look like."),
    ] = None,
    pooling: Annotated[str | None, typer.Option(help="Input of a classification's head: mean or cls.")] = None,
    base: Annotated[
        str | None,
        typer.Option(help="Base of the tenant: `hplm base list` names them. Default: the server's first base."),
    ] = None,
    levels: Annotated[
        str | None,
        typer.Option(
            help="Bases of a cascade, small to large, with commas between: a small level answers what it is sure of."
        ),
    ] = None,
    students: Annotated[
        bool,
        typer.Option(
            "--students", help="Make shallow students over a trunk (--base), which answer together: the lowest latency."
        ),
    ] = False,
    proof: ProofOption = None,
) -> None:
    """Create a tenant on a running server: fine-tune it and serve it. It answers within a second after the job's end.

    Examples:

      hplm tenant create acme --train train.csv --dev dev.csv --test test.csv

      hplm tenant create notes --train notes.conll --domain medical --epochs 20 --learning-rate 1e-3 --learning-rate 3e-3

      hplm tenant create acme --train train.csv --base mpnet

      hplm tenant create desk --train tickets.csv --text-column Body --label-column Category

      hplm tenant create acme --train train.jsonl --unlabelled more.jsonl --dry-run

      hplm tenant create acme --train acme/train.csv --adapter-width narrow

      hplm tenant create acme --train acme/train.csv --path-on-server --detach

      hplm tenant create acme --train train.csv --levels minilm-whole,mpnet-whole --accuracy 0.88 --proof p.csv

      hplm tenant create acme --train train.csv --unlabelled more.csv --base trunk-2 --students
    """
    with printing_errors(job.as_json):
        options = student_options.of_new_tenant(has_students=students, has_levels=levels is not None)
    request = {
        "tenant": name,
        "domain": domain,
        "task": task,
        "base": base,
        "levels": None if levels is None else levels.split(","),
        "target": target.named or None,
        "students": options,
    }
    _submit("tenant.create", request, training, job, pooling=pooling, proof=proof)


@app.command()
def update(
    training: TrainingOptions,
    target: TargetOptions,
    job: JobOptions,
    name: NameArgument,
    domain: Annotated[
        str | None,
        typer.Option(help="Domain of the tenant's texts. Default: its present domain, in its newest version."),
    ] = None,
    proof: ProofOption = None,
    publish: Annotated[
        Literal["better", "anyway"],
        typer.Option(help="better: publish only a version that is better on --dev; anyway: also one that is not."),
    ] = "better",
) -> None:
    """Fine-tune a tenant's next version on the same labels. The server serves the present version until then.

    A version that is no better on dev is not published: the present version stays, and the exit status is 3. The levels of a
    cascade are updated as one, and their target is proved again; without proof the present versions stay.

    Examples:

      hplm tenant update acme --train more.csv

      hplm tenant update acme --train more.csv --epochs 5 --json

      hplm tenant update acme --train newer.csv --publish anyway
    """
    request = {"tenant": name, "domain": domain, "target": target.named or None, "publish": publish}
    _submit("tenant.update", request, training, job, proof=proof)


@app.command(name="students")
def make_students(
    further: FurtherTrainingOptions,
    student_options: StudentOptions,
    job: JobOptions,
    name: NameArgument,
    train: Annotated[Path | None, typer.Option(help=TRAIN_HELP)] = None,
    base: Annotated[
        str | None,
        typer.Option(help="Trunk of the students: `hplm base list` names it. Default: the server's only trunk."),
    ] = None,
    pooling: Annotated[str | None, typer.Option(help="Input of the head: mean or cls.")] = None,
    least: Annotated[
        int | None,
        typer.Option(min=1, help="Answer each text by at least so many students, without training. Default: 1."),
    ] = None,
) -> None:
    """Make shallow students of a tenant over a trunk, which answer together. The tenant's other versions stay.

    The tenant's best model on --dev teaches the students, on all texts of --train and --unlabelled. With --least and without
    --train nothing is trained: the server drops no more students of the tenant than that, however much work waits.

    Examples:

      hplm tenant students acme --train train.csv --unlabelled more.csv

      hplm tenant students acme --train train.csv --base trunk-2 --form own --most-students 4

      hplm tenant students acme --least 2
    """
    with printing_errors(job.as_json):
        if (train is None) == (least is None):
            raise BadInputError("give --train to make students, or --least to say how many students answer at least")
    if train is None:
        assert least is not None
        with open_client(job.url, as_json=job.as_json) as client, printing_errors(job.as_json):
            client.set_least_students(name, least)
        number = "1 student answers" if least == 1 else f"{least} students answer"
        outcome = {"tenant": name, "least_students": least}
        print_outcome(outcome, f"at least {number} each text of tenant {name}", job.as_json)
        return
    training = TrainingOptions(train=train, **vars(further))
    request = {"tenant": name, "base": base, "students": student_options.named}
    _submit("tenant.students", request, training, job, proof=None, pooling=pooling)


@app.command(name="target")
def target_tenant(
    target: TargetOptions,
    name: NameArgument,
    detach: Annotated[bool, typer.Option("--detach", help="Print the job's id and do not wait for the job.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Select a tenant's cascade again for another accuracy or latency, without training.

    What is not named stays as it is. The tenant gets a new version, which can be rolled back.

    Examples:

      hplm tenant target acme --accuracy 0.9

      hplm tenant target acme --latency-ms 25 --on-late refuse
    """
    with open_client(url, as_json=as_json) as client:
        job = JobOptions(detach=detach, as_json=as_json, url=url)
        result = submit_job(client, "tenant.target", {"tenant": name, "target": target.named}, job, has_files=False)
        if result is not None:
            _print_summary(client.show_tenant(name))


@app.command(name="show")
def show_tenant(
    name: NameArgument,
    base: Annotated[str | None, typer.Option(help="Base of the version to show. Default: the default base.")] = None,
    candidates: Annotated[
        bool,
        typer.Option("--candidates", help="Print what a cascade was selected from, as a table and as a drawing."),
    ] = False,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Show a tenant's bases, a version's domain and scores, and all kept versions: which are current, which it can go back to.

    Also the tenant's texts of the last hour and day by outcome, as counted on the server's machine.

    Examples:

      hplm tenant show acme

      hplm tenant show acme --base mpnet

      hplm tenant show acme --candidates

      hplm tenant show acme --json | jq .about.curve
    """
    with open_client(url) as client:
        tenant = client.show_tenant(name, base=base)
    if as_json and not candidates:
        print_json(tenant)
        return
    if candidates:
        found = () if tenant.cascade is None else tenant.cascade.candidates
        if not found:
            raise BadInputError(f"tenant {name!r} has no cascade in force, so there are no candidates to show")
        for line in map(json.dumps, found) if as_json else candidate_lines(found):
            say(line)
        return
    _print_summary(tenant)
    for period, counts in tenant.recent.items():
        say(f"last {period}: {', '.join(f'{count:,} {outcome}' for outcome, count in counts.items())}")
    for line in (*width_and_baselines(tenant.about), *student_lines(tenant.about), *warning_lines(tenant.about)):
        say(line)
    print_records(tenant.versions, ("version", "current", "base", "created_s", "scores"), as_json=False)


@app.command(name="list")
def list_tenants(
    prefix: Annotated[str, typer.Option(help="List only names that start with this.")] = "",
    after: Annotated[str, typer.Option(help="List only names after this one, to continue a list.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most tenants to list.")] = 100,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """List tenants by name, each as its default base serves it.

    Examples:

      hplm tenant list

      hplm tenant list --prefix acme- --json
    """
    with open_client(url) as client:
        tenants = client.list_tenants(prefix, after=after, limit=limit)
    print_records(tenants, ("name", "version", "domain", "domain_version", "base", "created_s"), as_json)
    if len(tenants) == limit and not as_json:
        typer.echo(visible(f"There may be more: --after {tenants[-1].name}"), err=True)


@app.command()
def delete(
    name: NameArgument,
    base: Annotated[
        str | None, typer.Option(help="Delete only the versions over this base. Default: all bases.")
    ] = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Delete a tenant with all its versions, or only those over one base. The server stops serving it within a second.

    Examples:

      hplm tenant delete acme --yes

      hplm tenant delete acme --base mpnet
    """
    delete_confirmed("tenant", name, url, yes=yes, as_json=as_json, base=base)


@app.command()
def rollback(
    name: NameArgument,
    version: Annotated[
        int | None,
        typer.Option(min=1, help="Highest version to serve. Default: undo the last publication."),
    ] = None,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Serve an older kept version again, within a second. Refused while an update runs; `hplm job cancel` ends the update.

    All bases of a tenant go back as one: each serves its newest kept version up to --version.

    Examples:

      hplm tenant rollback acme

      hplm tenant rollback acme --version 3
    """
    with open_client(url) as client:
        answer = client.ask("tenant.rollback", tenant=name, version=version)
    served = {key: answer[key] for key in ("tenant", "version", "bases")}
    over = f" ({format_value('bases', answer['bases'])})" if len(answer["bases"]) > 1 else ""
    print_outcome(served, f"tenant {name} is at version {answer['version']}{over}", as_json)


@app.command()
def limit(
    name: Annotated[str | None, typer.Argument(help="Name of the tenant.")] = None,
    default: Annotated[
        bool, typer.Option("--default", help="The limits of all tenants that have none of their own.")
    ] = False,
    requests_per_second: Annotated[float | None, typer.Option(help="Most requests a second.")] = None,
    tokens_per_second: Annotated[float | None, typer.Option(help="Most tokens a second.")] = None,
    concurrent: Annotated[int | None, typer.Option(help="Most requests at the same time.")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all limits.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Set all limits of a tenant within a second; limits that are not given are removed. Without options show the limits.

    A request over a limit gets the error QUOTA, which says after how many seconds to try again.

    Examples:

      hplm tenant limit acme --requests-per-second 50 --tokens-per-second 5000

      hplm tenant limit --default --concurrent 16
    """
    with printing_errors(as_json):
        if (name is None) != default:
            raise BadInputError("give the name of a tenant, or --default")
    with open_client(url, as_json=as_json) as client:
        limits = client.limit_tenant(
            name,
            requests_per_s=requests_per_second,
            tokens_per_s=tokens_per_second,
            concurrent=concurrent,
            clear=clear,
        )
    own = ", ".join(f"{key} {value:,g}" for key, value in limits["in_force"].items() if value is not None)
    print_outcome(limits, f"{'the default of tenants' if default else f'tenant {name}'}: {own or 'no limits'}", as_json)
    if not as_json and tokens_per_second is not None and tokens_per_second < BOUNDING_TOKENS_PER_S:
        say(
            "what a request costs beyond a minute of the limit is forgiven: to bound a tenant that sends the largest requests, "
            f"give {BOUNDING_TOKENS_PER_S:g} tokens/s or more"
        )


def _submit(
    action: str,
    request: dict[str, Any],
    training: TrainingOptions,
    job: JobOptions,
    *,
    proof: Path | None,
    pooling: str | None = None,
) -> None:
    files = {"train": training.train, "dev": training.dev, "test": training.test, "unlabelled": training.unlabelled}
    files["proof"] = proof
    settings = {name: getattr(training, name) for name in ("epochs", "patience", "adapter_width", "seed")}
    settings |= {"learning_rates": training.learning_rates or None, "pooling": pooling}
    with open_client(job.url, as_json=job.as_json) as client:
        with printing_errors(job.as_json):
            columns = Columns(training.text_column, training.pair_column, training.label_column)
        data = upload_files(client, files, job, columns)
        request = {**request, "data": data, "columns": columns.named, "settings": settings}
        if (result := submit_job(client, action, request, job)) is not None:
            for line in warning_lines(result):
                say(line)
            if result.get("published") is False:
                say(f"not published: {result['why']}")
            for line in (*width_and_baselines(result), *student_lines(result)):
                say(line)
            _print_summary(client.show_tenant(request["tenant"], base=request.get("base")))
            end_unpublished(result)


def _print_summary(tenant: TenantDetails) -> None:
    """Print the tenant's version, task, number of labels and scores. The number shows whether labels were misread."""
    task = tenant.about.get("task", "")
    # A server may have tasks of third parties that are not installed here.
    if task in task_names():
        task = task_named(task).describe(tenant.about.get("labels", ()))
    summary = ", ".join(filter(None, (task, format_value("scores", tenant.about.get("scores", {})))))
    say(f"tenant {tenant.name} is at version {tenant.version} over {tenant.domain} {tenant.domain_version}: {summary}")
    if tenant.least_students > 1:
        say(f"at least {tenant.least_students} students answer each text")
    if len(tenant.bases) > 1:
        numbers = (
            f"{base} {number}" + (" (default)" if base == tenant.default_base else "")
            for base, number in tenant.bases.items()
        )
        say(f"versions over its bases: {', '.join(numbers)}")
    if tenant.cascade is not None:
        for line in cascade_lines(tenant.cascade):
            say(line)
