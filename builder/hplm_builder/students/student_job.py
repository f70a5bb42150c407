"""The handlers of jobs that make students of a tenant: for a new tenant, for one that exists, or again for an update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hplm.jobs.context import JobContext, hide_store_paths, version_of_job
from hplm.registry.records import Job
from hplm.runtime.crash_points import crash_point
from hplm.tasks.task_loader import task_named
from hplm_builder.cascade.levels import Level, LevelInput
from hplm_builder.data.data_warnings import data_warnings
from hplm_builder.students.student_task import StudentTask
from hplm_builder.tenants.tenant_build import load_version
from hplm_builder.tenants.tenant_job import kept_versions, publish_version, result_of, unchanged


def make_students(job: Job, context: JobContext) -> dict[str, Any]:
    """Make students of a tenant over a trunk, and publish them as the tenant's next version over the trunk.

    An update whose students are no better on dev than the present version publishes nothing.
    """
    name = job.request["tenant"]
    if (made := version_of_job(job, kept_versions(context.registry, name))) is not None:
        return result_of(made)
    context.registry.check_next_number(name, lambda number: context.store.tenant_version(name, number))
    task = StudentTask.read(job, context)
    trained = task.train(job, context)
    crash_point("job.trained")
    current = task.over.current
    if job.kind == "tenant.update" and current is not None:
        metric = task_named(task.over.data.task).metric
        now, then = trained.card.about["scores"][f"dev_{metric}"], _present_score(task, context)
        if now <= then:
            why = f"no better on dev ({metric} {now:.3f}, now {then:.3f})"
            return unchanged(job, context, current, trained.card, why)
    trained = replace(trained, card=replace(trained.card, about=task.about(job, trained)))
    return publish_version(job, context, task.over, trained)


def plan_students(job: Job, context: JobContext) -> dict[str, Any]:
    """Return what `make_students` would cost, measured on a few examples. The files are checked in the same way."""
    task = StudentTask.read(job, context)
    context.lease.report("measure", 0.5)
    data = task.over.data
    warnings = data_warnings(data, task.over.base.load_text_encoder())
    return {
        "examples": data.counts,
        "labels": list(data.labels),
        "task": data.task,
        "teachers": [candidate.name for candidate in task.candidates(job, context)],
        "most_students": task.settings.most_students,
        "student_form": task.settings.form,
        "estimated_s": task.estimate_s(job, context),
        "bytes": task.weight_bytes,
        **({"warnings": warnings} if warnings else {}),
    }


def _present_score(task: StudentTask, context: JobContext) -> float:
    """Return the score of the present version, with all its students, on the dev examples of an update."""
    over = task.over
    assert over.current is not None
    with hide_store_paths(
        context.store, f"version {over.current.number} of the tenant cannot be used: roll back to another"
    ):
        present = load_version(context.store, over.current, over.base)
    kind, dev = task_named(over.data.task), over.data.dev
    with Level(LevelInput(over.base, over.lookup(context.store), present, over.base.config.name)) as level:
        answered = level.answer([example.text_or_pair for example in dev])
    labels = present.card.labels
    answers = [kind.decode(one.outputs, labels, one.tokens)[0] for one in answered]
    return float(kind.scores(dev, [one.tokens for one in answered], answers)[kind.metric])
