"""`hplm build`: convert a base, write tables, train tenants, export model folders; demo and benchmark repositories."""

from __future__ import annotations

import json
import shlex
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hplm.adapters.tenant import Pooling, TenantCard
from hplm.core import roles
from hplm.core.columns import Columns
from hplm.core.settings import (
    REDUCTION_FACTOR,
    AdapterWidth,
    EncodeSettings,
    LookupSettings,
    ManagerSettings,
    Miss,
    parse_settings,
)
from hplm.engine.ngram_encoder.encoder import NgramEncoder
from hplm.errors import ConfigError, MissingArtifactError
from hplm.models import base as bases
from hplm.models.base_folder import KIND
from hplm.models.base_folder import read as read_folder
from hplm.reporting.progress import progress_bars
from hplm.reporting.tenant_lines import width_and_baselines
from hplm.reporting.terminal_text import say
from hplm.store.artifact import read as read_meta
from hplm.store.layout import Store
from hplm.tasks.task_loader import task_named, task_names
from hplm.triton.launcher.command_line import shell_command
from hplm.triton.launcher.install import find_triton
from hplm_builder.cli.options import DEFAULT_STORE, BaseOption, PlotOption, StoreOption
from hplm_builder.convert.base import (
    DEFAULT_BASE,
    check_model,
    convert_base,
    install_shipped,
    model_folder,
    origin_of,
    ship,
    shipped_bases,
)
from hplm_builder.convert.mixture import SHARES, read_to_count
from hplm_builder.convert.original import TITLES
from hplm_builder.convert.training import ConvertSettings
from hplm_builder.convert.trunk import MOST_LAYERS, TrunkSettings, distil_trunk
from hplm_builder.convert.whole import AdaptedLayers, make_whole_base
from hplm_builder.data.labelled_files import read_data
from hplm_builder.domains.domain_build import DomainSettings
from hplm_builder.export.model_folders import (
    KEEPABLE_SETTINGS,
    check_adapter_width,
    check_replaced,
    export,
    has_manager,
    write_backends,
)
from hplm_builder.export.register import published
from hplm_builder.export.stage_cut import choose_cut, parse_cut, parse_devices
from hplm_builder.fleet.benchmark_repository import Shape, make_benchmark_repository
from hplm_builder.fleet.demo import DEMO_FOLDER, PLOT, PLOT_SOURCES, TOP_PERCENT, build_demo, ship_demo
from hplm_builder.fleet.fine_tuned_fleet import FineTunedFleet
from hplm_builder.fleet.students_repository import make_students_repository
from hplm_builder.jobs.local_builds import build_domain, build_tenant
from hplm_builder.tables.plot_tables import build_plot
from hplm_builder.tenants.finetune import TrainSettings

app = typer.Typer(
    no_args_is_help=True,
    help="Build Triton model folders from a pretrained model, step by step. `demo` does all steps.",
    epilog="Example: hplm build base --shipped && hplm build plot && hplm build tenant mine --train t.jsonl --dev d.jsonl "
    "&& hplm build export",
)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Folder for `store/` and `models/`.")] = DEMO_FOLDER,
    ship_to: Annotated[
        Path | None,
        typer.Option(help="Train the tenants from their packages instead, and write what hplm ships to this folder."),
    ] = None,
) -> None:
    """Install the default base, its tables, four trained demo tenants and model folders. Finished parts are kept.

    Example: hplm build demo
    """
    with progress_bars() as progress:
        if ship_to is not None:
            return ship_demo(ship_to, progress)
        cards = build_demo(folder, progress)
    return show_scores(cards)


def is_given(context: typer.Context, option: str) -> bool:
    """Return whether an option was given on the command line or in the environment."""
    source = context.get_parameter_source(option)
    # Compared by name, because typer uses click's class or a copy of its own.
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


# The parameters of `base` that --trunk takes.
TRUNK_OPTIONS = (
    "trunk",
    "parent",
    "store",
    "name",
    "text",
    "tokens",
    "batch_tokens",
    "learning_rate",
    "seed",
    "device",
)


