"""The handlers of the builder's jobs: tenants and domains, created or updated, students, cascades with other targets.

A job that was killed continues from its checkpoints. The version that it has published already is found by the job's id and
not made twice. A version that it did not publish has a number that is never used again, and garbage collection removes it.
"""

from __future__ import annotations

from typing import Any

from hplm.errors import StoreUnavailableError
from hplm.jobs.context import JobContext
from hplm.jobs.handlers import DeviceLost, JobHandler, JobHandlers, Work
from hplm.registry.records import Job


def load_handlers() -> JobHandlers:
    """Import the handlers, and torch with them; return them by kind of job."""
    from hplm_builder.cascade.cascade_job import make_cascade, plan_cascade, target_cascade
    from hplm_builder.domains.domain_job import make_domain, plan_domain
    from hplm_builder.students.student_job import make_students, plan_students
    from hplm_builder.tenants.tenant_job import make_tenant, plan_tenant

    tenant = JobHandler(
        _prepared(_by_request(make_tenant, make_students, make_cascade)),
        _prepared(_by_request(plan_tenant, plan_students, plan_cascade)),
    )
    domain = JobHandler(_prepared(make_domain), _prepared(plan_domain))
    target = _prepared(target_cascade)
    return {
        "tenant.create": tenant,
        "tenant.update": tenant,
        "tenant.students": tenant,
        "tenant.target": JobHandler(target, target),
        "domain.create": domain,
        "domain.update": domain,
    }


def _by_request(plain: Work, with_students: Work, over_levels: Work) -> Work:
    """Return the work of a tenant's job, which is another if the request has levels or students."""

    def run(job: Job, context: JobContext) -> dict[str, Any]:
        # A cascade's request may have options of students too, for its levels over trunks.
        if "levels" in job.request:
            return over_levels(job, context)
        return with_students(job, context) if "students" in job.request else plain(job, context)

    return run


def _prepared(work: Work) -> Work:
    """Return `work` with checkpoints in the job's scratch folder, and torch's errors of the device as a worker process's."""
    import torch

    from hplm.models.device import is_device_lost
    from hplm_builder.convert.checkpoint import checkpoints_in

    def run(job: Job, context: JobContext) -> dict[str, Any]:
        try:
            with checkpoints_in(context.scratch):
                return work(job, context)
        except torch.OutOfMemoryError as error:
            raise StoreUnavailableError("the device has no memory left for this job") from error
        except RuntimeError as error:
            if is_device_lost(error):
                raise DeviceLost("the device fails every later call of this process") from error
            raise

    return run
