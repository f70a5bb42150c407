"""The jobs that create and update tenants."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from hplm.adapters import tenant as tenants
from hplm.adapters.packed import packed_width
from hplm.adapters.tenant import Tenant, TenantCard
from hplm.core.columns import Columns
from hplm.core.settings import REDUCTION_FACTOR, Miss
from hplm.engine.open_domain import OpenDomain, open_lineage
from hplm.errors import AlreadyThereError, BadManageRequestError, ConflictError, DataError, UnknownTenantError
from hplm.manage.job_inputs import locate
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.registry.records import DomainVersion, Job, TenantVersion
from hplm.registry.registry import Registry
from hplm.reporting.progress import shared_out
from hplm.runtime.crash_points import crash_point
from hplm.store.layout import Store
from hplm.tasks.task_loader import task_named
from hplm_builder.data.data_warnings import data_warnings
from hplm_builder.data.labelled import LabelledData, LabelledFile
from hplm_builder.data.labelled_files import read_data
from hplm_builder.export.register import told_of
from hplm_builder.jobs.job_context import Bench, made_by, publish, retire_old, without_paths
from hplm_builder.tenants.finetune import TrainSettings
from hplm_builder.tenants.tenant_build import estimate_fine_tune, load_version, train_tenant

# Each step's share of the job: texts through the tables, then the epochs; and where there are unlabelled texts.
SHARES = {"features": 0.25, "fine-tune": 0.75}
SHARES_WITH_TEACHER = {"features": 0.1, "unlabelled": 0.1, "teacher": 0.2, "label": 0.1, "fine-tune": 0.5}


def make_tenant(job: Job, bench: Bench) -> dict[str, Any]:
    """Create or update a tenant. An update that makes it no better publishes nothing."""
    request, registry = job.request, bench.registry
    name = request["tenant"]
    if (made := made_by(job, _versions(registry, name))) is not None:
        return _result(made)
    registry.check_next_number(name, lambda n: bench.store.tenant_version(name, n))
    task = _Task.read(job, bench)
    trained = train_tenant(
        task.base,
        task.lookup(bench.store),
        name,
        task.data,
        task.settings,
        shared_out(bench.report, SHARES_WITH_TEACHER if task.data.unlabelled else SHARES),
        start=task.start,
    )
    crash_point("job.trained")
    if task.current is not None and task.keeps(trained):
        return _unchanged(job, bench, task.current, trained)
    number = bench.report.insist(lambda: registry.next_number(name, lambda n: bench.store.tenant_version(name, n)))
    card = replace(trained.card, about={**trained.card.about, "job": job.id, "domain": task.lineage[0].path})
    folder = bench.store.tenant_version(name, number)
    bench.report("publish", 1.0)
    tenants.save(folder, replace(trained, card=card))
    made = publish(
        bench,
        folder,
        lambda path: registry.publish_tenant(
            name,
            task.lineage[0].id,
            path,
            bench.clock(),
            about=told_of(card),
            number=number,
            expected=task.current.number if task.current else None,
        ),
        lambda: made_by(job, _versions(registry, name)),
        job=job,
    )
    return _result(made)


def plan_tenant(job: Job, bench: Bench) -> dict[str, Any]:
    """What `make_tenant` would cost, measured on a few examples; the files are checked as they would be."""
    task = _Task.read(job, bench)
    bench.report("measure", 0.5)
    warnings = data_warnings(task.data, task.base.load_text_encoder())
    return {
        "examples": task.data.counts,
        "labels": list(task.data.labels),
        "task": task.data.task,
        "estimated_s": estimate_fine_tune(
            task.data, task.settings, task.base, task.lookup(bench.store), start=task.start
        ),
        "bytes": _bytes(task),
        **({"warnings": warnings} if warnings else {}),
    }


@dataclass(frozen=True)
class _Task:
    """A tenant's job with its files read and checked; `current` and `start` are of an update."""

    base: Base
    lineage: list[DomainVersion]
    current: TenantVersion | None
    start: Tenant | None
    data: LabelledData
    settings: TrainSettings
    miss: Miss

    @classmethod
    def read(cls, job: Job, bench: Bench) -> _Task:
        """Raises AlreadyThereError, UnknownTenantError, UnknownDomainError, DataError and what `locate` raises."""
        request, registry = job.request, bench.registry
        name = request["tenant"]
        bench.report("read", 0.0)
        current, start, domain = None, None, request["domain"]
        base = bases.load(bench.store.base(request["base"]))
        if job.kind == "tenant.update":
            record = registry.tenant(name)
            current = record.current
            if request.get("stays"):
                # Since it was asked for, another update or a roll back may have moved the tenant.
                domain = record.domain
            advice = "roll back to another, or delete the tenant and create it again"
            with without_paths(bench.store, f"version {current.number} of the tenant cannot be used: {advice}"):
                start = load_version(bench.store, current, base)
        elif registry.find_tenant(name) is not None:
            raise AlreadyThereError(
                f"tenant {name!r} exists already: tenant.update (`hplm tenant update`) makes its next version"
            )
        lineage = registry.lineage(registry.current_domain(request["base"], domain).id)
        settings = _settings(request, start.card if start else None)
        paths = {part: locate(source, bench.uploads) for part, source in request["data"].items()}
        most_bytes = request.get("most_data_bytes", math.inf)
        data = read_data(
            # Errors are for whoever sent the file: they name it, not where it lies here.
            # One named by its path may have grown since the request; jobs from before were queued without the bound.
            **{part: LabelledFile(path, path.name, most_bytes) for part, path in paths.items()},
            task=start.card.task if start else request["task"],
            expected_labels=start.card.labels if start else None,
            seed=settings.seed,
            # Jobs from before were queued without.
            columns=Columns(**request.get("columns", {})),
        )
        if start and data.texts != start.card.texts:
            raise DataError(f"the tenant was trained on {_texts(start.card.texts)}, the data has {_texts(data.texts)}")
        # Jobs from before were queued without these two, and trained so.
        miss, factor = request.get("miss", "compute"), request.get("reduction_factor", REDUCTION_FACTOR)
        settings = replace(settings, reduction_factor=task_named(data.task).reduction_factor(factor))
        return cls(base, lineage, current, start, data, settings, miss)

    def keeps(self, trained: Tenant) -> bool:
        """Whether an update has come to nothing: dev got no better than with the version before, which goes on.

        Over another version of it, and for a tagging from before it had transitions, it is another model all the same.
        """
        if self.start is None or self.current is None:
            return False
        is_here = self.current.domain_version_id == self.lineage[0].id
        is_alike = trained.card.transitions == self.start.card.transitions
        return is_here and is_alike and trained.card.about["best_epoch"] == 0

    def lookup(self, store: Store) -> OpenDomain:
        return open_lineage(store, self.base, [version.path for version in self.lineage], miss=self.miss)