@app.command()
def base(
    context: typer.Context,
    model: Annotated[
        Path,
        typer.Option(
            help=f"`minilm`, `mpnet` (440 MB), or the folder of a {TITLES} in Hugging Face's layout (safetensors)."
        ),
    ] = Path("minilm"),
    store: StoreOption = DEFAULT_STORE,
    name: Annotated[
        str,
        typer.Option(
            help="Name of the base.",
            show_default=f"{DEFAULT_BASE}; with --whole MODEL-whole, with --trunk FROM-trunk-N",
        ),
    ] = DEFAULT_BASE,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole",
            help="Keep all layers and write no tables: the most accurate base, for text that does not repeat.",
        ),
    ] = False,
    adapters: Annotated[
        AdaptedLayers, typer.Option(help="With --whole: the layers that have adapters, the upper half or all.")
    ] = "upper",
    shipped: Annotated[
        bool, typer.Option(help="Take a shipped conversion of MiniLM, by --name; nothing is trained.")
    ] = False,
    trunk: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_LAYERS,
            help="Distil a trunk of this number of layers from --from: a base where the students of tenants start.",
        ),
    ] = None,
    parent: Annotated[
        str,
        typer.Option("--from", help="With --trunk: name of the base in the store that the trunk is distilled from."),
    ] = "",
    lower: Annotated[int, typer.Option(help="Layers that PLOT replaces.")] = 3,
    lower_form: Annotated[
        str,
        typer.Option(
            help="Form of the lower layers: `ngram-encoder`, or `windows` (exact tables of HMI, slow misses)."
        ),
    ] = NgramEncoder.form,
    window: Annotated[int, typer.Option(help="n of the n-grams.")] = 3,
    window_layers: Annotated[
        int, typer.Option(help="Blocks of the n-gram encoder, or layers of windows; 0: as many as --lower.")
    ] = 0,
    max_tokens: Annotated[
        int, typer.Option(min=0, help="Most tokens of a text, special tokens included; 0: all positions of the model.")
    ] = 256,
    text: Annotated[
        list[str] | None, typer.Option(help="Source, or .txt or .jsonl file (.gz too), to train on; repeat for more.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to train on.")] = ConvertSettings.total_tokens,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of one training step; give fewer if --tokens is small.")
    ] = ConvertSettings.batch_tokens,
    learning_rate: Annotated[
        float, typer.Option(help="Highest learning rate of the training.")
    ] = ConvertSettings.learning_rate,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    start: Annotated[
        str, typer.Option(help="Name of a base in the store with the same cut; training continues from it.")
    ] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    ship_to: Annotated[Path | None, typer.Option(help="Also write the weights as the repository ships them.")] = None,
) -> None:
    """Convert a pretrained model: an n-gram encoder replaces its lower layers, then it is trained to match the original.
    With --whole nothing is converted or trained, and the base is ready in seconds. With --trunk one or two layers are trained
    to match a base of the store.

    An interrupted training continues where it stopped. A base with domains is not replaced: give another --name. Examples:

      hplm build base --shipped

      hplm build base --whole --model mpnet && hplm build export --base mpnet-whole --name mpnet-whole

      hplm build base --model mpnet --name mpnet --lower 6

      hplm build base --model ./my-bert --name my-bert --lower 6 --text corpus.txt --tokens 20000000

      hplm build base --name minilm-longer --start minilm-l6 --learning-rate 5e-4 --seed 1

      hplm build base --trunk 2 --from minilm-whole --name trunk-2
    """
    target = Store.at(store)
    shares = dict.fromkeys(text, 1.0) if text else SHARES
    if trunk is not None:
        _refuse_others(context, "--trunk", TRUNK_OPTIONS, "takes its shape from the base of --from")
        if not parent:
            raise ConfigError(
                "--trunk needs --from: the name of the base in the store that the trunk is distilled from"
            )
        with progress_bars() as progress:
            made = distil_trunk(
                target,
                bases.load(target.base(parent)),
                name=name if is_given(context, "name") else f"{parent}-trunk-{trunk}",
                layers=trunk,
                shares=shares,
                settings=TrunkSettings(
                    total_tokens=tokens, batch_tokens=batch_tokens, learning_rate=learning_rate, seed=seed
                ),
                device=device,
                progress=progress,
            )
        _show_distances(
            read_meta(made.folder, KIND).meta["distillation"],
            "Distance to the base that the trunk was distilled from",
            {"relative_pooled": "relative, mean over a text"},
        )
        return
    if is_given(context, "parent"):
        raise ConfigError("--from is for --trunk: a conversion continues from a base with --start")
    head = None if shipped else check_model(model)
    if whole:
        _refuse_others(context, "--whole", ("whole", "model", "store", "name", "adapters", "max_tokens"))
        name = name if is_given(context, "name") else f"{model.name}-whole"
        _say_that_head_is_left_out(model, head)
        made = make_whole_base(
            target,
            model_folder(model),
            name=name,
            origin=origin_of(model),
            adapters=adapters,
            max_tokens=max_tokens or None,
        )
        shape = made.config
        say(
            f"base {name}: {shape.upper_layers} layers, the last {shape.adapted_layers} with adapters; serve it beside other "
            f"bases with {_export_command(store, name)}"
        )
        return
    if is_given(context, "adapters"):
        raise ConfigError("--adapters is for --whole: the adapters of a converted base are in all its upper layers")
    if name in shipped_bases() and origin_of(model) != origin_of(Path("minilm")):
        raise ConfigError(f"the name {name} is reserved for a shipped base of MiniLM: give another --name")
    if shipped:
        _refuse_others(context, "--shipped", ("shipped", "store", "name"))
        report = install_shipped(target, name)
    else:
        _say_that_head_is_left_out(model, head)
        with progress_bars() as progress:
            report = convert_base(
                target,
                model_folder(model),
                name=name,
                origin=origin_of(model),
                lower_layers=lower,
                lower_form=lower_form,
                window=window,
                window_layers=window_layers or lower,
                max_tokens=max_tokens or None,
                shares=shares,
                settings=ConvertSettings(
                    total_tokens=tokens, batch_tokens=batch_tokens, learning_rate=learning_rate, seed=seed
                ),
                device=device,
                progress=progress,
                start=bases.load(target.base(start)) if start else None,
            )
    if ship_to:
        ship(target, name, ship_to)
    _show_distances(report["conversion"], "Distance to the original", {"relative_cut": "relative at the cut"})


