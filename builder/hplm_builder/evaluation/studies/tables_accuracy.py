"""`hplm eval tables-accuracy`: accuracy over the size of a table and the way to answer misses (HMI Table 5 and beyond)."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from hplm.core.settings import REDUCTION_FACTOR
from hplm.errors import ConfigError, UnknownTenantError
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import bar_report, progress_bars
from hplm_builder.cli.options import BaseOption
from hplm_builder.convert.base import DEFAULT_BASE
from hplm_builder.convert.mixture import read_source, read_to_count
from hplm_builder.domains.domain_corpus import prepare_corpus
from hplm_builder.evaluation.search.budget import Budget
from hplm_builder.evaluation.search.eval_options import EvalOptions, eval_command, study_settings
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.served_domain import ServedDomain
from hplm_builder.evaluation.search.summary import AVERAGE, Row, mean_and_spread, measurements_by_task, with_average
from hplm_builder.evaluation.studies.table_scorer import MISSES, TableScorer
from hplm_builder.evaluation.studies.task_corpora import without_test_texts
from hplm_builder.export.register import published
from hplm_builder.fleet.demo import PLOT, PLOT_SOURCES
from hplm_builder.tables.plot_tables import Counted, count_grams
from hplm_builder.tables.pruned_tables import VersionTree
from hplm_builder.tenants.bodies import adapter_body
from hplm_builder.tenants.tenant_build import load_version

PERCENTS = (0.1, 1.0, 10.0, 100.0)
SMALL_GIGABYTES = 1.5  # a small table's size at BERT-base's width: the paper's size
QUICK_DOCUMENTS = 2_000  # documents of the corpus that --quick counts
# Task name -> for each seed, the rows of `TableScorer.score` for its model, None if it diverged.
ScoresByTask = Mapping[str, Sequence[Sequence[Mapping[str, Any]] | None]]


def count_corpus(documents: Sequence[str], served: ServedDomain) -> Counted:
    """Count the n-grams of a corpus as `build plot` does if the domain is a root, else as `build domain` does."""
    with progress_bars() as progress:
        if len(served.lineage) > 1:
            return prepare_corpus(documents, served.base, 0, 0, bar_report(progress, "corpus")).grams
        return count_grams(documents, served.base, progress)


def table_rows(scores: ScoresByTask, tree: VersionTree, percents: Sequence[float]) -> list[Row]:
    """Return a row for each task, size and way to answer misses, and the averages over tasks: mean and spread over seeds.

    An average is over the seeds that diverged on no task.
    """
    places = range(len(percents) * len(MISSES))

    def mean(models: list[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        return [_mean([model[place] for model in models]) for place in places]

    return [
        _row(name, [model[place] for model in models], tree)
        for name, models in with_average(scores, mean)
        for place in places
    ]


def _mean(uses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    means = {key: float(np.mean([use[key] for use in uses])) for key in ("hit_rate", "own_hit_rate", "test")}
    return {**uses[0], **means}


def _row(task: str, uses: Sequence[Mapping[str, Any]], tree: VersionTree) -> Row:
    first = uses[0]
    return {
        "task": task,
        "top_percent": first["percent"],
        "miss": first["miss"],
        **{key: value for key, value in asdict(tree.size(first["percent"])).items() if key != "percent"},
        "hit_rate": first["hit_rate"],
        "own_hit_rate": first["own_hit_rate"],
        **mean_and_spread("test", [use["test"] for use in uses]),
        "test_by_seed": [round(use["test"], 4) for use in uses],
    }


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """Return the goals: the largest table below 1.5 GB at BERT-base's width loses no more than seeds differ."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    # The average row is missing if each seed diverged on some task.
    over = tasks[0] if len(tasks) == 1 else AVERAGE
    goals = []
    for miss in MISSES:
        by_percent = {row["top_percent"]: row for row in rows if row["task"] == over and row.get("miss") == miss}
        small = [p for p, row in by_percent.items() if 0 < p < 100 and row["bert_base_gigabytes"] < SMALL_GIGABYTES]
        whole = by_percent.get(100.0)
        if not small or whole is None or "spread" not in whole:
            continue
        lost = 100 * (whole["test"] - by_percent[max(small)]["test"])
        text = f"points that the top {max(small):g} % lose against all n-grams ({miss}), where seeds differ by as many"
        goals.append(Goal(f"small-table-{miss}", text, 100 * whole["spread"], lost, "points", "lower"))
    return goals


