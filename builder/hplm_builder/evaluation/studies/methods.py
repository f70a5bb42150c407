"""`hplm eval methods`: the fine-tuning methods of HMI Table 3, compared."""

from __future__ import annotations

import copy
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
from hplm.reporting.benchmark_result import Goal, Report
from hplm.tasks.task_loader import task_named
from hplm_builder.cli.options import BaseOption
from hplm_builder.convert.base import DEFAULT_BASE, model_folder
from hplm_builder.evaluation.search.eval_options import EvalOptions, eval_command, study_settings
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.finished_runs import BestRun
from hplm_builder.evaluation.search.original_model import OriginalModel
from hplm_builder.evaluation.search.served_domain import ServedDomain
from hplm_builder.evaluation.search.study import (
    RATES,
    TOKEN_IDS,
    FeatureSource,
    MakeBody,
    Variant,
    hbert_body,
    plot_body,
    with_adapters,
)
from hplm_builder.evaluation.search.summary import AVERAGE, Row, result_rows, test_scores
from hplm_builder.fleet.demo import PLOT
from hplm_builder.tenants.bodies import ADAPTER_AT, FullModel, HeadModel, LastLayers, adapter_body
from hplm_builder.tenants.dev_scores import DevScore
from hplm_builder.tenants.widths import choose

METHODS = tuple(RATES)
# hbert-auto keeps, for each seed, the run of hbert or of hbert-wide that a tenant's job would keep. It has no runs of its own.
NARROW_METHOD, WIDE_METHOD, AUTO = "hbert", "hbert-wide", "hbert-auto"
# With adapters after attention as in HMI, with other widths, and with unlabelled texts. They run only if they are named.
ON_DEMAND = (
    "adapter-attention",
    "hbert-attention",
    "adapter-wide",
    WIDE_METHOD,
    AUTO,
    "hbert-taught",
    "hbert-wide-taught",
)
WIDE = 4  # reduction factor of the wide adapters
MOST_POINTS = 1.0  # percentage points that hBERT may lose against another method


def method_variants(original: OriginalModel, served: ServedDomain, device: torch.device) -> list[Variant]:
    """Return all methods, ordered so that methods with the same features are neighbours."""
    base = original.base
    last = FeatureSource("original-last", lambda task, report: original.states_below(0))
    cut = FeatureSource("original-cut", lambda task, report: original.states_below(base.config.adapted_layers))

    def whole(task: EvalTask) -> dict[str, Any]:
        return {"base": base.fingerprint, "original": original.fingerprint}

    def whole_body(task: EvalTask) -> MakeBody:
        return lambda: FullModel(copy.deepcopy(original.model))

    def adapter(name: str, at: Place = ADAPTER_AT, factor: int = REDUCTION_FACTOR) -> Variant:
        def body(task: EvalTask) -> MakeBody:
            return adapter_body(LastLayers.of(original.model), factor, device=device, at=at)

        return Variant(name, base, cut, body, RATES["adapter"], with_adapters(whole, at, factor))

    def hbert(name: str, at: Place = ADAPTER_AT, factor: int = REDUCTION_FACTOR) -> Variant:
        body, about = hbert_body(base, device, at, factor), with_adapters(served.about, at, factor)
        return Variant(name, base, served.source, body, RATES["hbert"], about)

    return [
        Variant("dedicated", base, TOKEN_IDS, whole_body, RATES["dedicated"], whole),
        Variant("shared", base, last, lambda task: HeadModel, RATES["shared"], whole),
        adapter("adapter"),
        adapter("adapter-attention", "attention"),
        adapter("adapter-wide", factor=WIDE),
        Variant("plot", base, served.source, plot_body(base), RATES["plot"], served.about),
        hbert("hbert"),
        hbert("hbert-attention", "attention"),
        hbert("hbert-wide", factor=WIDE),
        replace(hbert("hbert-taught"), with_pseudo_labels=True),
        replace(hbert("hbert-wide-taught", factor=WIDE), with_pseudo_labels=True),
    ]


def choose_widths(task: EvalTask, narrow: Sequence[BestRun], wide: Sequence[BestRun]) -> list[BestRun]:
    """Return, for each seed, the run of the width that `hplm build tenant` would keep if both were trained to the end.

    Raises ConfigError for runs of an older release, which lack what the rule compares.
    """
    wide_is_usual = task_named(task.data.task).reduction_factor(WIDE) < REDUCTION_FACTOR
    usual, other = (wide, narrow) if wide_is_usual else (narrow, wide)
    return [_kept_width(task, *runs) for runs in zip(usual, other, strict=True)]