def _export_command(store: Path, base: str) -> str:
    """Return the command that serves a base under a model name of its own, so that no served base is replaced."""
    in_store = "" if store == DEFAULT_STORE else f" --store {shlex.quote(str(store))}"
    return f"`hplm build export --base {base} --name {base}{in_store} --models MODELS`"


def _show_distances(record: dict[str, Any], title: str, further: dict[str, str]) -> None:
    """Print the distances before and after a training. `further` are keys and titles of columns besides the usual two."""
    table = Table("held-out text", "mean squared error", "relative", *further.values(), title=title)
    for row in ("before", "after"):
        values = record[row]
        relative = [f"{values[key]:.3f}" for key in ("relative", *further)]
        table.add_row(row, f"{values['mse']:.4f}", *relative)
    Console().print(table)


def _refuse_others(
    context: typer.Context, option: str, taken: tuple[str, ...], because: str = "trains nothing"
) -> None:
    """Refuse options that `option` does not take. `taken` are the parameters that it takes. Raises ConfigError."""
    extra = sorted(
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in taken and is_given(context, str(parameter.name))
    )
    if extra:
        raise ConfigError(f"{option} {because}: leave out {option} or {extra[0]}")


def _say_that_head_is_left_out(model: Path, head: str | None) -> None:
    if head is not None:
        say(
            f"{model} is a {head}: its encoder is converted, its head is left out. A tenant gets its head from "
            "labelled data: `hplm build tenant`"
        )


@app.command()
def plot(
    store: StoreOption = DEFAULT_STORE,
    base: BaseOption = DEFAULT_BASE,
    plot: PlotOption = PLOT,
    text: Annotated[
        list[str] | None, typer.Option(help="Source, or .txt or .jsonl file (.gz too), to count; repeat for more.")
    ] = None,
    top: Annotated[
        float, typer.Option(help="Keep this percentage of the distinct n-grams, by frequency.")
    ] = TOP_PERCENT,
) -> None:
    """Count n-grams, compute the windows of the most frequent n-grams, write the tables.

    Example: hplm build plot --plot medical --text notes.txt --top 10
    """
    documents = [line for source in text or PLOT_SOURCES for line in read_to_count(source)]
    with progress_bars() as progress:
        report = build_plot(Store.at(store), base, plot, documents, top, progress)
    print(json.dumps(report, indent=2))


