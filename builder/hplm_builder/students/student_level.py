"""The training of a cascade's level over a trunk: its students are taught by the levels that the same job has trained."""

from __future__ import annotations

from collections.abc import Mapping

from hplm.adapters.tenant import Tenant
from hplm.errors import ConfigError
from hplm.jobs.context import JobContext
from hplm.registry.records import Job
from hplm.reporting.progress import Report
from hplm_builder.students.student_build import check_form
from hplm_builder.students.student_settings import StudentSettings
from hplm_builder.students.student_task import (
    AUTO,
    FULL,
    FULL_NAME,
    Parts,
    costs_of,
    layer_cost,
    student_settings,
    train_students_over,
)
from hplm_builder.students.teacher import Candidate, check_task
from hplm_builder.tenants.tenant_job import TenantTask

# The levels that may teach, by the names of their bases, each with the tenant that was trained there.
Teachers = Mapping[str, tuple[TenantTask, Tenant]]


def level_settings(level: TenantTask, job: Job) -> StudentSettings:
    """Return the settings of a level's students; `job` is as if it were about this level only."""
    given = {**job.request["settings"], "seed": level.settings.seed, "pooling": level.settings.pooling}
    options, factor = job.request.get("students", {}), job.request["reduction_factor"]
    return student_settings(given, options, level.data, factor)


def train_level(level: TenantTask, teachers: Teachers, job: Job, context: JobContext, report: Report) -> Tenant:
    """Train the students of a level over a trunk, taught by the best of the other levels on dev.

    A teacher that the request names teaches alone. Raises ConfigError if no level can teach, and what
    `train_students_over` raises.
    """
    check_task(level.data.task)
    settings = level_settings(level, job)
    check_form(level.base, settings)
    asked = job.request.get("students", {}).get("teacher", AUTO)
    usable = {base: taught for base, taught in teachers.items() if not taught[0].base.is_trunk}
    if asked not in (AUTO, FULL):
        usable = {base: taught for base, taught in usable.items() if base == asked}
    if not usable:
        who = "no level" if asked in (AUTO, FULL) else f"no level over base {asked!r}"
        raise ConfigError(f"{who} can teach the students over {level.base.config.name!r}: add a level that is no trunk")
    store = context.store
    if asked == FULL:
        base = max(usable, key=lambda name: layer_cost(usable[name][0].base.config))
        task = usable[base][0]
        candidates = [Candidate(FULL_NAME.format(base=base), task.base, task.lookup(store), is_full=True)]
    else:
        candidates = [Candidate(base, task.base, task.lookup(store), tenant) for base, (task, tenant) in usable.items()]
    parts = Parts(report, costs_of(level, settings, level.settings, candidates))
    return train_students_over(level, settings, level.settings, candidates, job, context, parts)
