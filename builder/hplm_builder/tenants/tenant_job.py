"""The handlers of jobs that create and update tenants."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from hplm.adapters import tenant as tenants
from hplm.adapters.packed import packed_width
from hplm.adapters.tenant import Tenant, TenantCard
from hplm.core.columns import Columns
from hplm.core.settings import Miss
from hplm.engine.open_domain import Domain, open_features
from hplm.errors import AlreadyThereError, BadManageRequestError, ConflictError, DataError, UnknownTenantError
from hplm.jobs.context import JobContext, hide_store_paths, publish, retire_old, version_of_job
from hplm.manage.job_inputs import locate
from hplm.manage.uploads import Uploads
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.registry.records import DomainVersion, Job, TenantVersion
from hplm.registry.registry import Registry
from hplm.reporting.progress import Report, shared_out
from hplm.runtime.crash_points import crash_point
from hplm.store.layout import Store
from hplm.tasks.task_loader import task_named
from hplm_builder.data.data_warnings import data_warnings
from hplm_builder.data.labelled import LabelledData, LabelledFile
from hplm_builder.data.labelled_files import read_data
from hplm_builder.export.register import registered_about
from hplm_builder.tenants.finetune import TrainSettings
from hplm_builder.tenants.tenant_build import estimate_fine_tune, load_version, train_tenant
from hplm_builder.tenants.widths import factors_to_train, width_name

NO_WIDER = "the server's adapter slots hold no wider adapter"
# The share of the job that each step takes, without and with unlabelled texts.
SHARES = {"features": 0.25, "fine-tune": 0.7, "baseline": 0.05}
SHARES_WITH_TEACHER = {
    "features": 0.1,
    "unlabelled": 0.1,
    "teacher": 0.2,
    "label": 0.1,
    "fine-tune": 0.47,
    "baseline": 0.03,
}


def make_tenant(job: Job, context: JobContext, data: LabelledData | None = None) -> dict[str, Any]:
    """Create or update a tenant, from `data` or else from the files of the request.

    An update that makes the tenant no better publishes nothing, unless it trains `from_scratch` or is to publish anyway.
    """
    request, registry = job.request, context.registry
    name = request["tenant"]
    if (made := version_of_job(job, kept_versions(registry, name))) is not None:
        return result_of(made)
    registry.check_next_number(name, lambda n: context.store.tenant_version(name, n))
    task = TenantTask.read(job, context, data)
    trained = task.train(job, context.store, context.lease.report)
    crash_point("job.trained")
    if task.current is not None and task.keeps(trained):
        return unchanged(job, context, task.current, trained.card, _why(trained))
    return publish_version(
        job, context, task, replace(trained, card=replace(trained.card, about=task.about(job, trained)))
    )


def publish_version(job: Job, context: JobContext, task: TenantTask, trained: Tenant) -> dict[str, Any]:
    """Write and register the version that a job has trained; return the job's result. The card's `about` is complete."""
    registry, name = context.registry, job.request["tenant"]
    number = context.lease.retry(lambda: registry.next_number(name, lambda n: context.store.tenant_version(name, n)))
    folder = context.store.tenant_version(name, number)
    context.lease.report("publish", 1.0)
    tenants.save(folder, trained)
    made = publish(
        context,
        folder,
        lambda path: registry.publish_tenant(
            name,
            task.lineage[0].id,
            path,
            context.clock(),
            about=registered_about(trained.card),
            number=number,
            expected=task.current.number if task.current else None,
        ),
        lambda: version_of_job(job, kept_versions(registry, name)),
        job=job,
    )
    return result_of(made)


def plan_tenant(job: Job, context: JobContext) -> dict[str, Any]:
    """Return what `make_tenant` would cost, measured on a few examples. The files are checked in the same way."""
    task = TenantTask.read(job, context)
    context.lease.report("measure", 0.5)
    warnings = data_warnings(task.data, task.base.load_text_encoder())
    return {
        "examples": task.data.counts,
        "labels": list(task.data.labels),
        "task": task.data.task,
        "estimated_s": task.estimate_s(context.store),
        "adapter_widths": [width_name(factor) for factor in task.factors],
        "bytes": task.weight_bytes,
        **({"warnings": warnings} if warnings else {}),
    }


@dataclass(frozen=True)
class TenantTask:
    """The training of a tenant over one base, with its data read and checked.

    `current` is the version that an update replaces, `start` the same version with its weights, to train on from. `factors` are
    the reduction factors among which dev chooses; `width_why` says why there is no choice if one was asked for, else "".
    """

    base: Base
    lineage: list[DomainVersion]
    current: TenantVersion | None
    start: Tenant | None
    data: LabelledData
    settings: TrainSettings
    factors: tuple[int, ...]
    width_why: str
    miss: Miss

    @classmethod
    def read(cls, job: Job, context: JobContext, data: LabelledData | None = None) -> TenantTask:
        """Read and check what the job starts from.

        Raises AlreadyThereError, UnknownTenantError, UnknownDomainError, DataError and what `locate` raises."""
        request, registry = job.request, context.registry
        name = request["tenant"]
        context.lease.report("read", 0.0)
        current, start, domain = None, None, request["domain"]
        base = bases.load(context.store.base(request["base"]))
        if job.kind == "tenant.update":
            record = registry.tenant(name, request["base"])
            current = record.current
            if request.get("stays"):
                # Another update or a rollback may have moved the tenant since the request.
                domain = record.domain
            if not request.get("from_scratch"):
                advice = "roll back to another, or delete the tenant and create it again"
                with hide_store_paths(
                    context.store, f"version {current.number} of the tenant cannot be used: {advice}"
                ):
                    start = load_version(context.store, current, base)
        elif registry.find_tenant(name, request["base"]) is not None:
            raise AlreadyThereError(
                f"tenant {name!r} exists already: tenant.update (`hplm tenant update`) makes its next version"
            )
        lineage = registry.lineage(registry.current_domain(request["base"], domain).id)
        settings = _settings(request, start)
        if data is None:
            data = read_files(job, context, start.card if start else None, settings.seed)
        if start:
            check_texts(data, start.card)
        factors: tuple[int, ...] = (settings.reduction_factor,)
        why = ""
        if start is None and "reduction_factor" not in request["settings"]:
            width = request["settings"].get("adapter_width", "auto")
            factors = factors_to_train(task_named(data.task), width, request["reduction_factor"])
            why = NO_WIDER if width == "auto" and len(factors) == 1 else ""
        return cls(base, lineage, current, start, data, settings, factors, why, request["miss"])

    def train(self, job: Job, store: Store, report: Report) -> Tenant:
        """Train the tenant. The steps of `report` share 0 to 1. Raises what `train_tenant` raises."""
        return train_tenant(
            self.base,
            self.lookup(store),
            job.request["tenant"],
            self.data,
            self.settings,
            shared_out(report, SHARES_WITH_TEACHER if self.data.unlabelled else SHARES),
            example=job.request.get("example", ""),
            start=self.start,
            factors=self.factors,
        )

    def about(self, job: Job, trained: Tenant) -> dict[str, Any]:
        """Return the card's `about` of the version that the job publishes."""
        why = {"width_why": self.width_why} if self.width_why else {}
        return {**trained.card.about, "job": job.id, "domain": self.lineage[0].path, **why}

    def estimate_s(self, store: Store) -> float:
        """Return the seconds that `train` would take on this machine now."""
        return estimate_fine_tune(
            self.data, self.settings, self.base, self.lookup(store), start=self.start, factors=self.factors
        )

    @property
    def weight_bytes(self) -> int:
        """The bytes of the tenant's weights on disk, in float32, with the widest adapter that dev may choose.

        An update keeps the shapes of the weights.
        """
        config, start, labels = self.base.config, self.start, len(self.data.labels)
        hidden = config.hidden_size
        reduced = start.packed.reduced_size if start else config.reduced_size(min(self.factors))
        kind = task_named(self.data.task)
        head = (start.card.word_window if start else kind.new_word_window) * labels * (hidden + 1)
        transitions = (1 + labels) * labels if kind.has_transitions else 0
        return 4 * (config.adapted_layers * packed_width(hidden, reduced) + head + transitions)

    def keeps(self, trained: Tenant) -> bool:
        """Return whether an update made the tenant no better on dev, so that the current version stays.

        Over another version of the domain the trained tenant is another model, and replaces the current one.
        """
        if self.start is None or self.current is None:
            return False
        is_here = self.current.domain_version_id == self.lineage[0].id
        return is_here and trained.card.about["best_epoch"] == 0

    def lookup(self, store: Store) -> Domain:
        return open_features(store, self.base, [version.path for version in self.lineage], miss=self.miss)


