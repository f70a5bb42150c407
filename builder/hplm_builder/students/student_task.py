"""The training of a tenant's students as a job's request asks for it, with its data read and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from hplm.adapters.packed import packed_width
from hplm.adapters.students import own_student_bytes
from hplm.adapters.tenant import Tenant, TenantCard
from hplm.core.settings import BaseConfig
from hplm.engine.open_domain import open_features
from hplm.errors import ConfigError
from hplm.jobs.context import JobContext, hide_store_paths
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.registry.records import Job, TenantRecord
from hplm.reporting.progress import Report, shared_out
from hplm.tasks.task_loader import task_named
from hplm_builder.data.labelled import LabelledData
from hplm_builder.students.student_build import (
    KeptStudents,
    build_students,
    check_form,
    estimate_students,
    keep_teacher,
    kept_teacher,
    run_of,
    work_of,
)
from hplm_builder.students.student_settings import StudentSettings
from hplm_builder.students.teacher import STEPS, Candidate, best_teacher, check_task, estimate_teacher
from hplm_builder.tenants.finetune import TrainSettings
from hplm_builder.tenants.prepared import mean_tokens
from hplm_builder.tenants.tenant_build import load_card, load_version
from hplm_builder.tenants.tenant_job import TenantTask, check_texts, read_files
from hplm_builder.tenants.widths import factors_to_train

AUTO, FULL = "auto", "full"
# The name of the part of a job in which the students are trained.
STUDENTS = "students"
# What a full fine-tuning of a base is called beside the base's name.
FULL_NAME = "full {base}"


@dataclass(frozen=True)
class StudentTask:
    """The training of students over one trunk. `over` is the tenant over the trunk, without a version to train on from.

    `asked` is the teacher that was asked for, see `hplm.manage.request_parts.StudentOptions`. `teachers` has the manager's
    settings of the bases that may teach, by name.
    """

    over: TenantTask
    settings: StudentSettings
    teacher_settings: TrainSettings
    asked: str
    teachers: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, job: Job, context: JobContext) -> StudentTask:
        """Read and check what the job starts from. Raises what `TenantTask.read` raises, and ConfigError."""
        request, registry, name = job.request, context.registry, job.request["tenant"]
        context.lease.report("read", 0.0)
        here = registry.find_tenant(name, request["base"])
        known = _known_card(context, here or registry.tenant(name)) if job.kind != "tenant.create" else None
        seed = request["settings"].get("seed", known.about.get("seed", 0) if known else 0)
        data = read_files(job, context, known, seed)
        check_task(data.task)
        if known is not None:
            check_texts(data, known)
        kind = "tenant.create" if job.kind == "tenant.create" or here is None else "tenant.update"
        given = {"seed": seed, **request["settings"]}
        plain = replace(job, kind=kind, request={**request, "from_scratch": True, "settings": given})
        over = TenantTask.read(plain, context, data)
        settings = student_settings(given, request["students"], data, request["reduction_factor"])
        check_form(over.base, settings)
        own = {key: value for key, value in given.items() if key in ("epochs", "patience", "pooling", "seed")}
        teacher_settings = TrainSettings(**own)
        return cls(over, settings, teacher_settings, request["students"].get("teacher", AUTO), request["teachers"])

    def train(self, job: Job, context: JobContext) -> Tenant:
        """Train the teacher if need be, then the students. What is finished is kept in the job's scratch folder."""
        candidates = self.candidates(job, context)
        parts = Parts(context.lease.report, self.costs(candidates))
        return train_students_over(self.over, self.settings, self.teacher_settings, candidates, job, context, parts)

    def about(self, job: Job, trained: Tenant) -> dict[str, Any]:
        """Return the card's `about` of the version that the job publishes."""
        return about_with_students(self.over.about(job, trained), job)

    def candidates(self, job: Job, context: JobContext) -> list[Candidate]:
        """Return the models among which dev chooses the teacher.

        With `auto`: the tenant's versions over other bases, or else a new adapter over the base that the trunk was made of;
        and full fine-tuning over one of these bases. Raises ConfigError if no base can teach, and ArtifactError.
        """
        registry, store, name = context.registry, context.store, job.request["tenant"]
        opened = {base: bases.load(store.base(base)) for base in self.teachers}
        found = {base: registry.find_tenant(name, base) for base in opened}
        trained = {base: record for base, record in found.items() if record is not None}
        if self.asked not in (AUTO, FULL):
            if self.asked not in opened:
                raise ConfigError(f"the server no longer serves base {self.asked!r}, which was to teach the students")
            return [self._adapter(context, opened[self.asked], trained.get(self.asked))]
        whose = self._teaching_base(opened, trained)
        full = self._candidate(context, opened[whose], FULL_NAME.format(base=whose), is_full=True)
        if self.asked == FULL:
            return [full]
        versions = [self._adapter(context, opened[base], record) for base, record in trained.items()]
        return [*(versions or [self._adapter(context, opened[whose], None)]), full]

    def costs(self, candidates: Sequence[Candidate]) -> dict[str, float]:
        """Return about what each part of the job costs, by name, see `costs_of`."""
        return costs_of(self.over, self.settings, self.teacher_settings, candidates)

    def estimate_s(self, job: Job, context: JobContext) -> float:
        """Return the seconds that `train` would take on this machine now, if nothing ends early."""
        over = self.over
        seconds = estimate_students(over.base, over.lookup(context.store), over.data, self.settings)
        for candidate in self.candidates(job, context):
            seconds += estimate_teacher(candidate, over.data, self.teacher_settings)
        return seconds

    @property
    def weight_bytes(self) -> int:
        """The bytes of the tenant's weights on disk, with as many students as there may be."""
        config, count = self.over.base.config, self.settings.most_students
        head = 4 * len(self.over.data.labels) * (config.hidden_size + 1)
        if self.settings.form == "own":
            return head + count * own_student_bytes(config.upper_layers, config.hidden_size, config.intermediate_size)
        reduced = config.reduced_size(self.settings.reduction_factor)
        return head + 4 * count * config.adapted_layers * packed_width(config.hidden_size, reduced)

    def _teaching_base(self, opened: Mapping[str, Base], trained: Mapping[str, TenantRecord]) -> str:
        """Return the base whose full fine-tuning may teach: the one that the trunk was made of, or else the largest."""
        usable = {base: opened[base] for base in trained} or dict(opened)
        if not usable:
            raise ConfigError("the server serves no base that could teach students any more")
        if self.over.base.trunk_of in usable:
            return str(self.over.base.trunk_of)
        return max(usable, key=lambda base: layer_cost(usable[base].config))

    def _adapter(self, context: JobContext, base: Base, record: TenantRecord | None) -> Candidate:
        """Return the tenant's version over a base as a candidate, or a new adapter there if the tenant has none."""
        if record is None:
            return self._candidate(context, base, base.config.name)
        registry, store, version = context.registry, context.store, record.current
        lineage = [one.path for one in registry.lineage(version.domain_version_id)]
        lookup = open_features(store, base, lineage, miss=self.teachers[base.config.name]["miss"])
        with hide_store_paths(store, f"version {version.number} of the tenant cannot be used: roll back to another"):
            tenant = load_version(store, version, base)
        if tenant.card.task != self.over.data.task or tenant.card.labels != self.over.data.labels:
            raise ConfigError(
                f"version {version.number} over {base.config.name!r} has other labels than the data, so it cannot teach"
            )
        return Candidate(base.config.name, base, lookup, tenant, number=version.number)

    def _candidate(self, context: JobContext, base: Base, name: str, *, is_full: bool = False) -> Candidate:
        """Return a model over the base's usual domain, which is trained to teach."""
        managed = self.teachers[base.config.name]
        current = context.registry.current_domain(base.config.name, managed["domain"])
        lineage = [one.path for one in context.registry.lineage(current.id)]
        lookup = open_features(context.store, base, lineage, miss=managed["miss"])
        factor = factors_to_train(task_named(self.over.data.task), "auto", managed["reduction_factor"])[0]
        return Candidate(name, base, lookup, None, is_full=is_full, reduction_factor=factor)


