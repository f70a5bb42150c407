"""`hplm eval`: quality beside plain fine-tuning."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from torch import nn

from hplm.adapters import tenant as tenants
from hplm.errors import ConfigError, DataError
from hplm.nn import base as bases
from hplm.nn.base import Base
from hplm.nn.lookup import open_lookup
from hplm.plot.keys import pack
from hplm.plot.table import row_bytes
from hplm.plot.windows import windows
from hplm.progress import bar_report, progress_bars
from hplm.report import Goal, Report, writable
from hplm.samples import unseen_paragraphs
from hplm.store.layout import Store
from hplm.text import TextEncoder
from hplm_builder.base import DEFAULT_BASE, minilm_folder
from hplm_builder.bodies import FullModel, adapter_body
from hplm_builder.corpora import SOURCES
from hplm_builder.demo import DEMO_FOLDER, PLOT, PLOT_SOURCES, TENANTS, demo_data
from hplm_builder.evaluation.cuts import cuts
from hplm_builder.evaluation.domains import domains
from hplm_builder.evaluation.int8 import int8
from hplm_builder.evaluation.methods import methods
from hplm_builder.evaluation.tables_accuracy import tables_accuracy
from hplm_builder.finetune import REDUCTION_FACTOR, Trained, TrainSettings, fine_tune
from hplm_builder.labelled import LabelledData, read_folder
from hplm_builder.original import load_original
from hplm_builder.plots import count_grams
from hplm_builder.prepared import Featurise, prepare_all
from hplm_builder.pseudo_labels import upper_body
from hplm_builder.register import published
from hplm_builder.scores import METRICS
from hplm_builder.tenants import plot_features, token_ids

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure quality beside plain fine-tuning.",
    epilog="Example: hplm eval methods --root data --resume runs --json methods.json",
)
app.command()(methods)
app.command(name="tables-accuracy")(tables_accuracy)
app.command()(domains)
app.command()(cuts)
app.command()(int8)
JsonOption = Annotated[
    Path | None, typer.Option("--json", callback=writable, help="Also write the report to this file.")
]
StoreOption = Annotated[Path, typer.Option("--store", help="Folder of the artifacts.")]
METHODS = ("full", "upper", "adapters")
# One rate a method, not searched: a full comparison searches each, see `--learning-rate`.
RATES = {"full": (1e-4,), "upper": (3e-4,), "adapters": (2e-3,)}


def _full_body(base: Base) -> nn.Module:
    return FullModel(load_original(minilm_folder(), base.config))


def run_method(
    method: str, base: Base, store: Store, data: LabelledData, settings: TrainSettings, name: str, miss: str = "compute"
) -> Trained:
    """Fine-tune one way: `full` (the unconverted model, everything), `upper` (all upper layers), `adapters`."""
    encoder = TextEncoder(base.tokenizer_path, base.config.max_tokens)
    make_body: Callable[[], nn.Module]
    featurise: Featurise = token_ids
    if method != "full":
        featurise = plot_features(open_lookup(store, base, PLOT, miss=miss))
    if method == "full":
        make_body = partial(_full_body, base)
    elif method == "upper":
        make_body = upper_body(base)
    else:
        make_body = adapter_body(base.load_upper(), REDUCTION_FACTOR)
    with progress_bars() as progress:
        report = bar_report(progress, f"{name}, {method}")
        parts = prepare_all(data, encoder, featurise, report)
        return fine_tune(make_body, base.config.hidden_size, data, parts, settings, report)


@app.command()
def demo(
    store: StoreOption = DEMO_FOLDER / "store",
    tenant: Annotated[list[str] | None, typer.Option(help="Only these; repeat for more.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Test scores of the demo tenants, as built, beside a plain fine-tune of the unconverted base on the same data.

    Example: hplm eval demo --json demo.json
    """
    if unknown := sorted(set(tenant or ()) - {one.name for one in TENANTS}):
        raise DataError(f"no demo tenant {unknown[0]!r}; there are {', '.join(one.name for one in TENANTS)}")
    target = Store.at(store)
    base = bases.load(target.base(DEFAULT_BASE))
    rows = []
    for demo_tenant in TENANTS:
        if tenant and demo_tenant.name not in tenant:
            continue
        data = demo_data(demo_tenant)
        found = published(target, demo_tenant.name)
        if found is None:
            raise DataError(f"there is no tenant {demo_tenant.name!r} in {store}: `hplm build demo` makes it")
        card = tenants.load_card(target.path(found.current.path))
        if card.about["examples"] != (asked := data.counts):
            raise DataError(
                f"tenant {card.name!r} was made of other data ({card.about['examples']}, the demo's is {asked}), so the two "
                f"cannot be compared: remove the demo's folder, {store.parent}, and `hplm build demo` makes it anew"
            )
        settings = TrainSettings(epochs=demo_tenant.epochs, learning_rates=RATES["full"])
        full = run_method("full", base, target, data, settings, demo_tenant.name).scores
        row: dict[str, object] = {"tenant": card.name, "labels": len(data.labels), "train": len(data.train)}
        for name, scores in (("hbert", card.about["scores"]), ("full", full)):
            row |= {f"{name}_accuracy": scores["test_accuracy"], f"{name}_macro_f1": scores["test_macro_f1"]}
        rows.append(row)
    Report("demo-tenants", {"base": DEFAULT_BASE, "seed": 0}, rows).publish(json_file)