def read_files(
    job: Job, context: JobContext, known: TenantCard | None, seed: int, proves: bool = False
) -> LabelledData:
    """Read and check the files of a job's request; labels and task are those of the card of a `known` version.

    With `proves`, the file of the proof stands in the place of the test data. Raises DataError and what `locate` raises.
    """
    request, uploads = job.request, Uploads(context.store, context.registry)
    sources = {part: source for part, source in request["data"].items() if part != "proof"}
    if proves:
        sources |= {"test": request["data"]["proof"]}
    paths = {part: locate(source, uploads) for part, source in sources.items()}
    return read_data(
        # Errors are for the sender of the file: they name the file, not its place on this machine.
        # A file that was named by its path may have grown since the request.
        **{part: LabelledFile(path, path.name, request["most_data_bytes"]) for part, path in paths.items()},
        task=known.task if known else request["task"],
        expected_labels=known.labels if known else None,
        seed=seed,
        columns=Columns(**request["columns"]),
        test_name="proof" if proves else "test",
    )


def check_texts(data: LabelledData, known: TenantCard) -> None:
    """Raise DataError if data have single texts and the known version of the tenant pairs, or the reverse."""
    if data.texts != known.texts:
        raise DataError(f"the tenant was trained on {_texts(known.texts)}, the data has {_texts(data.texts)}")


