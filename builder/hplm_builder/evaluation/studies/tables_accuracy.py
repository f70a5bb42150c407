"""`hplm eval tables-accuracy`: what a table's size and the way of its misses cost (HMI Table 5 and beyond)."""

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
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.reporting.benchmark_result import Goal, Report
from hplm.reporting.progress import bar_report, progress_bars
from hplm.store.layout import Store
from hplm_builder.cli.options import BaseOption
from hplm_builder.convert.base import DEFAULT_BASE
from hplm_builder.convert.mixture import read_source, read_to_count
from hplm_builder.domains.domain_corpus import prepare_corpus
from hplm_builder.evaluation.search.budget import Budget
from hplm_builder.evaluation.search.eval_options import EvalOptions, eval_command, study_settings
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.summary import AVERAGE, Row, Spread, complete_seeds, measurements_by_task
from hplm_builder.evaluation.search.variants import RATES, ServedDomain, Variant, hbert_body, with_adapters
from hplm_builder.evaluation.studies.table_scorer import MISSES, TableScorer
from hplm_builder.evaluation.studies.task_corpora import without_test_texts
from hplm_builder.export.register import published
from hplm_builder.fleet.demo import PLOT, PLOT_SOURCES
from hplm_builder.tables.plot_tables import Counted, count_grams
from hplm_builder.tables.pruned_tables import VersionTree
from hplm_builder.tenants.bodies import adapter_body
from hplm_builder.tenants.tenant_build import load_version

PERCENTS = (0.1, 1.0, 10.0, 100.0)
SMALL_GIGABYTES = 1.5
QUICK_DOCUMENTS = 2_000
# By the name of a task, what `TableScorer.judge` gave of the model of each seed, None of one that diverged.
Judged = Mapping[str, Sequence[Sequence[Mapping[str, Any]] | None]]


def count_corpus(documents: Sequence[str], served: ServedDomain) -> Counted:
    """The n-grams of a corpus, as what the domain is made with counts them: a root `build plot`, others `build domain`."""
    with progress_bars() as progress:
        if len(served.lineage) > 1:
            return prepare_corpus(documents, served.base, 0, 0, bar_report(progress, "corpus")).grams
        return count_grams(documents, served.base, progress)