def score_published(
    served: ServedDomain, names: Sequence[str], tasks: Sequence[EvalTask], limits: Budget, scorer: TableScorer
) -> dict[str, list[list[dict[str, Any]]]]:
    """Score published tenants of a domain, each on the task at its place. Raises UnknownTenantError, ConfigError."""
    store, base, domain, version = served.store, served.base, served.domain, served.lineage[0]
    if len(names) != len(tasks):
        raise ConfigError(
            f"{len(names)} --tenant for {len(tasks)} tasks: give one for each task, in the order of the tasks"
        )
    scores: dict[str, list[list[dict[str, Any]]]] = {}
    for name, task in zip(names, tasks, strict=True):
        listed = published(store, name, base.config.name)
        if listed is None:
            raise UnknownTenantError(f"there is no tenant {name!r} over base {base.config.name!r}")
        if listed.domain != domain:
            raise ConfigError(f"tenant {name!r} belongs to domain {listed.domain!r}: give that domain with --domain")
        tenant = load_version(store, listed.current, base)
        card = tenant.card
        # The card of a tenant on a root names no version, because roots have none.
        if card.about.get("domain", version) != version:
            raise ConfigError(
                f"tenant {name!r} belongs to an earlier version of domain {domain!r}: update the tenant first"
            )
        if set(card.labels) != set(task.data.labels):
            raise ConfigError(
                f"tenant {name!r} does not have the labels of task {task.name}: give the tenants in the order of the tasks"
            )
        # The rows of the head are in the order of the tenant's labels.
        data = replace(task.sample(limits, 0), labels=card.labels)
        make_body = adapter_body(base.load_upper(), REDUCTION_FACTOR, tenant.adapter, scorer.device, card.adapter_at)
        body = make_body().to(scorer.device)
        scores[task.name] = [scorer.score(task, data, body, tenant.head, card.pooling)]
    return scores


@eval_command
def tables_accuracy(
    shared: EvalOptions,
    domain: Annotated[str, typer.Option(help="PLOT or domain whose own table gets the sizes of --top.")] = PLOT,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Source or file of its corpus; repeat for more. Default: the corpus of the demo's PLOT."),
    ] = None,
    top: Annotated[
        list[float] | None,
        typer.Option(min=0, max=100, help="Percentage of n-grams to keep; 0: no table of its own; repeat for more."),
    ] = None,
    tenant: Annotated[
        list[str] | None, typer.Option(help="Score published tenants, one for each task in order, instead of training.")
    ] = None,
    base: BaseOption = DEFAULT_BASE,
) -> None:
    """Compare tables of several sizes by accuracy, bytes and hit rate, with misses computed or backed off (HMI Table 5).

    Models are trained once, over the domain as it is served with misses computed. Then every table scores them. Examples:

      hplm eval tables-accuracy --root data --resume runs-tables --json tables-accuracy.json

      hplm eval tables-accuracy --data data/chemprot --domain biology --text abstracts.txt --top 0 --top 1 --top 100

      hplm eval tables-accuracy --data data/chemprot --tenant chemprot
    """
    training_options = (shared.resume, shared.dry_run, shared.seed, shared.epochs, shared.examples, shared.pooling)
    if tenant and any(training_options):
        raise ConfigError(
            "--tenant scores tenants that are trained already: leave out --resume, --dry-run, --seed, --epochs, --examples and "
            "--pooling"
        )
    tasks, limits, device = shared.read()
    served = shared.served(base, domain)
    is_root = len(served.lineage) == 1
    percents = sorted(set(top or (*PERCENTS, *([] if is_root else [0.0]))))
    if is_root and 0 in percents:
        raise ConfigError(f"--top 0 uses only the tables of the parents, but {domain!r} is a root: leave --top 0 out")
    if text is None and not (is_root and domain == PLOT):
        raise ConfigError(f"give the corpus of domain {domain!r} with --text")
    sources = text or list(PLOT_SOURCES[:1] if shared.quick else PLOT_SOURCES)
    # `build plot` and `build domain` read sources in different ways.
    read = read_to_count if is_root else read_source
    all_documents = [text for source in sources for text in read(source)]
    documents = without_test_texts(all_documents, tasks)
    counted = count_corpus(documents[: QUICK_DOCUMENTS if shared.quick else None], served)
    tree = VersionTree(served.store, served.base, served.lineage, counted)
    settings = {
        "base": base,
        "domain": domain,
        "text": sources,
        "tokens": int(counted.counts.sum()),
        "distinct": len(counted.grams),
        "left_out_documents": len(all_documents) - len(documents),
        "top_percents": percents,
    }
    with tempfile.TemporaryDirectory(prefix="hplm-eval-") as folder:
        scorer = TableScorer(tree, percents, Path(folder), shared.pooled, device)
        if tenant:
            scores: ScoresByTask = score_published(served, tenant, tasks, limits, scorer)
            settings |= {"tenants": tenant, "budget": asdict(limits)}
        else:
            corpus = {key: settings[key] for key in ("tokens", "distinct", "top_percents")}
            variant = replace(
                served.adapter_variant("hbert", device, **corpus),
                measure_more=scorer.score_trained,
                extra_predictions=len(percents) * len(MISSES),
            )
            study, best = shared.run(tasks, [variant], limits, device)
            scores = measurements_by_task("tables", study, best)
            settings = study_settings(study, best, settings)
        rows = table_rows(scores, tree, percents)
    Report("tables-accuracy", settings, rows, goals_of(rows)).publish(shared.json_file)
