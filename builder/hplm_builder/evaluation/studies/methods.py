"""`hplm eval methods`: the paper's ways to fine-tune, side by side (HMI Table 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hplm.adapters.packed import Place
from hplm.core.settings import REDUCTION_FACTOR
from hplm.errors import ConfigError
from hplm.models import base as bases
from hplm.reporting.benchmark_result import Goal, Report
from hplm.store.layout import Store
from hplm_builder.cli.options import BaseOption
from hplm_builder.convert.base import DEFAULT_BASE, model_folder
from hplm_builder.evaluation.search.eval_options import EvalOptions, eval_command, study_settings
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.summary import AVERAGE, Row, result_rows, test_scores
from hplm_builder.evaluation.search.variants import (
    RATES,
    OriginalModel,
    ServedDomain,
    Variant,
    hbert_body,
    plot_body,
    with_adapters,
)
from hplm_builder.fleet.demo import PLOT
from hplm_builder.tenants.bodies import ADAPTER_AT

METHODS = tuple(RATES)
# With adapters where HMI has them, with wider ones, and with unlabelled texts too.
ON_DEMAND = ("adapter-attention", "hbert-attention", "adapter-wide", "hbert-wide", "hbert-taught", "hbert-wide-taught")
WIDE = 4
MOST_POINTS = 1.0


def method_variants(original: OriginalModel, served: ServedDomain, device: torch.device) -> list[Variant]:
    """All methods; those with the same features next to each other."""
    base = original.base

    def whole(task: EvalTask) -> dict[str, Any]:
        return {"base": base.fingerprint, "original": original.fingerprint}

    def adapter(name: str, at: Place = ADAPTER_AT, factor: int = REDUCTION_FACTOR) -> Variant:
        body, about = original.adapter_body(at, factor), with_adapters(whole, at, factor)
        return Variant(name, base, original.cut_states(), body, RATES["adapter"], about)

    def hbert(name: str, at: Place = ADAPTER_AT, factor: int = REDUCTION_FACTOR) -> Variant:
        body, about = hbert_body(base, device, at, factor), with_adapters(served.about, at, factor)
        return Variant(name, base, served.source, body, RATES["hbert"], about)

    return [
        Variant("dedicated", base, original.token_ids(), original.full_body, RATES["dedicated"], whole),
        Variant("shared", base, original.last_states(), original.head_body, RATES["shared"], whole),
        adapter("adapter"),
        adapter("adapter-attention", "attention"),
        adapter("adapter-wide", factor=WIDE),
        Variant("plot", base, served.source, plot_body(base), RATES["plot"], served.about),
        hbert("hbert"),
        hbert("hbert-attention", "attention"),
        hbert("hbert-wide", factor=WIDE),
        replace(hbert("hbert-taught"), taught=True),
        replace(hbert("hbert-wide-taught", factor=WIDE), taught=True),
    ]


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """What of hBERT's goals the rows can tell."""
    tests = test_scores(rows, "method")
    tasks = [task for task in dict.fromkeys(task for task, _ in tests) if task != AVERAGE]

    def lost(name: str, against: str) -> list[float]:
        """Points that one method is below another, by task."""
        return [
            100 * (tests[task, against] - tests[task, name])
            for task in tasks
            if (task, against) in tests and (task, name) in tests
        ]

    goals = []
    for name in ("hbert", "hbert-wide", "hbert-taught", "hbert-wide-taught"):
        ending = name.removeprefix("hbert")
        if gaps := lost(name, "dedicated"):
            text = f"points that {name} loses against dedicated, average over tasks"
            goals.append(Goal(f"gap-to-dedicated{ending}", text, MOST_POINTS, sum(gaps) / len(gaps), "points", "lower"))
        if gaps := lost(name, "adapter"):
            text = f"points that {name} loses against adapter on the task where it loses most"
            # Where a method diverged on a task, wherever among them that is.
            worst = math.nan if any(map(math.isnan, gaps)) else max(gaps)
            goals.append(Goal(f"worst-against-adapter{ending}", text, MOST_POINTS, worst, "points", "lower"))
    return goals


@eval_command
def methods(
    shared: EvalOptions,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Of {', '.join(METHODS)}, which are the default, and {', '.join(ON_DEMAND)}; repeat for more."
        ),
    ] = None,
    base: BaseOption = DEFAULT_BASE,
    plot: Annotated[str, typer.Option("--plot", help="PLOT or domain that plot and hbert look up in.")] = PLOT,
    original: Annotated[
        Path, typer.Option(help="The model that the base was converted from: `minilm`, `mpnet`, or its folder.")
    ] = Path("minilm"),
    miss: Annotated[str, typer.Option(help="compute or backoff.")] = "compute",
) -> None:
    """HMI Table 3: every method with the same search over learning rate and epochs, best on dev, test reported.

    dedicated: all of the original trains. shared: a head over the frozen original. adapter: adapters in the original's upper
    layers. plot: all upper layers over PLOT features. hbert: adapters over PLOT features, as served (taggings: hbert-wide).

    On demand, adapter-attention and hbert-attention: adapters after the attention sub-layer, where HMI has them; adapter-wide
    and hbert-wide: adapters four times as wide (a reduction factor of 4); hbert-taught, hbert-wide-taught: hbert that
    also learns from as many unlabelled texts of the train part, labelled by a plot of the labelled ones. Examples:

      hplm eval methods --root data --quick

      hplm eval methods --root data --resume runs --threads 1 & hplm eval methods --root data --resume runs --threads 1

      hplm eval methods --root data --budget full --device cuda --resume runs-full --json methods-full.json
    """
    if unknown := sorted(set(method or ()) - {*METHODS, *ON_DEMAND}):
        raise ConfigError(f"no method {unknown[0]!r}; there are {', '.join((*METHODS, *ON_DEMAND))}")
    tasks, limits, where = shared.read()
    target = Store.at(shared.store)
    found_base = bases.load(target.base(base))
    source = OriginalModel(found_base, model_folder(original), where)
    source.check()
    variants = [
        variant
        for variant in method_variants(source, ServedDomain(target, found_base, plot, miss), where)
        if variant.name in (method or METHODS)
    ]
    study, found = shared.run(tasks, variants, limits, where)
    rows = result_rows(study, found)
    settings: dict[str, Any] = {"base": base, "original": source.folder.name, "plot": plot, "miss": miss}
    Report("methods", study_settings(study, found, settings), rows, goals_of(rows)).publish(shared.json_file)