def _settings(request: dict[str, Any], known: TenantCard | None) -> TrainSettings:
    """Of the request; with `known`, the card of the version that an update goes on from, what its head was made for stays."""
    given = dict(request["settings"])
    if "learning_rates" in given:
        given["learning_rates"] = tuple(given["learning_rates"])
    if known is not None:
        for key, asked, fixed in (
            ("task", request["task"], known.task),
            ("pooling", given.get("pooling"), known.pooling),
        ):
            if asked not in (None, fixed):
                raise BadManageRequestError(f"the tenant's {key} is {fixed}, an update cannot make it {asked}")
        given["pooling"] = known.pooling
        # By which dev data are split off: others would be some that the version before has trained on.
        given.setdefault("seed", known.about.get("seed", 0))
    return TrainSettings(**given)


def _versions(registry: Registry, name: str) -> list[TenantVersion]:
    try:
        return registry.tenant_versions(name)
    except UnknownTenantError:
        return []


def _result(version: TenantVersion) -> dict[str, Any]:
    """As it is told of a job that published it."""
    return {"tenant": version.tenant, "version": version.number, "published": True, **_told(version.about)}


def _told(about: dict[str, Any]) -> dict[str, Any]:
    """What a result has of a version's `about`."""
    warnings = {"warnings": about["warnings"]} if "warnings" in about else {}
    return {
        "task": about["task"],
        "num_labels": len(about["labels"]),
        "scores": about.get("scores", {}),
        **warnings,
    }


def _unchanged(job: Job, bench: Bench, current: TenantVersion, trained: Tenant) -> dict[str, Any]:
    """The result of an update that keeps the version before: `scores` are that one's, on the data of now.

    A version of the same weights would push one that differs out of those to go back to. Raises ConflictError where another is
    served by now, and what `JobReport.held` raises.
    """

    def still_served() -> int:
        bench.report.held()
        return bench.registry.tenant(current.tenant).current.number

    if (number := bench.report.insist(still_served)) != current.number:
        raise ConflictError(
            f"tenant {current.tenant!r} is at version {number}, not {current.number}: it was changed meanwhile, look again"
        )
    retire_old(bench, job)
    about, metric = told_of(trained.card), task_named(trained.card.task).metric
    why = "training diverged, choose a lower learning rate"
    if found := [row["dev"] for row in about["curve"] if math.isfinite(row["dev"])]:
        why = f"no better on dev ({metric} {about['scores'][f'dev_{metric}']:.3f}, now {max(found):.3f})"
    return {
        "tenant": current.tenant,
        "version": current.number,
        "published": False,
        "why": f"{why}: version {current.number} stays",
        **_told(about),
    }


def _bytes(task: _Task) -> int:
    """Of a tenant's weights on disk, in float32: adapters, head, a tagging's transitions. An update keeps their shapes."""
    config, start, labels = task.base.config, task.start, len(task.data.labels)
    hidden = config.hidden_size
    reduced = start.packed.reduced_size if start else config.reduced_size(task.settings.reduction_factor)
    kind = task_named(task.data.task)
    head = (start.card.word_window if start else kind.new_word_window) * labels * (hidden + 1)
    transitions = (1 + labels) * labels if kind.has_transitions else 0
    return 4 * (config.upper_layers * packed_width(hidden, reduced) + head + transitions)


def _texts(count: int) -> str:
    return "single texts" if count == 1 else "pairs of texts"