@app.command()
def domain(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the domain.")],
    corpus: Annotated[Path, typer.Option(help="Text in UTF-8 or .jsonl with a `text` each, or .gz of it.")],
    parent: Annotated[
        str | None,
        typer.Option(help="Domain to branch from.", show_default=f"the one that it stands on; of a new domain {PLOT}"),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    base: BaseOption = DEFAULT_BASE,
    tokens: Annotated[
        int, typer.Option(min=1, help="How many tokens to pretrain the lower layers on.")
    ] = DomainSettings.total_tokens,
    warmup_tokens: Annotated[
        int, typer.Option(min=1, help="How many before that for the head that names masked words.")
    ] = DomainSettings.warmup_tokens,
    learning_rate: Annotated[float, typer.Option()] = DomainSettings.learning_rate,
    top: Annotated[
        float,
        typer.Option(
            help="Keep this percentage of the corpus's distinct n-grams in a table, by frequency. 0: no table, so the domain's "
            "own encoder computes every n-gram; updates keep that.",
        ),
    ] = DomainSettings.top_percent,
    dev: Annotated[
        list[Path] | None,
        typer.Option(
            help="Labelled examples of a tenant's kind, to measure whether the domain helps; repeat for more."
        ),
    ] = None,
    least: Annotated[
        int, typer.Option(min=0, help="Refuse a corpus of fewer tokens.")
    ] = DomainSettings.min_corpus_tokens,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dry_run: Annotated[bool, typer.Option(help="Only say what it would cost.")] = False,
) -> None:
    """Pretrain the lower layers further on a domain's text, publish the domain's next version, and say whether it helps.

    This is a job that the command runs itself: `hplm job list` shows it, and no worker process takes it. An interrupted
    build continues where it was. Examples:

      hplm build domain medical --corpus notes.txt --dry-run

      hplm build domain medical --corpus notes.txt --top 0 --dev clinic.csv

      hplm build domain cardiology --parent medical --corpus letters.jsonl.gz --tokens 5000000
    """
    settings = DomainSettings(
        total_tokens=tokens,
        warmup_tokens=warmup_tokens,
        learning_rate=learning_rate,
        top_percent=top,
        min_corpus_tokens=least,
        seed=seed,
    )
    end_as_by_ctrl_c()
    with progress_bars() as progress:
        about = build_domain(
            Store.at(store),
            base,
            parent,
            name,
            corpus,
            settings,
            progress,
            device=device,
            dry_run=dry_run,
            dev=dev or (),
            keep_top=not is_given(context, "top"),
        )
    print(json.dumps(about, indent=2))
    if benefit := about.get("benefit"):
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            f"{benefit['why']} {benefit['advice']}", markup=False
        )


