"""`hplm eval domains`: tasks with and without a domain of their own, and training either half (HMI Fig. 7, O1 and O2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from hplm.engine import lower_layers as lowers
from hplm.engine.lower_layers import load_lower
from hplm.engine.open_domain import open_lineage
from hplm.models.lower import LowerEncoder
from hplm.reporting.benchmark_result import Report
from hplm.reporting.progress import Report as ProgressCallback
from hplm.reporting.progress import bar_report, progress_bars, silent
from hplm_builder.cli.options import BaseOption
from hplm_builder.convert.base import DEFAULT_BASE
from hplm_builder.domains.domain_build import DomainSettings
from hplm_builder.evaluation.search.eval_options import (
    EvalOptions,
    eval_command,
    open_run_store,
    run_study,
    study_settings,
)
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.served_domain import computed_features, converted_body
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
from hplm_builder.evaluation.search.summary import Row, result_rows
from hplm_builder.evaluation.studies.domain_builder import DomainBuilder
from hplm_builder.evaluation.studies.task_corpora import source_by_task
from hplm_builder.fleet.demo import PLOT
from hplm_builder.tenants.bodies import Half
from hplm_builder.tenants.prepared import Featurise
from hplm_builder.tenants.tenant_build import token_ids
from hplm_builder.tenants.trained_layers import plot_features

# Budget -> tokens that a domain is pretrained on.
TOKENS = {"cpu": 500_000, "full": DomainSettings.total_tokens, "quick": 4_096}
ROOT, BRANCH = "root", "branch"
HALVES: Mapping[str, tuple[Half, ...]] = {"lower": ("lower",), "higher": ("higher",), "all": ("lower", "higher")}


class DomainVariants:
    """The variants over the domains and bases that a builder builds."""

    def __init__(self, builder: DomainBuilder) -> None:
        self._builder = builder
        served = builder.parent
        self._base = served.base
        self._root = served.adapter_variant(ROOT, builder.device)

    def compared(self) -> list[Variant]:
        """Return adapters over the root, and adapters over the task's branch as it would be served."""
        store = self._builder.parent.store

        def features(task: EvalTask, report: ProgressCallback) -> Featurise:
            return plot_features(open_lineage(store, self._base, self._builder.lineage(task, report)))

        return [self._root, self._adapted(BRANCH, features)]

    def observed(self) -> list[Variant]:
        """Return the variants of the paper's observations; every window is computed.

        O1: adapters, after further pretraining of the lower layers, of the higher layers, or of all layers.
        O2: after further pretraining of the lower layers, fine-tuning of the higher layers, of the lower layers, or of all.
        """
        lower = self._adapted("pretrained-lower", lambda task, report: computed_features(self._lower(task, report)))
        pretrained = [lower, *(self._pretrained(name) for name in ("higher", "all"))]
        return [*pretrained, self._tuned_higher(lower.source), self._tuned("lower"), self._tuned("all")]

    def _adapted(
        self,
        name: str,
        open_features: Callable[[EvalTask, ProgressCallback], Featurise],
        body: Callable[[EvalTask], MakeBody] | None = None,
    ) -> Variant:
        source = FeatureSource(name, open_features)
        about = with_adapters(self._about)
        return replace(
            self._root, name=name, source=source, body=body or self._root.body, about=about, costs_as=self._root
        )

    def _lower(self, task: EvalTask, report: ProgressCallback) -> LowerEncoder:
        return lowers.of_lineage(self._builder.parent.store, self._base, self._builder.lineage(task, report))

    def _pretrained(self, name: str) -> Variant:
        def features(task: EvalTask, report: ProgressCallback) -> Featurise:
            return computed_features(load_lower(self._builder.pretrained(task, HALVES[name], report)))

        def body(task: EvalTask) -> MakeBody:
            return hbert_body(self._builder.pretrained(task, HALVES[name], silent), self._builder.device)(task)

        return self._adapted(f"pretrained-{name}", features, body)

    def _tuned_higher(self, source: FeatureSource) -> Variant:
        body = plot_body(self._base)
        alike = Variant("tuned-higher", self._base, self._root.source, body, RATES["plot"], self._about)
        return replace(alike, source=source, costs_as=alike)

    def _tuned(self, name: str) -> Variant:
        def features(task: EvalTask, report: ProgressCallback) -> Featurise:
            self._builder.lineage(task, report)  # builds the domain that the body needs
            return token_ids

        def body(task: EvalTask) -> MakeBody:
            return converted_body(self._base, self._lower(task, silent), HALVES[name])

        def root_body(task: EvalTask) -> MakeBody:
            return converted_body(self._base, load_lower(self._base), HALVES[name])

        # The same cost, but without a domain that must be built first.
        over_root = Variant(f"tuned-{name}", self._base, TOKEN_IDS, root_body, RATES["plot"], self._about)
        return replace(over_root, source=FeatureSource("domain-tokens", features), body=body, costs_as=over_root)

    def _about(self, task: EvalTask) -> dict[str, Any]:
        return {"base": self._base.fingerprint, "domain": self._builder.name(task)}


