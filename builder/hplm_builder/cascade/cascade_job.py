"""The handlers of jobs about cascades: create, update, and select again for another target.

All levels are trained, proved and published by one job. What a job has trained is kept in its scratch folder, so that a job
whose worker process was killed goes on with the next level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hplm.adapters import tenant as tenants
from hplm.adapters.tenant import Tenant
from hplm.cascade.promise import examples_needed, proved_accuracy, right_needed
from hplm.cascade.selection import CascadeTarget
from hplm.engine.open_domain import open_features
from hplm.errors import ArtifactError, ConflictError, ContractError
from hplm.jobs.context import JobContext, bases_of, hide_store_paths, publish_all, retire_old, versions_of_job
from hplm.models import base as bases
from hplm.profiles.profile import Profile
from hplm.registry.records import CascadeRecord, Job, NewLevel, TenantVersion
from hplm.registry.registry import Registry
from hplm.reporting.progress import Report, shared_out
from hplm.runtime.crash_points import crash_point
from hplm.store.cascade_outputs import outputs_of
from hplm.tasks.examples import LabelledText
from hplm_builder.cascade.cascade_build import (
    STEPS,
    BuiltCascade,
    LevelLatency,
    build_cascade,
    numbered,
    select_again,
    set_aside,
)
from hplm_builder.cascade.levels import LevelInput
from hplm_builder.cascade.outputs import load_outputs, save_outputs
from hplm_builder.cascade.used_texts import load_used, used_by
from hplm_builder.data.data_warnings import data_warnings
from hplm_builder.export.register import registered_about
from hplm_builder.profiles.base_profile import profile_of
from hplm_builder.students.student_build import estimate_students
from hplm_builder.students.student_level import level_settings, train_level
from hplm_builder.students.student_task import about_with_students
from hplm_builder.tenants.tenant_job import TenantTask, kept_versions, read_files, shown
from hplm_builder.tenants.widths import width_name

# The part of the job that comes after the training of all levels, and its time as a share of the training's.
SELECTION = "cascade"
SELECTION_SHARE = 0.25


def make_cascade(job: Job, context: JobContext) -> dict[str, Any]:
    """Create or update a tenant with all its levels, and publish the plan that was selected and proved for its target.

    An update that makes no level better, or whose levels do not prove the target, publishes nothing. Raises ContractError if a
    new tenant's target cannot be promised.
    """
    registry, name = context.registry, job.request["tenant"]
    if made := versions_of_job(job, kept_versions(registry, name)):
        return _result(made)
    registry.check_next_number(name, lambda number: context.store.tenant_version(name, number))
    task = _CascadeTask.read(job, context)
    trained = task.train_all(job, context)
    crash_point("job.trained")
    if all(level.keeps(tenant) for level, tenant in zip(task.levels, trained, strict=True)):
        return _unchanged(job, context, task, "no level is better on dev")
    try:
        built = task.build(context, trained)
    except ContractError as error:
        if job.kind != "tenant.update":
            raise
        return _unchanged(job, context, task, str(error))
    return _publish(job, context, task, trained, built)


def plan_cascade(job: Job, context: JobContext) -> dict[str, Any]:
    """Return what `make_cascade` would cost, measured on a few examples. The files are checked in the same way."""
    task = _CascadeTask.read(job, context)
    context.lease.report("measure", 0.5)
    first = task.levels[0]
    warnings = [*task.warnings, *data_warnings(first.data, first.base.load_text_encoder())]
    training_s = sum(task.estimate_s(job, context, level) for level in task.levels)
    return {
        "examples": {**first.data.counts, "proof": len(task.proof)},
        "labels": list(first.data.labels),
        "task": first.data.task,
        "levels": list(task.names),
        "estimated_s": training_s * (1 + SELECTION_SHARE),
        "adapter_widths": sorted({width_name(factor) for level in task.levels for factor in level.factors}),
        "bytes": sum(level.weight_bytes for level in task.levels),
        **({"warnings": warnings} if warnings else {}),
    }


def target_cascade(job: Job, context: JobContext) -> dict[str, Any]:
    """Select and prove a tenant's cascade again for another target, from what its levels answered when they were trained.

    Raises ContractError if the target cannot be promised, ConflictError if the cascade is out of force by now.
    """
    request, registry, store = job.request, context.registry, context.store
    name = request["tenant"]
    if made := versions_of_job(job, kept_versions(registry, name)):
        return _result(made)
    context.lease.report("read", 0.0)
    cascade = _cascade_in_force(registry, name)
    current = {base: registry.tenant(name, base).current for base in cascade.levels}
    with hide_store_paths(store, "the outputs of the tenant's levels cannot be used: update the tenant"):
        outputs = load_outputs(_outputs_folder(context, cascade, name))
    profiles: dict[str, Profile] = {}
    for place, (name_of_base, version) in enumerate(current.items()):
        context.lease.report("profile", 0.1 + 0.7 * place / len(current))
        base = bases.load(store.base(name_of_base))
        lineage = registry.lineage(version.domain_version_id)
        miss = request["served"][name_of_base]["miss"]
        domain = open_features(store, base, [each.path for each in lineage], miss=miss)
        profiles[name_of_base] = profile_of(store, base, domain)
    context.lease.report("select", 0.8)
    students = {
        name_of_base: version.about.get("students", {}).get("count", 1) for name_of_base, version in current.items()
    }
    latencies = {
        name_of_base: LevelLatency(profile, students[name_of_base]) for name_of_base, profile in profiles.items()
    }
    built = _with_warnings(select_again(outputs, _target(request), latencies), _rough_latencies(profiles))
    number = context.lease.retry(lambda: registry.next_number(name))
    last = built.plan.levels[-1].base
    numbers = {**cascade.levels, last: number}
    about = {**current[last].about, "job": job.id, "cascade": built.about}
    context.lease.report("publish", 1.0)
    made = publish_all(
        context,
        [],
        lambda: [
            registry.retarget_tenant(
                name,
                numbered(built.plan, numbers),
                context.clock(),
                about=about,
                number=number,
                expected=cascade.levels,
            )
        ],
        lambda: versions_of_job(job, kept_versions(registry, name)),
        job=job,
    )
    return _result(made)


@dataclass(frozen=True)
class _CascadeTask:
    """A cascade's job with its data read and checked: the training of each level, and the examples of the proof.

    `names` are those of the levels' bases. All levels train on the same data. `warnings` are those of the proof. `used` are
    the checksums of all texts that train or select, now or in the versions from which an update trains on.
    """

    names: tuple[str, ...]
    levels: tuple[TenantTask, ...]
    proof: Sequence[LabelledText]
    warnings: Sequence[str]
    used: Set[int]
    target: CascadeTarget

    @classmethod
    def read(cls, job: Job, context: JobContext) -> _CascadeTask:
        """Read what the job starts from, and set the proof aside before anything is trained.

        Raises what `TenantTask.read` raises, ConflictError if the cascade of an update is out of force by now, and
        ContractError if the proof has too few examples for any promise.
        """
        named = bases_of(job.request)
        first = TenantTask.read(_of_level(job, named[0]), context)
        seed, known = first.settings.seed, first.start.card if first.start else None
        given = read_files(job, context, known, seed, proves=True) if "proof" in job.request["data"] else None
        used = _used_before(job, context)
        data, proof, warnings = set_aside(first.data, None if given is None else given.test, seed, used)
        if given is not None and "test" in given.repeats:
            warnings = [given.repeats["test"], *warnings]
        target = _target(job.request)
        _check_proof(target, len(proof))
        others = (TenantTask.read(_of_level(job, base), context, data) for base in named[1:])
        # Students are trained from the trunk again, by what the other levels have learned.
        levels = (
            replace(level, start=None) if level.base.is_trunk else level
            for level in (replace(first, data=data), *others)
        )
        return cls(tuple(named), tuple(levels), proof, warnings, used | used_by(data), target)

    def train_all(self, job: Job, context: JobContext) -> list[Tenant]:
        """Train all levels. Levels over trunks come last, because the other levels teach their students."""
        trained: dict[int, Tenant] = {}
        for place in sorted(range(len(self.levels)), key=lambda place: self.levels[place].base.is_trunk):
            trained[place] = self._train(job, context, place, trained)
        return [trained[place] for place in range(len(self.levels))]

    def estimate_s(self, job: Job, context: JobContext, level: TenantTask) -> float:
        """Return the seconds that the training of a level would take on this machine now."""
        if not level.base.is_trunk:
            return level.estimate_s(context.store)
        settings = level_settings(level, job)
        return estimate_students(level.base, level.lookup(context.store), level.data, settings)

    def _train(self, job: Job, context: JobContext, place: int, others: Mapping[int, Tenant]) -> Tenant:
        """Train a level, or load it if this job has trained it before its worker process was lost.

        `others` are the levels that are trained already, by their place.
        """
        name, level = self.names[place], self.levels[place]
        began = 0 if level.current is None else level.current.number
        # A domain's update may have come between two attempts of the job: the features are others then.
        kept = context.scratch / f"{name}-from-{began}-over-{level.lineage[0].number}"
        # A damaged folder is trained again.
        with suppress(ArtifactError):
            return tenants.load(kept, fingerprint=level.base.fingerprint, name=job.request["tenant"])
        report, of_level = self.report_part(context, name), _of_level(job, name)
        if level.base.is_trunk:
            teachers = {self.names[other]: (self.levels[other], tenant) for other, tenant in others.items()}
            trained = train_level(level, teachers, of_level, context, report)
        else:
            trained = level.train(of_level, context.store, report)
        tenants.save(kept, trained)
        crash_point("job.trained")
        return trained

    def build(self, context: JobContext, trained: Sequence[Tenant]) -> BuiltCascade:
        """Select and prove the plan. Raises what `build_cascade` raises."""
        report = self.report_part(context, SELECTION)
        inputs = [
            LevelInput(level.base, level.lookup(context.store), tenant, name)
            for name, level, tenant in zip(self.names, self.levels, trained, strict=True)
        ]

        profiles: dict[str, Profile] = {}

        def latency_of(level: LevelInput) -> LevelLatency:
            profiles[level.base_name] = profile_of(
                context.store, level.base, level.domain, report=lambda step, done: report("profile", 0.0)
            )
            return LevelLatency(profiles[level.base_name], level.tenant.card.students)

        built = build_cascade(
            inputs, self.levels[0].data, self.proof, self.target, latency_of, shared_out(report, STEPS)
        )
        return _with_warnings(built, [*self.warnings, *_rough_latencies(profiles)])

    def report_part(self, context: JobContext, part: str) -> Report:
        """Return a progress callback for one part of the job: the training of a level, or SELECTION.

        A level takes time by its weights.
        """
        configs = [level.base.config for level in self.levels]
        costs = [float(config.upper_layers * config.hidden_size**2) for config in configs]
        shares = dict(zip((*self.names, SELECTION), (*costs, SELECTION_SHARE * sum(costs)), strict=True))
        place = list(shares).index(part)
        begin, whole = sum(list(shares.values())[:place]), sum(shares.values())

        def report(step: str, progress: float) -> None:
            context.lease.report(f"{part}: {step}", (begin + shares[part] * progress) / whole)

        return report


def _publish(
    job: Job, context: JobContext, task: _CascadeTask, trained: Sequence[Tenant], built: BuiltCascade
) -> dict[str, Any]:
    """Write the versions of all levels and the outputs, and register them in one transaction."""
    registry, store, name = context.registry, context.store, job.request["tenant"]
    context.lease.report("publish", 1.0)
    numbers: dict[str, int] = {}
    new: list[NewLevel] = []

    def give_number() -> int:
        return registry.next_number(name, lambda number: store.tenant_version(name, number))

    last = built.plan.levels[-1].base
    for base, level, tenant in zip(task.names, task.levels, trained, strict=True):
        number = numbers[base] = context.lease.retry(give_number)
        made_by = level.about(job, tenant)
        card = replace(tenant.card, about=about_with_students(made_by, job) if level.base.is_trunk else made_by)
        folder = store.tenant_version(name, number)
        tenants.save(folder, replace(tenant, card=card))
        about = registered_about(card) | ({"cascade": built.about} if base == last else {})
        expected = level.current.number if level.current else None
        new.append(NewLevel(level.lineage[0].id, store.relative(folder), about, number, expected))
    save_outputs(outputs_of(store.path(new[-1].path)), built.outputs, task.used)
    plan = numbered(built.plan, numbers)
    made = publish_all(
        context,
        [store.path(level.path) for level in new],
        lambda: list(registry.publish_levels(name, new, plan, context.clock()).values()),
        lambda: versions_of_job(job, kept_versions(registry, name)),
        job=job,
    )
    return _result(made)


def _with_warnings(built: BuiltCascade, warnings: Sequence[str]) -> BuiltCascade:
    every = [*warnings, *built.about.get("warnings", ())]
    return replace(built, about={**built.about, "warnings": every}) if every else built


def _rough_latencies(profiles: Mapping[str, Profile]) -> list[str]:
    """Return a warning if latencies come from quick profiles, by the names of the bases."""
    if not (quick := [base for base, profile in profiles.items() if profile.kind == "quick"]):
        return []
    return [
        f"latencies over {', '.join(quick)} are estimates of a quick measurement, made while the job ran: measure with "
        "`hplm profile` while the server is idle, then select again (`hplm tenant target`)"
    ]


def _result(made: Sequence[TenantVersion]) -> dict[str, Any]:
    """Return the result of a job that published `made`, one version of each level or only a new last one."""
    newest = max(made, key=lambda version: version.number)
    about = next(version.about for version in made if version.plan is not None)
    plan = next(version.plan for version in made if version.plan is not None)
    result = {
        "tenant": newest.tenant,
        "version": newest.number,
        "published": True,
        "levels": dict(newest.levels),
        "answered_by": [level.base for level in plan.levels],
        "promise": plan.to_json()["promise"],
        **shown(newest.about),
    }
    if warnings := [*result.get("warnings", ()), *about["cascade"].get("warnings", ())]:
        result["warnings"] = warnings
    return result


def _unchanged(job: Job, context: JobContext, task: _CascadeTask, why: str) -> dict[str, Any]:
    """Return the result of an update that publishes nothing, so that all levels stay.

    Raises ConflictError if other versions are served by now, and what `JobLease.renew` raises.
    """
    current = {name: level.current for name, level in zip(task.names, task.levels, strict=True)}
    expected = {base: version.number for base, version in current.items() if version is not None}
    name = job.request["tenant"]

    def still_served() -> Mapping[str, int]:
        context.lease.renew()
        return context.registry.tenant(name).bases

    now = context.lease.retry(still_served)
    if any(now.get(base) != number for base, number in expected.items()):
        raise ConflictError(f"tenant {name!r} was changed meanwhile, look again (`hplm tenant show {name}`)")
    retire_old(context, job)
    version = max(expected.values())
    return {
        "tenant": name,
        "version": version,
        "published": False,
        "why": f"{why}: version {version} stays, with its target",
        "levels": expected,
    }


def _cascade_in_force(registry: Registry, name: str) -> CascadeRecord:
    """Return the cascade of a tenant. Raises ConflictError if there is none in force by now."""
    cascade = registry.cascade_of(name)
    if cascade is None or not cascade.is_in_force:
        raise ConflictError(
            f"the cascade of tenant {name!r} was changed meanwhile, look again (`hplm tenant show {name}`)"
        )
    return cascade


def _outputs_folder(context: JobContext, cascade: CascadeRecord, name: str) -> Path:
    """Return the folder of what the levels answered when they were trained: it lies with the last of all levels."""
    last = context.registry.tenant(name, list(cascade.levels)[-1]).current
    return outputs_of(context.store.path(last.path))


def _used_before(job: Job, context: JobContext) -> Set[int]:
    """Return the checksums of the texts behind the versions from which the job trains on; none for a new tenant.

    Raises ConflictError if the cascade is out of force by now, and ArtifactError if the checksums cannot be read.
    """
    if job.kind != "tenant.update":
        return frozenset()
    name = job.request["tenant"]
    cascade = _cascade_in_force(context.registry, name)
    advice = (
        "the texts that the tenant was trained on cannot be read, so nothing can be proved: create the tenant again"
    )
    with hide_store_paths(context.store, advice):
        return load_used(_outputs_folder(context, cascade, name))


def _of_level(job: Job, base: str) -> Job:
    """Return the job as if it were about one level only."""
    request = job.request
    managed = {key: request["served"][base][key] for key in ("miss", "reduction_factor")}
    return replace(job, request={**request, **managed, "base": base, "domain": request["domains"][base]})


def _target(request: Mapping[str, Any]) -> CascadeTarget:
    return CascadeTarget(**request["target"])


def _check_proof(target: CascadeTarget, examples: int) -> None:
    """Raise ContractError if even `examples` right answers would not prove the accuracy, before anything is trained."""
    if target.accuracy is None or right_needed(target.accuracy, examples) is not None:
        return
    raise ContractError(
        f"{examples:,} proof examples cannot prove accuracy {target.accuracy:.3f}, even if all answers are right: at least "
        f"{examples_needed(target.accuracy, 1.0):,} are needed (--proof FILE, or more dev examples); the nearest offer is "
        f"accuracy {proved_accuracy(examples, examples):.3f} at most"
    )