class Parts:
    """Shares the progress of a job out to its parts, by their costs."""

    def __init__(self, report: Report, costs: Mapping[str, float]) -> None:
        starts = accumulate(costs.values(), initial=0.0)
        self._report, self._whole = report, sum(costs.values())
        self._spans = {name: (start, cost) for (name, cost), start in zip(costs.items(), starts, strict=False)}

    def part(self, name: str, prefix: str = "") -> Report:
        """Return the progress callback of a part; its steps are shown behind `prefix`."""
        start, cost = self._spans[name]
        return lambda step, done: self._report(f"{prefix}{step}", (start + cost * done) / self._whole)


def train_students_over(
    over: TenantTask,
    settings: StudentSettings,
    teacher_settings: TrainSettings,
    candidates: Sequence[Candidate],
    job: Job,
    context: JobContext,
    parts: Parts,
) -> Tenant:
    """Train students over the trunk of `over`, taught by the best of the candidates, as `StudentTask.train` does."""
    identity = [candidate.identity for candidate in candidates]
    run = run_of(over.base, over.lineage[0].number, over.data, settings, identity)
    kept = KeptStudents(context.scratch / f"students-{over.base.config.name}", run)
    taught = kept_teacher(kept)
    if taught is None:
        taught = best_teacher(candidates, over.data, teacher_settings, lambda one: _teacher_report(one, parts))
        keep_teacher(kept, taught)
    return build_students(
        over.base,
        over.lookup(context.store),
        job.request["tenant"],
        over.data,
        taught,
        settings,
        parts.part(STUDENTS),
        kept,
        example=job.request.get("example", ""),
    )