def with_gains(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the percentage points that each variant gains over the root."""
    root = {row["task"]: row["test"] for row in rows if row["variant"] == ROOT}
    return [
        row if row["variant"] == ROOT else {**row, "points_over_root": 100 * (row["test"] - root[row["task"]])}
        for row in rows
    ]


def describe_domains(builder: DomainBuilder, tasks: Sequence[EvalTask]) -> dict[str, Any]:
    """Return each task's domain for the benchmark result: corpus, held-out loss, sizes."""
    keys = ("corpus", "settings", "masked_lm", "moved", "corpus_hit_rate", "rows", "branch_bytes", "lower_bytes")
    described = {task.name: builder.about(task) for task in tasks}
    return {
        name: {"from": builder.sources[name], **{key: about[key] for key in keys}} for name, about in described.items()
    }


def show_pretraining_time(builder: DomainBuilder, tasks: Sequence[EvalTask], *, observations: bool) -> None:
    """Print how long building the missing domains takes, with two more bases per task for the observations."""
    also = [HALVES["higher"], HALVES["all"]] if observations else []
    with progress_bars() as progress:
        seconds = sum(builder.estimate_s(task, also, bar_report(progress, task.name, of_all=True)) for task in tasks)
        progress.console.print(f"about {seconds / 60:,.0f} minutes of further pretraining", highlight=False)


@eval_command
def domains(
    shared: EvalOptions,
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            help="Source, file, or `own` for the task's train text (default). Give one for all tasks, or one for each in order."
        ),
    ] = None,
    observations: Annotated[
        bool, typer.Option("--observations", help="Also compare the variants of O1 and O2: about seven times the work.")
    ] = False,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens to pretrain each domain on; default: 500,000, with --budget full 2,000,000."),
    ] = None,
    learning_rate: Annotated[
        float, typer.Option(help="Learning rate of the further pretraining.")
    ] = DomainSettings.learning_rate,
    top: Annotated[
        float, typer.Option(help="Keep this percentage of the corpus's distinct n-grams, by frequency.")
    ] = DomainSettings.top_percent,
    base: BaseOption = DEFAULT_BASE,
    plot: Annotated[str, typer.Option("--plot", help="PLOT or domain that is the parent of the branches.")] = PLOT,
) -> None:
    """Compare adapters over the root and over a domain of the task's own, as HMI Fig. 7; with --observations also O1 and O2.

    Domains are built in the --resume folder, once for all processes, and are kept there. Examples:

      hplm eval domains --data data/chemprot --corpus pubmed --data data/sst-2 --corpus films --resume runs-domains

      hplm eval domains --root data --corpus own --observations --dry-run
    """
    tasks, limits, device = shared.read()
    parent = shared.served(base, plot)
    total = tokens or TOKENS[limits.name]
    share = DomainSettings.warmup_tokens / DomainSettings.total_tokens
    settings = DomainSettings(
        total_tokens=total,
        warmup_tokens=max(1, int(total * share)),
        learning_rate=learning_rate,
        top_percent=top,
        min_corpus_tokens=0,
    )
    with open_run_store(shared.resume) as run_store:
        builder = DomainBuilder(parent, settings, source_by_task(tasks, corpus or ()), run_store, device)
        over_domains = DomainVariants(builder)
        variants = [*over_domains.compared(), *(over_domains.observed() if observations else ())]
        study = shared.study(tasks, variants, limits, device)
        show_pretraining_time(builder, tasks, observations=observations)
        best = run_study(study, run_store, shared.dry_run)
        rows = with_gains(result_rows(study, best, "variant"))
        about = {"base": base, "plot": plot, "domains": describe_domains(builder, tasks)}
    Report("domains", study_settings(study, best, about), rows).publish(shared.json_file)
