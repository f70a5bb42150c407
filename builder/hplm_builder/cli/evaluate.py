"""`hplm eval`: the studies, and two small commands for the demo's tenants and tables."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import typer
from torch import nn

from hplm.adapters import tenant as tenants
from hplm.errors import DataError
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.plot.keys import pack
from hplm.plot.ngrams import text_ngrams
from hplm.plot.table import row_bytes
from hplm.reporting.benchmark_result import JsonOption, Report
from hplm.reporting.progress import bar_report, progress_bars
from hplm.reporting.samples import unseen_paragraphs
from hplm.store.layout import Store
from hplm_builder.cli.options import DEFAULT_STORE, StoreOption
from hplm_builder.convert.base import DEFAULT_BASE, minilm_folder
from hplm_builder.convert.original import load_original
from hplm_builder.data.labelled import LabelledData
from hplm_builder.data.text_sources import SOURCES
from hplm_builder.evaluation.studies.cascade import cascade
from hplm_builder.evaluation.studies.cuts import cuts
from hplm_builder.evaluation.studies.domains import domains
from hplm_builder.evaluation.studies.int8 import int8
from hplm_builder.evaluation.studies.methods import methods
from hplm_builder.evaluation.studies.students import students
from hplm_builder.evaluation.studies.tables_accuracy import tables_accuracy
from hplm_builder.export.register import published
from hplm_builder.fleet.demo import PLOT_SOURCES, TENANTS, demo_data
from hplm_builder.tables.plot_tables import check_top, count_grams
from hplm_builder.tenants.bodies import FullModel
from hplm_builder.tenants.finetune import Trained, TrainSettings, fine_tune
from hplm_builder.tenants.prepared import prepare_all
from hplm_builder.tenants.tenant_build import token_ids

app = typer.Typer(
    no_args_is_help=True,
    help="Measure the quality of tenants and tables, compared with plain fine-tuning.",
    epilog="Example: hplm eval methods --root data --resume runs --json methods.json",
)
app.command()(methods)
app.command(name="tables-accuracy")(tables_accuracy)
app.command()(domains)
app.command()(cuts)
app.command()(cascade)
app.command()(students)
app.command()(int8)
# Fixed for `hplm eval demo`; `hplm eval methods` searches the learning rates of all methods.
LEARNING_RATE = 1e-4


def _plain_fine_tune(base: Base, data: LabelledData, settings: TrainSettings, name: str) -> Trained:
    """Train all parameters of the unconverted model on the task."""
    encoder = base.load_text_encoder()

    def body() -> nn.Module:
        return FullModel(load_original(minilm_folder(), base.config))

    with progress_bars() as progress:
        report = bar_report(progress, name)
        parts = prepare_all(data, encoder, token_ids, report)
        return fine_tune(body, base.config.hidden_size, data, parts, settings, report)


@app.command()
def demo(
    store: StoreOption = DEFAULT_STORE,
    tenant: Annotated[list[str] | None, typer.Option(help="Only this demo tenant; repeat for more.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Compare the demo tenants' test scores with plain fine-tuning of the unconverted base on the same data.

    Example: hplm eval demo --json demo.json
    """
    names = [demo_tenant.name for demo_tenant in TENANTS]
    if unknown := sorted(set(tenant or ()) - set(names)):
        raise DataError(f"no demo tenant {unknown[0]!r}; the demo tenants are {', '.join(names)}")
    target = Store.at(store)
    base = bases.load(target.base(DEFAULT_BASE))
    rows = []
    for demo_tenant in TENANTS:
        if tenant and demo_tenant.name not in tenant:
            continue
        data = demo_data(demo_tenant)
        served = published(target, demo_tenant.name, DEFAULT_BASE)
        if served is None:
            raise DataError(f"there is no tenant {demo_tenant.name!r} in {store}: build it with `hplm build demo`")
        card = tenants.load_card(target.path(served.current.path))
        if card.about["examples"] != data.counts:
            raise DataError(
                f"tenant {card.name!r} was trained on other data ({card.about['examples']}, the demo's is {data.counts}), so "
                f"the scores cannot be compared: remove the demo's folder, {store.parent}, and run `hplm build demo`"
            )
        settings = TrainSettings(epochs=demo_tenant.epochs, learning_rates=(LEARNING_RATE,))
        full = _plain_fine_tune(base, data, settings, demo_tenant.name).scores
        row: dict[str, object] = {"tenant": card.name, "labels": len(data.labels), "train": len(data.train)}
        for name, scores in (("hbert", card.about["scores"]), ("full", full)):
            row |= {f"{name}_accuracy": scores["test_accuracy"], f"{name}_macro_f1": scores["test_macro_f1"]}
        rows.append(row)
    Report("demo-tenants", {"base": DEFAULT_BASE, "seed": 0}, rows).publish(json_file)


@app.command()
def tables(
    store: StoreOption = DEFAULT_STORE,
    top: Annotated[list[float] | None, typer.Option(help="Percentage of n-grams to keep; repeat for more.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Measure the share of windows that root tables of several sizes hold, on text that no table has counted.

    Example: hplm eval tables --top 1 --top 3 --top 10
    """
    percents = top or [0.3, 1.0, 3.0, 10.0, 30.0, 100.0]
    for percent in percents:
        check_top(percent)
    base = bases.load(Store.at(store).base(DEFAULT_BASE))
    config, encoder = base.config, base.load_text_encoder()
    documents = [text for source in PLOT_SOURCES for text in SOURCES[source]()]
    with progress_bars() as progress:
        counted = count_grams(documents, base, progress)
    texts = {"wikipedia": unseen_paragraphs()}
    texts |= {tenant.name: [example.text for example in demo_data(tenant).test] for tenant in TENANTS}
    window_keys = {}
    for name, part in texts.items():
        encoded = encoder.encode(part)
        grams, _ = text_ngrams(
            np.concatenate([text.ids for text in encoded]), [len(text.ids) for text in encoded], config
        )
        window_keys[name] = pack(grams, config.vocab_size)
    rows = []
    for percent in percents:
        kept = pack(counted.top(percent), config.vocab_size)
        hits = {name: float(np.isin(keys, kept).mean()) for name, keys in window_keys.items()}
        rows.append(
            {"top_percent": percent, "rows": len(kept), "megabytes": len(kept) * row_bytes(config) / 1e6, **hits}
        )
    settings = {"tokens": int(counted.counts.sum()), "distinct": len(counted.grams), "window": config.window}
    Report("table-size", settings, rows).publish(json_file)
