"""Job handlers: the functions that do the work of each kind of job. The builder provides them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hplm.jobs.context import JobContext
from hplm.registry.records import Job

# Does a job and returns its result. Raises HplmError if that is impossible, and what `JobLease.report` raises.
Work = Callable[[Job, JobContext], dict[str, Any]]


@dataclass(frozen=True)
class JobHandler:
    """The two functions for one kind of job: `make` does the work, `plan` measures its cost for a dry run."""

    make: Work
    plan: Work

    def run(self, job: Job, context: JobContext) -> dict[str, Any]:
        """Do the job, or its dry run; return its result."""
        return {"plan": self.plan(job, context)} if job.request["dry_run"] else self.make(job, context)


# Handlers by kind of job, such as `tenant.create`.
JobHandlers = Mapping[str, JobHandler]


class DeviceLost(Exception):
    """Raised by a handler if every later use of the process's device would fail too: the process must end."""