def _settings(request: dict[str, Any], start: Tenant | None) -> TrainSettings:
    """Return the settings of a request, without the width. An update from `start` keeps its task, pooling and width."""
    given = dict(request["settings"])
    width = given.pop("adapter_width", "auto")
    if "learning_rates" in given:
        given["learning_rates"] = tuple(given["learning_rates"])
    if start is not None:
        known, factor = start.card, max(1, start.packed.hidden_size // start.packed.reduced_size)
        for key, asked, fixed in (
            ("task", request["task"], known.task),
            ("pooling", given.get("pooling"), known.pooling),
            ("adapter width", None if width == "auto" else width, width_name(factor)),
        ):
            if asked not in (None, fixed):
                raise BadManageRequestError(f"the tenant's {key} is {fixed}, an update cannot make it {asked}")
        given |= {"pooling": known.pooling, "reduction_factor": factor}
        given["keeps_start"] = request.get("publish") != "anyway"
        # The seed splits off the dev data. Another seed would choose texts that the previous version has trained on.
        given.setdefault("seed", known.about.get("seed", 0))
    return TrainSettings(**given)


def kept_versions(registry: Registry, name: str) -> list[TenantVersion]:
    try:
        return registry.tenant_versions(name)
    except UnknownTenantError:
        return []


def result_of(version: TenantVersion) -> dict[str, Any]:
    """Return the result of a job that published a version."""
    return {"tenant": version.tenant, "version": version.number, "published": True, **shown(version.about)}


def shown(about: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a version's `about` that a job's result shows."""
    more = ("adapter_width", "width_scores", "width_why", "baseline_scores", "students", "warnings")
    return {
        "task": about["task"],
        "num_labels": len(about["labels"]),
        "scores": about.get("scores", {}),
        **{key: about[key] for key in more if key in about},
    }


def unchanged(job: Job, context: JobContext, current: TenantVersion, card: TenantCard, why: str) -> dict[str, Any]:
    """Return the result of an update that keeps the current version; the scores are those of `card`.

    Publishing the same weights again would retire an older version that differs. Raises ConflictError if another version
    is served by now, and what `JobLease.renew` raises.
    """

    def still_served() -> int:
        context.lease.renew()
        return context.registry.tenant(current.tenant, current.base).current.number

    if (number := context.lease.retry(still_served)) != current.number:
        raise ConflictError(
            f"tenant {current.tenant!r} is at version {number}, not {current.number}: it was changed meanwhile, look again"
        )
    retire_old(context, job)
    return {
        "tenant": current.tenant,
        "version": current.number,
        "published": False,
        "why": f"{why}: version {current.number} stays",
        **shown(registered_about(card)),
    }


def _why(trained: Tenant) -> str:
    """Return why an update did not make its tenant better."""
    about, metric = trained.card.about, task_named(trained.card.task).metric
    if found := [row["dev"] for row in about["curve"] if math.isfinite(row["dev"])]:
        compared = f"{metric} {about['scores'][f'dev_{metric}']:.3f}, now {max(found):.3f}"
        return f"no better on dev ({compared}; `--publish anyway` publishes it all the same)"
    return "training diverged, choose a lower learning rate"


def _texts(count: int) -> str:
    return "single texts" if count == 1 else "pairs of texts"