@app.command()
def conversion(
    data: Annotated[Path, typer.Option(help="Folder with train, dev and test files of one task.")],
    store: StoreOption = DEMO_FOLDER / "store",
    method: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(METHODS)}; repeat for more.")] = None,
    epochs: Annotated[int, typer.Option()] = 6,
    adapter_epochs: Annotated[int, typer.Option()] = 15,
    learning_rate: Annotated[list[float] | None, typer.Option(help="Instead of each method's own.")] = None,
    pooling: Annotated[str, typer.Option(help="mean or cls.")] = "mean",
    miss: Annotated[str, typer.Option(help="compute or backoff.")] = "compute",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json_file: JsonOption = None,
) -> None:
    """What conversion costs on a task: the converted base's upper layers or adapters beside everything fine-tuned.

    Example: hplm eval conversion --data data/chemprot --json conversion.json
    """
    if unknown := sorted(set(method or ()) - set(METHODS)):
        raise ConfigError(f"no method {unknown[0]!r}; there are {', '.join(METHODS)}")
    if miss not in ("compute", "backoff"):
        raise ConfigError(f"--miss is compute or backoff, got {miss!r}")
    target = Store.at(store)
    base = bases.load(target.base(DEFAULT_BASE))
    examples = read_folder(data)
    if not examples.test:
        raise ConfigError(f"{data} has no test data: there is nothing to report")
    metric = METRICS[examples.task]
    rows = []
    for one in method or METHODS:
        settings = TrainSettings(
            epochs=adapter_epochs if one == "adapters" else epochs,
            learning_rates=tuple(learning_rate or RATES[one]),
            pooling=pooling,
            seed=seed,
        )
        trained = run_method(one, base, target, examples, settings, data.name, miss)
        rows.append(
            {
                "method": one,
                f"dev_{metric}": trained.scores[f"dev_{metric}"],
                f"test_{metric}": trained.scores[f"test_{metric}"],
                "learning_rate": trained.learning_rate,
                "dev_by_rate": {f"{rate:g}": dev for rate, dev in trained.dev_by_rate.items()},
                "epochs": settings.epochs,
                "best_epoch": trained.best_epoch,
            }
        )
    goals = []
    found = {row["method"]: float(str(row[f"test_{metric}"])) for row in rows}
    if "full" in found and "upper" in found:
        text = "points lost by upper layers over the converted base, against everything fine-tuned"
        goals.append(Goal("conversion-loss", text, 2.0, 100 * (found["full"] - found["upper"]), "points", "lower"))
    Report(f"conversion-{data.name}", {"seed": seed, "pooling": pooling, "miss": miss}, rows, goals).publish(json_file)


@app.command()
def tables(
    store: StoreOption = DEMO_FOLDER / "store",
    top: Annotated[list[float] | None, typer.Option(help="Percentages to try; repeat for more.")] = None,
    json_file: JsonOption = None,
) -> None:
    """What share of windows a root table of each size answers, on text that no table has counted.

    Example: hplm eval tables --top 1 --top 3 --top 10
    """
    base = bases.load(Store.at(store).base(DEFAULT_BASE))
    config, encoder = base.config, TextEncoder(base.tokenizer_path, base.config.max_tokens)
    documents = [text for source in PLOT_SOURCES for text in SOURCES[source]()]
    with progress_bars() as progress:
        counted = count_grams(documents, base, progress)
    texts = {"wikipedia": unseen_paragraphs()}
    texts |= {tenant.name: [example.text for example in demo_data(tenant).test] for tenant in TENANTS}
    asked = {}
    for name, part in texts.items():
        encoded = encoder.encode(part)
        grams, _ = windows(
            np.concatenate([one.ids for one in encoded]),
            [len(one.ids) for one in encoded],
            config.window,
            config.pad_id,
        )
        asked[name] = pack(grams, config.vocab_size)
    rows = []
    for percent in top or (0.3, 1.0, 3.0, 10.0, 30.0, 100.0):
        kept = pack(counted.top(percent), config.vocab_size)
        hits = {name: float(np.isin(keys, kept).mean()) for name, keys in asked.items()}
        rows.append(
            {"top_percent": percent, "rows": len(kept), "megabytes": len(kept) * row_bytes(config) / 1e6, **hits}
        )
    settings = {"tokens": int(counted.counts.sum()), "distinct": len(counted.grams), "window": config.window}
    Report("table-size", settings, rows).publish(json_file)