def _kept_width(task: EvalTask, usual: BestRun, other: BestRun) -> BestRun:
    scores = []
    for best in (usual, other):
        if best.run is None or best.run.dev is None:
            return other if best is usual else usual  # training diverged at every rate
        if not best.run.dev_without:
            raise ConfigError(
                f"{task.name}: the finished runs of seed {best.seed} are from before there was a choice of widths: give "
                "--resume another folder"
            )
        scores.append(DevScore(best.run.dev, tuple(best.run.dev_without)))
    return (usual, other)[choose(scores)]


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """Return hBERT's goals, as far as the compared methods and tasks show them."""
    tests = test_scores(rows, "method")
    tasks = [task for task in dict.fromkeys(task for task, _ in tests) if task != AVERAGE]

    def lost(name: str, against: str) -> list[float]:
        """Return the percentage points that `name` is below `against`, for each task that has both."""
        return [
            100 * (tests[task, against] - tests[task, name])
            for task in tasks
            if (task, against) in tests and (task, name) in tests
        ]

    goals = []
    for name in ("hbert", "hbert-wide", "hbert-auto", "hbert-taught", "hbert-wide-taught"):
        ending = name.removeprefix("hbert")
        if gaps := lost(name, "dedicated"):
            text = f"points that {name} loses against dedicated, average over tasks"
            goals.append(Goal(f"gap-to-dedicated{ending}", text, MOST_POINTS, sum(gaps) / len(gaps), "points", "lower"))
        if gaps := lost(name, "adapter"):
            text = f"points that {name} loses against adapter on the task where it loses most"
            # NaN if a method diverged on any task; max() would depend on the order.
            worst = math.nan if any(map(math.isnan, gaps)) else max(gaps)
            goals.append(Goal(f"worst-against-adapter{ending}", text, MOST_POINTS, worst, "points", "lower"))
    return goals


@eval_command
def methods(
    shared: EvalOptions,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Method to compare; repeat for more. Default: {', '.join(METHODS)}. On demand: {', '.join(ON_DEMAND)}."
        ),
    ] = None,
    base: BaseOption = DEFAULT_BASE,
    plot: Annotated[
        str, typer.Option("--plot", help="PLOT or domain in which plot and hbert look up features.")
    ] = PLOT,
    original: Annotated[
        Path, typer.Option(help="Model that the base was converted from: `minilm`, `mpnet`, or its folder.")
    ] = Path("minilm"),
    miss: Annotated[str, typer.Option(help="What a window in no table gets: compute or backoff.")] = "compute",
) -> None:
    """Compare fine-tuning methods as HMI Table 3 does. All use the same search; dev chooses, test is reported.

    dedicated: the whole original model trains. shared: a head over the frozen original. adapter: adapters in the original's
    upper layers. plot: all upper layers over PLOT features. hbert: adapters over PLOT features, as they are served.

    On demand: adapter-attention and hbert-attention have adapters after the attention sub-layer, as in HMI. adapter-wide and
    hbert-wide have adapters four times as wide (a reduction factor of 4). hbert-auto keeps hbert or hbert-wide, as dev says; it
    trains both to the end. hbert-taught and hbert-wide-taught also learn from as many unlabelled texts of the train part, which
    a plot model trained on the labelled texts labels. Examples:

      hplm eval methods --root data --quick

      hplm eval methods --root data --resume runs --threads 1 & hplm eval methods --root data --resume runs --threads 1

      hplm eval methods --root data --budget full --device cuda --resume runs-full --json methods-full.json
    """
    wanted = {*(method or METHODS)}
    if unknown := sorted(wanted - {*METHODS, *ON_DEMAND}):
        raise ConfigError(f"unknown method {unknown[0]!r}; the methods are {', '.join((*METHODS, *ON_DEMAND))}")
    if AUTO in wanted:
        wanted |= {NARROW_METHOD, WIDE_METHOD}
    tasks, limits, device = shared.read()
    served = shared.served(base, plot, miss)
    original_model = OriginalModel(served.base, model_folder(original), device)
    original_model.check()
    variants = method_variants(original_model, served, device)
    chosen = [variant for variant in variants if variant.name in wanted]
    study, best = shared.run(tasks, chosen, limits, device)
    if AUTO in wanted:
        for task in tasks:
            best[task.name, AUTO] = choose_widths(task, best[task.name, NARROW_METHOD], best[task.name, WIDE_METHOD])
        narrow = next(variant for variant in chosen if variant.name == NARROW_METHOD)
        study = replace(study, variants=[*chosen, replace(narrow, name=AUTO)])
    rows = result_rows(study, best)
    for row in rows:
        if row["method"] == AUTO and row["task"] != AVERAGE:
            pairs = zip(best[row["task"], AUTO], best[row["task"], WIDE_METHOD], strict=True)
            row["wide_seeds"] = sum(kept is wide for kept, wide in pairs)
    settings: dict[str, Any] = {"base": base, "original": original_model.folder.name, "plot": plot, "miss": miss}
    Report("methods", study_settings(study, best, settings), rows, goals_of(rows)).publish(shared.json_file)
