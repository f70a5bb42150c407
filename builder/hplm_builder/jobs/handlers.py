"""What a worker does for each kind of job: read its files, train, put the artifact in place, publish it in one transaction.

A job that was killed begins again. What it had published already is found by its id and not made twice; what it left
without publishing is under a number that is never given again, and is collected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hplm.registry.records import Job
from hplm_builder.domains.domain_job import make_domain, plan_domain
from hplm_builder.jobs.job_context import Bench, without_paths
from hplm_builder.tenants.tenant_job import make_tenant, plan_tenant

Step = Callable[[Job, Bench], dict[str, Any]]
# Kind of job -> doing it, and saying what it would cost.
STEPS: dict[str, tuple[Step, Step]] = {
    "tenant.create": (make_tenant, plan_tenant),
    "tenant.update": (make_tenant, plan_tenant),
    "domain.create": (make_domain, plan_domain),
    "domain.update": (make_domain, plan_domain),
}


def run_job(job: Job, bench: Bench) -> dict[str, Any]:
    """Do a job; returns its result. Raises HplmError where it cannot be done, and what `bench.report` raises."""
    make, plan = STEPS[job.kind]
    with without_paths(bench.store, "a file of the base or of a domain cannot be used"):
        return {"plan": plan(job, bench)} if job.request["dry_run"] else make(job, bench)