def table_rows(judged: Judged, tree: VersionTree, percents: Sequence[float]) -> list[Row]:
    """A row for each task, size and way of a miss, and their averages over tasks: mean and spread over the models.

    An average is taken of each seed that no task lacks.
    """
    places = range(len(percents) * len(MISSES))
    rows = [
        _row(task, [model[place] for model in found], tree)
        for task, models in judged.items()
        if (found := [one for one in models if one is not None])
        for place in places
    ]
    if len(judged) > 1:
        whole = complete_seeds(judged)
        for place in places if whole else ():
            rows.append(_row(AVERAGE, [_mean([model[place] for model in of_seed]) for of_seed in whole], tree))
    return rows


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
        **Spread.of([use["test"] for use in uses]).columns("test"),
        "test_by_seed": [round(use["test"], 4) for use in uses],
    }


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """Whether the largest table below 1.5 GB at BERT-base's width loses more than seeds differ, against all n-grams."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    # There is no average where each seed diverged on some task.
    over = tasks[0] if len(tasks) == 1 else AVERAGE
    goals = []
    for miss in MISSES:
        last = {row["top_percent"]: row for row in rows if row["task"] == over and row.get("miss") == miss}
        small = [p for p, row in last.items() if 0 < p < 100 and row["bert_base_gigabytes"] < SMALL_GIGABYTES]
        whole = last.get(100.0)
        if not small or whole is None or "spread" not in whole:
            continue
        lost = 100 * (whole["test"] - last[max(small)]["test"])
        text = f"points that the top {max(small):g} % lose against all n-grams ({miss}), where seeds differ by as many"
        goals.append(Goal(f"small-table-{miss}", text, 100 * whole["spread"], lost, "points", "lower"))
    return goals


def score_published(
    store: Store,
    base: Base,
    domain: str,
    version: str,
    names: Sequence[str],
    tasks: Sequence[EvalTask],
    limits: Budget,
    judge: TableScorer,
) -> dict[str, list[list[dict[str, Any]]]]:
    """Tenants over a version of `domain`, a folder, as they are served, each on the task in its place.

    Raises UnknownTenantError, ConfigError.
    """
    if len(names) != len(tasks):
        raise ConfigError(f"{len(names)} --tenant for {len(tasks)} tasks: give each task's, in the order of the tasks")
    judged: dict[str, list[list[dict[str, Any]]]] = {}
    for name, task in zip(names, tasks, strict=True):
        found = published(store, name)
        if found is None:
            raise UnknownTenantError(f"there is no tenant {name!r}")
        if found.domain != domain:
            raise ConfigError(f"tenant {name!r} stands on domain {found.domain!r}: give that with --domain")
        made = load_version(store, found.current, base)
        # One that `hplm build` made stands on a root, which has no versions.
        if made.card.about.get("domain", version) != version:
            raise ConfigError(
                f"tenant {name!r} stands on an earlier version of domain {domain!r}: update the tenant first"
            )
        if set(made.card.labels) != set(task.data.labels):
            raise ConfigError(f"tenant {name!r} has not the labels of task {task.name}: give the tenants in its order")
        # Its head's rows are in the order of its own labels.
        data = replace(task.sample(limits, 0), labels=made.card.labels)
        make_body = adapter_body(base.load_upper(), REDUCTION_FACTOR, made.adapter, judge.device, made.card.adapter_at)
        body = make_body().to(judge.device)
        judged[task.name] = [judge.judge(task, data, body, made.head, made.card.pooling)]
    return judged


@eval_command
def tables_accuracy(
    shared: EvalOptions,
    domain: Annotated[str, typer.Option(help="PLOT or domain whose own table has these sizes.")] = PLOT,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Its corpus: source or file; repeat for more. Default: that of the demo's PLOT."),
    ] = None,
    top: Annotated[
        list[float] | None, typer.Option(min=0, max=100, help="Percentages; 0: no table of its own; repeat for more.")
    ] = None,
    tenant: Annotated[
        list[str] | None, typer.Option(help="Judge published tenants, one a task in order, instead of training.")
    ] = None,
    base: BaseOption = DEFAULT_BASE,
) -> None:
    """HMI Table 5 and beyond: accuracy, bytes and hit rate of tables of several sizes, misses computed or backed off.

    Models are trained once, over the domain as it is served with misses computed, and judged with every table. Examples:

      hplm eval tables-accuracy --root data --resume runs-tables --json tables-accuracy.json

      hplm eval tables-accuracy --data data/chemprot --domain biology --text abstracts.txt --top 0 --top 1 --top 100

      hplm eval tables-accuracy --data data/chemprot --tenant chemprot
    """
    of_training = (shared.resume, shared.dry_run, shared.seed, shared.epochs, shared.examples, shared.pooling)
    if tenant and any(of_training):
        raise ConfigError(
            "--tenant judges what is trained, heads that read what they were trained on: leave --resume, --dry-run, "
            "--seed, --epochs, --examples and --pooling out"
        )
    tasks, limits, where = shared.read()
    target = Store.at(shared.store)
    found_base = bases.load(target.base(base))
    served = ServedDomain(target, found_base, domain)
    percents = sorted(set(top or (*PERCENTS, *([0.0] if len(served.lineage) > 1 else []))))
    if len(served.lineage) == 1 and 0 in percents:
        raise ConfigError(f"--top 0 asks for the tables above {domain!r}, which is a root")
    if text is None and (len(served.lineage) > 1 or domain != PLOT):
        raise ConfigError(f"--text: give the corpus that domain {domain!r} was made of")
    sources = text or list(PLOT_SOURCES[:1] if shared.quick else PLOT_SOURCES)
    # As `build plot` reads them, or `build domain`.
    reading = read_to_count if len(served.lineage) == 1 else read_source
    read = [text for source in sources for text in reading(source)]
    documents = without_test_texts(read, tasks)
    counted = count_corpus(documents[: QUICK_DOCUMENTS if shared.quick else None], served)
    tree = VersionTree(target, found_base, served.lineage, counted)
    settings = {
        "base": base,
        "domain": domain,
        "text": sources,
        "tokens": int(counted.counts.sum()),
        "distinct": len(counted.grams),
        "left_out_documents": len(read) - len(documents),
        "top_percents": percents,
    }
    with tempfile.TemporaryDirectory(prefix="hplm-eval-") as folder:
        judge = TableScorer(tree, percents, Path(folder), shared.pooled, where)
        if tenant:
            judged: Judged = score_published(
                target, found_base, domain, str(served.lineage[0]), tenant, tasks, limits, judge
            )
            settings |= {"tenants": tenant, "budget": asdict(limits)}
        else:
            variant = Variant(
                "hbert",
                found_base,
                served.source,
                hbert_body(found_base, where),
                RATES["hbert"],
                with_adapters(
                    lambda task: {
                        **served.about(),
                        **{key: settings[key] for key in ("tokens", "distinct", "top_percents")},
                    }
                ),
                judge.score_trained,
                more_tests=len(percents) * len(MISSES),
            )
            study, found = shared.run(tasks, [variant], limits, where)
            judged = measurements_by_task("tables", study, found)
            settings = study_settings(study, found, settings)
        rows = table_rows(judged, tree, percents)
    Report("tables-accuracy", settings, rows, goals_of(rows)).publish(shared.json_file)