def costs_of(
    over: TenantTask, settings: StudentSettings, teacher_settings: TrainSettings, candidates: Sequence[Candidate]
) -> dict[str, float]:
    """Return about what each part of a training of students costs, by name: each possible teacher, then STUDENTS."""
    each = mean_tokens(over.data.train, over.base.load_text_encoder())
    costs = {
        one.name: layer_cost(one.base.config) * each * one.texts_computed(over.data, teacher_settings)
        for one in candidates
    }
    tokens = work_of(over.data, over.base, settings).tokens
    return {**costs, STUDENTS: layer_cost(over.base.config) * tokens}


def layer_cost(config: BaseConfig) -> float:
    """Return a number in proportion to what the upper layers of a base cost for a token."""
    return float(config.upper_layers * config.hidden_size**2)


def about_with_students(about: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """Return the `about` of a version with students, with the options of its job, which an update keeps."""
    return {**about, "students": {**about["students"], "asked": job.request["students"]}}


def student_settings(
    given: Mapping[str, Any], options: Mapping[str, Any], data: LabelledData, slot_factor: int
) -> StudentSettings:
    """Return the settings of a request: those of its training, `given`, and the options of its students.

    `epochs` bounds both algorithms. Of several learning rates, which a cascade may have, the first is that of the students.
    Dev does not choose the width of adapters: `auto` is the usual width of the task.
    """
    found = {key: given[key] for key in ("epochs", "patience", "pooling", "seed") if key in given}
    if "epochs" in given:
        found["pruning_epochs"] = given["epochs"]
    if rates := given.get("learning_rates"):
        found["learning_rate"] = rates[0]
    for option, key in (("form", "form"), ("most", "most_students")):
        if option in options:
            found[key] = options[option]
    factors = factors_to_train(task_named(data.task), given.get("adapter_width", "auto"), slot_factor)
    return StudentSettings(**found, reduction_factor=factors[0])


def _teacher_report(candidate: Candidate, parts: Parts) -> Report:
    return shared_out(parts.part(candidate.name, f"teacher {candidate.name}: "), STEPS)


def _known_card(context: JobContext, record: TenantRecord) -> TenantCard:
    """Return the card of a tenant's version, whose task, labels and seed the students keep."""
    version, base = record.current, bases.load(context.store.base(record.base))
    advice = "roll back to another, or delete the tenant and create it again"
    with hide_store_paths(context.store, f"version {version.number} of the tenant cannot be used: {advice}"):
        return load_card(context.store, version, base)