def end_as_by_ctrl_c() -> None:
    """Let SIGTERM end this command as Ctrl-C does, so that its job is cancelled at once."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _task(name: str) -> str:
    if name not in task_names():
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(task_names())}")
    return name


@app.command()
def tenant(
    name: Annotated[str, typer.Argument(help="Name of the tenant.")],
    train: Annotated[Path, typer.Option(help="Labelled data: .jsonl, .csv, .tsv or .conll.")],
    dev: Annotated[
        Path | None, typer.Option(help="To choose the best epoch and learning rate by; default: a tenth of --train.")
    ] = None,
    test: Annotated[Path | None, typer.Option(help="To report at the end.")] = None,
    unlabelled: Annotated[
        Path | None,
        typer.Option(
            help="More texts of the kind, without labels: a model that trains all upper layers labels them first."
        ),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    base: BaseOption = DEFAULT_BASE,
    plot: Annotated[
        str | None,
        typer.Option(
            help="Name of the PLOT, or of a domain below it.",
            show_default=f"the domain that the tenant stands on; of a new tenant {PLOT}",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="|".join(task_names()), parser=_task, help="Default: what the labels look like."),
    ] = None,
    text_column: Annotated[
        str | None,
        typer.Option(help="The column of the text; default: `text`, `sentence` or `sentence1`, in any case."),
    ] = None,
    pair_column: Annotated[
        str | None, typer.Option(help="Of pairs the column of the second text; default: `text_pair` or `sentence2`.")
    ] = None,
    label_column: Annotated[
        str | None, typer.Option(help="The column of the label; default: `label`, `score` or `labels`, in any case.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="At most; see --patience.")] = TrainSettings.epochs,
    patience: Annotated[
        int, typer.Option(help="End so many epochs after the one that is kept by its dev score.")
    ] = TrainSettings.patience,
    learning_rate: Annotated[
        list[float] | None, typer.Option(help="Repeat for a search; the best on dev stays.")
    ] = None,
    pooling: Annotated[
        str,
        typer.Option(
            help="What a classification's head reads: the mean of all tokens, or cls, for which the last layer computes less."
        ),
    ] = TrainSettings.pooling,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    miss: Annotated[
        Miss, typer.Option(help="What a window that no table has gets, as you will serve it: see `build export`.")
    ] = "compute",
    adapter_width: Annotated[
        AdapterWidth | None,
        typer.Option(
            help="auto trains a narrow and a wide adapter, which takes twice as long, and dev chooses.",
            show_default="as the current version; of a new tenant auto",
        ),
    ] = None,
    reduction_factor: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Instead of --adapter-width: the adapter's bottleneck is the hidden size over this; not below what "
            "`build export` is told.",
        ),
    ] = None,
) -> None:
    """Fine-tune adapters and a head on labelled data: columns text and label (a class or a number), of pairs also
    text_pair, or tokens and IOB tags. docs/data.md has all of it.

    This is a job that the command runs itself: `hplm job list` shows it, and no worker process takes it. Examples:

      hplm build tenant acme --train train.jsonl --dev dev.jsonl --test test.jsonl --epochs 15

      hplm build tenant alike --train pairs.tsv --task regression

      hplm build tenant desk --train tickets.csv --text-column Body --label-column Category

      hplm build tenant acme --train train.jsonl --unlabelled more.jsonl

      hplm build tenant acme --train train.jsonl --adapter-width narrow
    """
    if adapter_width is not None and reduction_factor is not None:
        raise typer.BadParameter("give --adapter-width or --reduction-factor, not both")
    settings = TrainSettings(
        epochs=epochs,
        learning_rates=tuple(learning_rate or TrainSettings.learning_rates),
        pooling=pooling,
        seed=seed,
        patience=patience,
        reduction_factor=reduction_factor or REDUCTION_FACTOR,
    )
    columns = Columns(text_column, pair_column, label_column)
    data = read_data(train, dev, test, unlabelled, task=task, seed=seed, columns=columns)
    is_given_width = adapter_width is not None or reduction_factor is not None
    is_new = published(Store.at(store), name, base) is None
    end_as_by_ctrl_c()
    with progress_bars() as progress:
        card = build_tenant(
            Store.at(store),
            base,
            plot,
            name,
            data,
            settings,
            progress,
            miss=miss,
            width=None if reduction_factor is not None else adapter_width or "auto",
            keep_width=not is_given_width,
        )
    for words in card.about.get("warnings", ()):
        print(f"warning: {words}")
    for words in width_and_baselines(card.about):
        print(words)
    if reduction_factor is None and card.about["adapter_width"] == "wide" and (is_new or adapter_width is not None):
        print(
            "its adapters are wide: models must be exported with "
            f"--reduction-factor {EncodeSettings.reduction_factor}, as by default, or lower"
        )
    show_scores([card])


KEPT = "with --keep-settings as the earlier models"
# Option of `export` -> the settings that it sets.
SETTINGS_OF_OPTION = {
    "base": {"base"},
    "plot": {"table", "domain"},
    "miss": {"miss"},
    "dtype": {"dtype"},
    "slots": {"num_slots"},
    "reduction_factor": {"reduction_factor"},
    "quantization": {"quantization"},
    # Kept cores would not fit another number of stages.
    "stages": {"stage_layers", "stage_cores"},
    "cut": {"stage_layers", "stage_cores"},
    "cores": {"stage_cores"},
}


@app.command(name="export")
def export_models(
    context: typer.Context,
    store: StoreOption = DEFAULT_STORE,
    models: Annotated[Path, typer.Option(help="Folder for the model folders.")] = DEMO_FOLDER / "models",
    base: BaseOption = DEFAULT_BASE,
    plot: PlotOption = PLOT,
    miss: Annotated[str, typer.Option(help="What a window in no table gets: compute or backoff.")] = "compute",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    slots: Annotated[
        int | None,
        typer.Option(
            help="Adapter slots of each width on the device, the identity included; default: 64, on a GPU a tenth of its "
            "memory."
        ),
    ] = EncodeSettings.num_slots,
    reduction_factor: Annotated[
        int,
        typer.Option(
            help="The widest adapters have a bottleneck of the hidden size over this; wide ones that the server trains have it."
        ),
    ] = EncodeSettings.reduction_factor,
    quantization: Annotated[
        str,
        typer.Option(help="none, or int8: products with the layers' matrices use 8-bit integers, on a CPU with VNNI."),
    ] = EncodeSettings.quantization,
    instances: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes of the upper stage, each with adapter slots of its own.",
            show_default=f"1; {KEPT}",
        ),
    ] = None,
    look_up_instances: Annotated[
        int | None, typer.Option(min=1, help="Processes of the look-up stage.", show_default=f"1; {KEPT}")
    ] = None,
    stages: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Encode stages, each of some of the layers, in processes of their own. The profile of the base decides on the "
            "layers, see `hplm profile`; without one the cut is even.",
            show_default=f"1; {KEPT}",
        ),
    ] = None,
    cut: Annotated[
        str | None, typer.Option(help="Layers of each encode stage, such as 3,3, in place of the profile's cut.")
    ] = None,
    cores: Annotated[
        str | None,
        typer.Option(
            help="Cores of each encode stage: commas within a stage, colons between stages, such as 0:1.",
            show_default=f"all; {KEPT}",
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            help="GPUs of each encode stage, written as --cores. A stage has --instances processes on each of them.",
            show_default=f"all; {KEPT}",
        ),
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            help="Model by which clients call the base. With another name the base is served beside those that are there."
        ),
    ] = roles.DEFAULT_NAME,
    manager: Annotated[
        bool | None,
        typer.Option(
            help="Also write the models that take manage requests.",
            show_default=f"with them; {KEPT}, and beside other bases as they have it",
        ),
    ] = None,
    route: Annotated[
        bool,
        typer.Option(
            "--route",
            help="Also write the model hplm, which answers the tenants of every base. It is written for two bases.",
        ),
    ] = False,
    keep_settings: Annotated[
        bool,
        typer.Option(
            "--keep-settings",
            help="Keep the settings and the store of the earlier models, except the options given here.",
        ),
    ] = False,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="Allow an export that takes service from tenants. Without it such an export fails."
        ),
    ] = False,
) -> None:
    """Write the Triton model folders hbert_plot, hbert_upper, hbert and manager over a store.
    With --stages, hbert_upper_1, hbert_upper_2 and so on take the
    place of hbert_upper.

    Earlier models of this name are replaced, with their settings unless --keep-settings is given. An export of another base
    under this name takes service from the tenants of the earlier base, so it needs --replace. With --name the models of a
    further base are written beside those of other bases, and a running `hplm serve` loads a new name. Examples:

      hplm build export --base mpnet --plot general-mpnet --name mpnet

      hplm build export --miss backoff --slots 256

      hplm build export --instances 2

      hplm build export --instances 4 --look-up-instances 4

      hplm build export --stages 2 --cores 0:1

      hplm build export --reduction-factor 16

      hplm build export --models /srv/hplm/models --store /srv/hplm/store --keep-settings
    """
    keep: frozenset[str] = frozenset()
    roles.check_model_name(name)
    there = {served.name for served in roles.served_bases(models)}
    others = there - {name}
    if manager is None:
        manager = has_manager(models) if keep_settings or others else True
    if keep_settings:
        keep = KEEPABLE_SETTINGS.difference(
            *(names for option, names in SETTINGS_OF_OPTION.items() if is_given(context, option))
        )
    of_base = roles.base_roles(name)
    kept = roles.served_base(models, name) if keep_settings and name in there else None
    opened = Store.at(kept.store_root if kept is not None and not is_given(context, "store") else store)
    layers: tuple[int, ...] = ()
    if stages is not None or cut is not None:
        # Else the cut may be kept.
        cut_base = kept.base if kept is not None and "base" in keep else base
        folder = read_folder(opened.base(cut_base), verify=False)
        layers, cut_by = choose_cut(opened, folder, stages, None if cut is None else parse_cut(cut))
        if layers:
            print(f"encode stages of {', '.join(map(str, layers))} layers, cut {cut_by}")
    common: dict[str, Any] = {"store": "", "base": base, "dtype": dtype, "quantization": quantization}
    plot_settings = parse_settings(LookupSettings, {**common, "table": plot, "miss": miss}, of_base.look_up.name)
    more_settings: dict[str, Any] = {
        "num_slots": slots,
        "reduction_factor": reduction_factor,
        "stage_layers": list(layers),
    }
    if cores is not None:
        more_settings["stage_cores"] = [list(stage) for stage in parse_devices("--cores", cores)]
    upper_settings = parse_settings(EncodeSettings, {**common, **more_settings}, of_base.encode.name)
    if not keep_settings and not is_given(context, "reduction_factor"):
        check_adapter_width(models, reduction_factor, name)
    if not replace:
        check_replaced(models, name, opened, kept.base if kept is not None and "base" in keep else base)
    export(
        opened,
        models,
        plot_settings,
        upper_settings,
        ManagerSettings(store="", base=base, domain=plot) if manager else None,
        name=name,
        keep=keep,
        instances=instances,
        look_up_instances=look_up_instances,
        route=route,
        gpus=None if gpus is None else parse_devices("--gpus", gpus),
    )
    print(f"wrote {models}; serve it with `hplm serve --models {models}`")
    if name in there:
        print(f"a running server keeps the models of {name} that it has loaded: start it again")
    elif others:
        # Not every server over this repository is an `hplm serve`.
        loaded = ", ".join(roles.names(roles.served_base(models, name).roles))
        print(
            f"a running `hplm serve` loads {name} within seconds; your own tritonserver must load {loaded}, in this order"
        )


@app.command()
def backends(
    out: Annotated[
        Path, typer.Option(help="Backend directory to write; an earlier one is replaced, other folders are refused.")
    ],
    models: Annotated[Path, typer.Option(help="Triton model repository to serve.")] = DEMO_FOLDER / "models",
) -> None:
    """Write a backend directory for your own tritonserver, and print the shell command that serves the models with it.

    `hplm serve` needs no such directory, and it does more: it starts the worker process, restarts stages that died, and
    answers pending requests before it stops. Append Triton's own options to the printed command. Examples:

      hplm build backends --out /srv/hplm/backends --models /srv/hplm/models

      hplm build backends --out backends > serve.sh && sh serve.sh
    """
    install = find_triton()
    if not roles.served_bases(models):
        raise MissingArtifactError(
            f"{models} has no models of a base: write them with `hplm build export --models {models}`"
        )
    write_backends(install, out)
    Console(stderr=True, soft_wrap=True).print(f"wrote {out}, for the Triton of {install.origin}", markup=False)
    print(shell_command(install, models, out, roles.models_of(models)))


@app.command()
def fleet(
    context: typer.Context,
    shape: Annotated[
        Shape, typer.Option(help="minilm: the shipped base; bert-base: a base of BERT-base's size with seeded weights.")
    ] = "minilm",
    tenants: Annotated[int, typer.Option(min=1, help="Number of tenants, all different.")] = 10_000,
    lower_form: Annotated[
        str, typer.Option(help="Form of the base's lower layers: see `build base`.")
    ] = NgramEncoder.form,
    whole: Annotated[
        bool, typer.Option("--whole", help="Over a whole base: all layers are computed, and there are no tables.")
    ] = False,
    top: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=100,
            help="The table holds this percentage of the demo's n-grams; 0: none. Default: the pool's n-grams.",
        ),
    ] = None,
    task: Annotated[
        list[Path] | None,
        typer.Option(help="Folder with train.*, dev.* and test.* of a task for fine-tuning tenants; repeat for more."),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=0, help="Most examples in the sample of a tenant of --task; 0: as many as the task has.")
    ] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of a tenant of --task.")] = TrainSettings.epochs,
    pooling: Annotated[
        Pooling,
        typer.Option(
            help="What heads read: the mean of all tokens, or the first token (cls), which needs less computation."
        ),
    ] = "mean",
    reduction_factor: Annotated[
        int, typer.Option(min=1, help="The bottleneck of all adapters, also of taggings, is the hidden size over this.")
    ] = TrainSettings.reduction_factor,
    students: Annotated[
        int,
        typer.Option(
            min=0,
            help="Tenants with 1 to this many students, beside the models that `hplm bench students` compares them with.",
        ),
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write; default: build/fleet-SHAPE-TENANTS, then -cls, -rFACTOR, -FORM, -topPERCENT, -whole."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Build a model repository for benchmarks: many tenants in one bank, and a pool of texts that the tables hold.

    Without --task the tenants are synthetic, with seeded random adapters: thousands of them take seconds. With --task they
    are fine-tuned as in the HMI paper: larger tasks have more tenants, and each tenant has its own bootstrap sample. That
    takes minutes for each tenant.

    Finished parts are kept, but after an interruption all tenants of --task are trained again. Examples:

      hplm build fleet --shape minilm --tenants 10000 --out build/fleet-minilm-10000

      hplm build fleet --shape bert-base --tenants 1000

      hplm build fleet --shape minilm --tenants 10000 --pooling cls

      hplm build fleet --shape minilm --tenants 1000 --reduction-factor 4

      hplm build fleet --shape bert-base --tenants 10000 --whole

      hplm build fleet --tenants 20 --task data/chemprot --task data/sci-cite --samples 1000 --epochs 3 --out build/fleet-tasks

      hplm build fleet --shape bert-base --tenants 600 --students 6 --out build/fleet-students

      hplm serve --models build/fleet-bert-base-1000/models
    """
    if students:
        _refuse_others(
            context, "--students", ("shape", "tenants", "students", "out", "seed"), "has tenants of its own kind"
        )
        with progress_bars() as progress:
            folder = out or Path(f"build/fleet-{shape}-{tenants}-students{students}")
            models = make_students_repository(folder, shape, tenants, students, seed, progress)
        print(f"wrote {models}; measure it with `hplm bench students --models {models}`")
        return
    width = "" if reduction_factor == TrainSettings.reduction_factor else f"-r{reduction_factor}"
    form = "" if lower_form == NgramEncoder.form else f"-{lower_form}"
    form += "" if top is None else f"-top{top:g}"
    if whole and form:
        raise ConfigError(
            "a whole base has no lower layers and no tables: leave out --whole, or --lower-form and --top"
        )
    form += "-whole" if whole else ""
    folder = out or Path(f"build/fleet-{shape}-{tenants}{'-cls' if pooling == 'cls' else ''}{width}{form}")
    settings = TrainSettings(epochs=epochs, seed=seed, pooling=pooling, reduction_factor=reduction_factor)
    tuned = FineTunedFleet.read(task, tenants, samples, settings) if task else None
    with progress_bars() as progress:
        models = make_benchmark_repository(
            folder, shape, lower_form, top, tenants, seed, progress, tuned, pooling, reduction_factor, whole
        )
    print(f"wrote {models}; serve it with `hplm serve --models {models}`")


def show_scores(cards: list[TenantCard]) -> None:
    """Print a table of the tenants' dev and test scores."""
    table = Table("tenant", "labels", "train", "dev", "test", title="Demo tenants" if len(cards) > 1 else None)
    for card in cards:
        scores, metric = card.about["scores"], task_named(card.task).metric
        kept = [
            f"{metric} {scores[f'{part}_{metric}']:.3f}" if f"{part}_{metric}" in scores else "-"
            for part in ("dev", "test")
        ]
        table.add_row(card.name, str(len(card.labels)), str(card.about["examples"]["train"]), *kept)
    Console(stderr=True).print(table)
