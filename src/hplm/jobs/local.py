"""Local jobs: a command inserts a job and runs it in its own process."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hplm.errors import ConflictError, HplmError, InternalError, JobCancelledError, LeaseLostError
from hplm.jobs.context import JobContext
from hplm.jobs.handlers import Work
from hplm.jobs.lease import JobLease, JobTimings
from hplm.jobs.lease_expiry import LeaseExpiry
from hplm.registry.records import Job
from hplm.registry.registry import Registry
from hplm.runtime.crash_points import crash_point
from hplm.store.layout import Store

POLL_S = 0.5  # pause between two looks whether the lease of a killed command has expired


def worker_name() -> str:
    """Return a name for this process that no other worker has, not even one that was killed a moment ago."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def run_local_job(
    store: Store,
    registry: Registry,
    kind: str,
    subject: str,
    request: dict[str, Any],
    work: Work,
    *,
    scratch: Path,
    on_progress: Callable[[str, float], None],
    device: str = "cpu",
    timings: JobTimings | None = None,
) -> dict[str, Any]:
    """Insert a job, run `work` on it here, and return its result. No worker process ever takes the job.

    `scratch` is kept unless the job is done, so that the next such command continues from it. If this process is killed,
    the job fails when its lease expires. Ctrl-C cancels the job. Raises ConflictError if the subject has an unfinished
    job, JobCancelledError if a client cancels this one, LeaseLostError, and what `work` raises.
    """
    timings = timings or JobTimings()
    worker = worker_name()
    expiry = LeaseExpiry(timings.watch_s)

    def insert_job() -> Job:
        return registry.start_local_job(kind, subject, request, worker, time.time(), timings.lease_s, expired=expiry)

    job = _start(insert_job, worker, on_progress)
    crash_point("job.claimed")
    with JobLease(registry, job, worker, threading.Event(), timings, time.time, on_progress) as lease:
        context = JobContext(store, registry, lease, time.time, device, scratch)
        try:
            result = work(job, context)
            _finish(registry, lease, job, worker, result)
        except LeaseLostError:
            raise
        except (KeyboardInterrupt, JobCancelledError):
            with contextlib.suppress(HplmError):
                registry.release_job(job.id, worker, time.time())
            raise
        except BaseException as failed:
            error = (
                failed if isinstance(failed, HplmError) else InternalError("the command failed; its output says why")
            )
            # Clients of the manager can read the job, and must not learn the server's paths.
            shown = {"code": error.code, "message": str(error).replace(str(store.root), "the store")}
            # The job's own error matters more than why it could not be recorded; the lease will expire.
            with contextlib.suppress(HplmError):
                lease.retry(lambda: registry.finish_job(job.id, worker, time.time(), error=shown))
            raise
    crash_point("job.finished")
    shutil.rmtree(scratch, ignore_errors=True)
    crash_point("job.consumed")
    return result


def _finish(registry: Registry, lease: JobLease, job: Job, worker: str, result: dict[str, Any]) -> None:
    """Record that a job is done. Raises LeaseLostError if another process has ended the job in another way."""
    try:
        lease.retry(lambda: registry.finish_job(job.id, worker, time.time(), result=result))
    except LeaseLostError:
        # The answer of the first try may be lost, or a worker may have ended the job after this command published.
        if registry.job(job.id).state != "done":
            raise


def _start(insert_job: Callable[[], Job], worker: str, on_progress: Callable[[str, float], None]) -> Job:
    """Insert the job. Wait for the lease of a killed command that ran the last job of the subject.

    Raises ConflictError if the subject has another unfinished job.
    """
    leases: dict[str, float | None] = {}
    while True:
        job = insert_job()
        if job.worker == worker:
            return job
        is_renewed = leases.setdefault(job.id, job.lease_until_s) != job.lease_until_s
        if not job.local or is_renewed:
            raise ConflictError(
                f"job {job.id} of {job.subject} is {job.state}: wait for its end, or cancel it (`hplm job cancel {job.id}`)"
            )
        on_progress(f"wait: job {job.id} of a command that was killed, or runs, holds {job.subject}", 0.0)
        time.sleep(POLL_S)
