"""`hplm eval domains`: a task with and without its domain, and which half of a model trains (HMI Fig. 7, O1 and O2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from hplm.engine import lower_layers as lowers
from hplm.engine.open_domain import open_lineage
from hplm.models import base as bases
from hplm.models.layers import WindowEncoder
from hplm.reporting.benchmark_result import Report
from hplm.reporting.progress import Report as Told
from hplm.reporting.progress import bar_report, progress_bars, silent
from hplm.store.layout import Store
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
from hplm_builder.evaluation.search.summary import Row, result_rows, test_scores
from hplm_builder.evaluation.search.variants import (
    RATES,
    FeatureSource,
    MakeBody,
    ServedDomain,
    Variant,
    computed_features,
    converted_body,
    hbert_body,
    plot_body,
    with_adapters,
)
from hplm_builder.evaluation.studies.domain_builder import DomainBuilder
from hplm_builder.evaluation.studies.task_corpora import source_by_task
from hplm_builder.fleet.demo import PLOT
from hplm_builder.tenants.bodies import Half
from hplm_builder.tenants.prepared import Featurise
from hplm_builder.tenants.tenant_build import plot_features, token_ids

# How many tokens a domain of a budget is pretrained on.
TOKENS = {"cpu": 500_000, "full": DomainSettings.total_tokens, "quick": 4_096}
ROOT, BRANCH = "root", "branch"
HALVES: Mapping[str, tuple[Half, ...]] = {"lower": ("lower",), "higher": ("higher",), "all": ("lower", "higher")}


class DomainVariants:
    """The variants over what a builder builds, by name."""

    def __init__(self, builder: DomainBuilder) -> None:
        self._builder = builder
        served = builder.parent
        self._base = served.base
        self._adapters = hbert_body(self._base, builder.device)
        self._root = Variant(
            ROOT, self._base, served.source, self._adapters, RATES["hbert"], with_adapters(served.about)
        )

    def compared(self) -> list[Variant]:
        """Adapters over the root, and over the task's branch as it would be served."""
        return [self._root, self._adapted(BRANCH, self._branch)]

    def observed(self) -> list[Variant]:
        """What the paper's observations are about, every window computed.

        O1: adapters after further pretraining of the lower layers, of the higher ones, or of all. O2: after that of the lower
        ones, fine-tuning of all the higher layers, of the lower ones, or of both.
        """
        lower = self._adapted("pretrained-lower", self._pretrained_lower)
        pretrained = [lower, *(self._pretrained(name) for name in ("higher", "all"))]
        return [*pretrained, self._tuned_higher(lower.source), self._tuned("lower"), self._tuned("all")]

    def _adapted(
        self,
        name: str,
        open_features: Callable[[EvalTask, Told], Featurise],
        body: Callable[[EvalTask], MakeBody] | None = None,
    ) -> Variant:
        source = FeatureSource(name, open_features)
        about = with_adapters(self._about)
        return Variant(name, self._base, source, body or self._adapters, RATES["hbert"], about, costs_as=self._root)

    def _branch(self, task: EvalTask, told: Told) -> Featurise:
        store = self._builder.parent.store
        return plot_features(open_lineage(store, self._base, self._builder.lineage(task, told)))

    def _lower(self, task: EvalTask, told: Told) -> WindowEncoder:
        return lowers.of_lineage(self._builder.parent.store, self._base, self._builder.lineage(task, told))

    def _pretrained_lower(self, task: EvalTask, told: Told) -> Featurise:
        return computed_features(self._lower(task, told))

    def _pretrained(self, name: str) -> Variant:
        def features(task: EvalTask, told: Told) -> Featurise:
            return computed_features(self._builder.pretrained(task, HALVES[name], told).load_lower())

        def body(task: EvalTask) -> MakeBody:
            return hbert_body(self._builder.pretrained(task, HALVES[name], silent), self._builder.device)(task)

        return self._adapted(f"pretrained-{name}", features, body)

    def _tuned_higher(self, source: FeatureSource) -> Variant:
        root, body = self._root, plot_body(self._base)
        alike = Variant("tuned-higher", self._base, root.source, body, RATES["plot"], self._about)
        return Variant("tuned-higher", self._base, source, body, RATES["plot"], self._about, costs_as=alike)

    def _tuned(self, name: str) -> Variant:
        def features(task: EvalTask, told: Told) -> Featurise:
            self._builder.lineage(task, told)  # so that it is there when the body is asked for
            return token_ids

        def body(task: EvalTask) -> MakeBody:
            return converted_body(self._base, self._lower(task, silent), HALVES[name])

        def unlike(task: EvalTask) -> MakeBody:
            return converted_body(self._base, self._base.load_lower(), HALVES[name])

        tokens = FeatureSource("tokens", lambda task, told: token_ids)
        alike = Variant(f"tuned-{name}", self._base, tokens, unlike, RATES["plot"], self._about)
        source = FeatureSource("domain-tokens", features)
        return Variant(alike.name, self._base, source, body, RATES["plot"], self._about, costs_as=alike)

    def _about(self, task: EvalTask) -> dict[str, Any]:
        return {"base": self._base.fingerprint, "domain": self._builder.name(task)}


