"""The lease of a running job: a thread renews it, writes the progress and notices a request to cancel."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from hplm.errors import HplmError, JobCancelledError, LeaseLostError, RegistryError, StoppingError, UnknownJobError
from hplm.jobs.lease_expiry import WATCH_S
from hplm.registry.catalog import POLL_EVERY_S
from hplm.registry.records import Job
from hplm.registry.registry import Registry
from hplm.runtime.crash_points import crash_point

log = logging.getLogger(__name__)

Result = TypeVar("Result")
RETRY_S = 0.5  # pause between two attempts to use a registry that refuses
WARN_EVERY_S = 30.0  # at most one warning about the registry in this time
# An estimate from a smaller share of the work would be noise.
LEAST_SHARE = 0.02
# Exit status of a worker process that ends because its job hangs or its device is lost.
HUNG = 75


@dataclass(frozen=True)
class JobTimings:
    """Times of a job's lease, and of the process that runs the job.

    `lease_s`: length of a lease. `renew_every_s`: seconds between renewals; new progress renews it every
    `report_every_s`. `watch_s`: how long another process watches an expired lease before it takes the job.
    `serve_wait_s`: how long a worker process waits after publishing before the job ends. Every server has read the
    registry then, so a client that sees the end can call the tenant. `hang_s`: a job that must end and has made no progress
    report for this long hangs; its process then gives the job back, within `release_s`, and exits.
    """

    lease_s: float = 30.0
    renew_every_s: float = 5.0
    report_every_s: float = 0.5
    watch_s: float = WATCH_S
    serve_wait_s: float = 3 * POLL_EVERY_S
    hang_s: float = 60.0
    release_s: float = 10.0


@dataclass(frozen=True)
class JobProgress:
    """The step that a job is in and the share of the whole job that is done, 0 to 1.

    `began_s` is the monotonic time at which the step began, and `first` the progress at that time: a job that continues
    after a kill jumps ahead between two steps.
    """

    step: str
    progress: float
    began_s: float
    first: float

    def advanced(self, step: str, progress: float) -> JobProgress:
        """Return the progress after a report of `step` and `progress`."""
        progress = min(1.0, max(0.0, progress))
        if step == self.step:
            return replace(self, progress=progress)
        return JobProgress(step, progress, time.monotonic(), progress)

    def eta_s(self) -> float | None:
        """Return the seconds that the rest takes at the speed of this step; None while too little is done to say."""
        share = self.progress - self.first
        return (time.monotonic() - self.began_s) * (1 - self.progress) / share if share >= LEAST_SHARE else None


class JobLease:
    """A job that this process holds, for as long as the context manager is open.

    A thread of its own talks to the registry, so that training never waits for a database. `on_progress` is called with
    each progress report, in the thread that reports.
    """

    def __init__(
        self,
        registry: Registry,
        job: Job,
        worker: str,
        stop: threading.Event,
        timings: JobTimings,
        clock: Callable[[], float],
        on_progress: Callable[[str, float], None] | None = None,
    ) -> None:
        self._registry, self._job, self._worker = registry, job, worker
        self._stop, self._timings, self._clock = stop, timings, clock
        self._on_progress = on_progress
        self._progress = JobProgress("", 0.0, time.monotonic(), 0.0)
        self._end: HplmError | None = None
        self._closed = threading.Event()
        self._renewed_s = self._reported_s = time.monotonic()
        self._warned_s = -math.inf
        self.unreachable_s = -math.inf
        """The last monotonic time at which the registry could not be reached."""
        self._thread = threading.Thread(target=self._keep, name="heartbeat", daemon=True)

    def report(self, step: str, progress: float) -> None:
        """Note how far the job is. Raises JobCancelledError, StoppingError or LeaseLostError if the job must end."""
        self._progress = self._progress.advanced(step, progress)
        self._reported_s = time.monotonic()
        if self._on_progress is not None:
            self._on_progress(step, progress)
        crash_point("job.reported")
        if self._stop.is_set():
            raise StoppingError("the worker is shutting down")
        if self._end is not None:
            raise self._end

    def renew(self) -> None:
        """Renew the lease now. Raises LeaseLostError or JobCancelledError if nothing may be published; RegistryError."""
        self._renew()
        if self._end is not None:
            raise self._end

    def retry(self, use_registry: Callable[[], Result]) -> Result:
        """Call `use_registry`, again and again while it raises RegistryError.

        There is no limit while the registry is unreachable: then no other process can take the job, and a trained
        tenant may be at stake. If the registry is reachable, retries stop after the length of a lease.
        """
        deadline_s = time.monotonic() + self._timings.lease_s
        while True:
            # A job that waits for the registry does not hang.
            self._reported_s = time.monotonic()
            try:
                return use_registry()
            except RegistryError:
                if self.unreachable_s > self._renewed_s:
                    deadline_s = time.monotonic() + self._timings.lease_s
                if time.monotonic() > deadline_s or self._stop.is_set():
                    raise
                self._stop.wait(RETRY_S)

    def __enter__(self) -> JobLease:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _keep(self) -> None:
        """Renew the lease until it is closed; the thread's target."""
        written = self._progress
        ended_s: float | None = None
        while not self._closed.wait(self._timings.report_every_s):
            progress = self._progress
            if self._end is not None:
                ended_s = ended_s or time.monotonic()
                if time.monotonic() - max(ended_s, self._reported_s) > self._timings.hang_s:
                    log.critical(
                        "job %s hangs in step %r: this process ends (%s)", self._job.id, progress.step, self._end
                    )
                    self._exit_hung()
            if progress == written and time.monotonic() - self._renewed_s < self._timings.renew_every_s:
                continue
            try:
                self._renew()
                written = progress
            except RegistryError as error:
                # The job continues. If another process reached the registry and took it, the next renewal says so.
                if time.monotonic() - self._warned_s > WARN_EVERY_S:
                    self._warned_s = time.monotonic()
                    log.warning("job %s: its lease was not renewed: %s", self._job.id, error)
            except Exception as error:
                # A mistake of ours. Without renewals another worker process would do the same work at the same time.
                log.exception("job %s: its lease was not renewed", self._job.id)
                if time.monotonic() - self._renewed_s > self._timings.lease_s:
                    self._end = LeaseLostError(f"the lease of job {self._job.id} could not be renewed: {error}")

    def _exit_hung(self) -> None:
        """Give the job back and end this process, even if giving back hangs."""
        timer = threading.Timer(self._timings.release_s, os._exit, (HUNG,))
        timer.daemon = True
        timer.start()
        # Before the lease expires, because the worker process after this one may be busy for hours with another job.
        with suppress(Exception):
            self._registry.release_job(self._job.id, self._worker, self._clock(), counted=True)
        timer.cancel()
        os._exit(HUNG)

    def _renew(self) -> None:
        progress = self._progress
        try:
            is_cancelled = self._registry.report_job(
                self._job.id,
                self._worker,
                self._clock(),
                self._timings.lease_s,
                step=progress.step,
                progress=progress.progress,
                eta_s=progress.eta_s(),
            )
            self._renewed_s = time.monotonic()
            if is_cancelled:
                self._end = JobCancelledError("the job was cancelled")
        except (LeaseLostError, UnknownJobError) as error:
            # A registry that was lost and made anew does not know the job.
            self._end = LeaseLostError(str(error))
        except RegistryError:
            self.unreachable_s = time.monotonic()
            raise