def with_gains(rows: Sequence[Row]) -> list[Row]:
    """The same rows, each with the points that it has over the root's."""
    tests = test_scores(rows, "variant")
    return [
        {**row, **({"points_over_root": 100 * (row["test"] - root)} if row["variant"] != ROOT else {})}
        for row in rows
        for root in [tests[row["task"], ROOT]]
    ]


def describe_domains(builder: DomainBuilder, tasks: Sequence[EvalTask]) -> dict[str, Any]:
    """What the report says of each task's domain: corpus, held-out loss, sizes."""
    keys = ("corpus", "settings", "masked_lm", "moved", "corpus_hit_rate", "rows", "branch_bytes", "lower_bytes")
    found = {task.name: builder.about(task) for task in tasks}
    return {
        task.name: {"from": builder.sources[task.name], **{key: found[task.name][key] for key in keys}}
        for task in tasks
    }


def show_pretraining_time(builder: DomainBuilder, tasks: Sequence[EvalTask], *, observations: bool) -> None:
    """Print what building the domains that are not there yet will take; for the observations two models more each."""
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
            help="Source, file or `own`: the task's train text (default). One for all, or one a task in order."
        ),
    ] = None,
    observations: Annotated[
        bool, typer.Option("--observations", help="Also what O1 and O2 compare with: about seven times the work.")
    ] = False,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="To pretrain each domain on; default: 500,000, with --budget full 2,000,000."),
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Of the further pretraining.")] = DomainSettings.learning_rate,
    top: Annotated[
        float, typer.Option(help="A branch keeps this percentage of its corpus's distinct n-grams.")
    ] = DomainSettings.top_percent,
    base: BaseOption = DEFAULT_BASE,
    plot: Annotated[str, typer.Option("--plot", help="PLOT or domain that the branches grow from.")] = PLOT,
) -> None:
    """HMI Fig. 7: a task over the root and over a domain of its own, adapters by the same search; with --observations O1, O2.

    Domains are built in the --resume folder, once for all processes, and stay there. Examples:

      hplm eval domains --data data/chemprot --corpus pubmed --data data/sst-2 --corpus films --resume runs-domains

      hplm eval domains --root data --corpus own --observations --dry-run
    """
    tasks, limits, where = shared.read()
    target = Store.at(shared.store)
    parent = ServedDomain(target, bases.load(target.base(base)), plot)
    total = tokens or TOKENS[limits.name]
    share = DomainSettings.warmup_tokens / DomainSettings.total_tokens
    settings = DomainSettings(
        total_tokens=total,
        warmup_tokens=max(1, int(total * share)),
        learning_rate=learning_rate,
        top_percent=top,
        min_corpus_tokens=0,
    )
    with open_run_store(shared.resume) as results:
        builder = DomainBuilder(parent, settings, source_by_task(tasks, corpus or ()), results, where)
        made = DomainVariants(builder)
        variants = [*made.compared(), *(made.observed() if observations else ())]
        study = shared.study(tasks, variants, limits, where)
        show_pretraining_time(builder, tasks, observations=observations)
        found = run_study(study, results, shared.dry_run)
        rows = with_gains(result_rows(study, found, "variant"))
        about = study_settings(study, found, {"base": base, "plot": plot, "domains": describe_domains(builder, tasks)})
    Report("domains", about, rows).publish(shared.json_file)
