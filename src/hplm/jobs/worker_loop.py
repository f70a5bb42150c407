"""The loop of a worker process: it takes one job after another and brings each to an end."""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping

from hplm.errors import (
    PASSING,
    CorpusTooSmallError,
    DataError,
    HplmError,
    InternalError,
    JobCancelledError,
    LeaseLostError,
    MissingArtifactError,
    MissingRegistryError,
    RegistryError,
    StoppingError,
    StoreUnavailableError,
    UnknownJobError,
)
from hplm.housekeeping import garbage_collection
from hplm.housekeeping.inventory import list_entries
from hplm.jobs.context import JobContext, hide_store_paths
from hplm.jobs.handlers import DeviceLost, JobHandlers
from hplm.jobs.lease import HUNG, JobLease, JobTimings
from hplm.jobs.lease_expiry import LeaseExpiry
from hplm.registry.jobs import MOST_ATTEMPTS
from hplm.registry.records import Job
from hplm.registry.registry import Registry
from hplm.registry.uploads import uploads_of, uploads_to_drop
from hplm.runtime.crash_points import crash_point
from hplm.store.layout import Store

log = logging.getLogger(__name__)

POLL_S = 0.5  # pause between two looks for a job
CLEAN_EVERY_S = 60.0
LONGEST_PAUSE_S = 10.0  # longest pause before the next attempt to use a registry that cannot be used


class Worker:
    """Works on the jobs of a store until `stop` is set. Several workers may share a store."""

    def __init__(
        self,
        store: Store,
        name: str,
        load_handlers: Callable[[], JobHandlers],
        *,
        device: str = "cpu",
        timings: JobTimings | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`name` must belong to no other worker, not even to one that was killed a moment ago.

        `load_handlers` is called when the first job begins: a waiting worker does without torch and its memory.
        """
        self._store, self._name, self._device, self._clock = store, name, device, clock
        self._load_handlers = load_handlers
        self._timings = timings or JobTimings()
        self._expiry = LeaseExpiry(self._timings.watch_s)
        self.stop = threading.Event()
        self._current: tuple[Registry, Job] | None = None
        self._unreachable_s = -math.inf  # the last time at which the registry could not be reached

    def run(self, *, until_idle: bool = False) -> None:
        """Take jobs until `stop` is set, or with `until_idle` until there is none. Wait for a registry that is away.

        With `until_idle` raises MissingRegistryError if there is no registry, and MissingArtifactError if there is no
        store or the registry belongs to another store.
        """
        pause_s = POLL_S
        while not self.stop.is_set():
            began_s = time.monotonic()
            try:
                with contextlib.closing(Registry.open(self._store)) as registry:
                    garbage_collection.check_is_its_registry(
                        self._store, registry.snapshot(), list_entries(self._store)
                    )
                    with self._cleaning(registry):
                        self._take_jobs(registry, until_idle)
                    if until_idle:
                        self._clean(registry)
                if until_idle:
                    return
            except (RegistryError, MissingArtifactError, OSError) as error:
                if until_idle and isinstance(error, MissingRegistryError | MissingArtifactError):
                    raise
                log.warning("no jobs for now: %s", error)
                # The pauses double only while the registry keeps being away: after a long use they begin anew.
                was_usable = time.monotonic() - began_s > LONGEST_PAUSE_S
                pause_s = 2 * POLL_S if was_usable else min(2 * pause_s, LONGEST_PAUSE_S)
                self.stop.wait(pause_s)
                self._unreachable_s = time.monotonic()

    def give_back(self) -> None:
        """Put the running job back into the queue, from another thread. The process must end right after."""
        if (current := self._current) is not None:
            registry, job = current
            with contextlib.suppress(HplmError):
                registry.release_job(job.id, self._name, self._clock())

    def _take_jobs(self, registry: Registry, until_idle: bool) -> None:
        while not self.stop.is_set():
            # Raises if the store is away: each job would fail then, and its uploads would be dropped.
            self._store.bases()
            job = registry.claim_job(self._name, self._clock(), self._timings.lease_s, expired=self._expired)
            if job is not None:
                crash_point("job.claimed")
                self._current = registry, job
                lease = JobLease(registry, job, self._name, self.stop, self._timings, self._clock)
                try:
                    self._work(registry, job, lease)
                finally:
                    self._current = None
                    self._unreachable_s = max(self._unreachable_s, lease.unreachable_s)
                continue
            if until_idle and not self._expiry.is_watching:
                return
            self.stop.wait(POLL_S)

    def _expired(self, overdue: Mapping[str, float]) -> set[str]:
        """Return the jobs whose workers are lost, of those whose leases are past by the clock."""
        expired = self._expiry(overdue)
        # A lease that ended while the registry was away gets another lease's time: its worker may be alive.
        return expired if time.monotonic() - self._unreachable_s > self._timings.lease_s else set()

    @contextlib.contextmanager
    def _cleaning(self, registry: Registry) -> Iterator[None]:
        """Clean the store regularly in a thread of its own, because a job may take hours and many may wait."""
        ended = threading.Event()

        def keep_clean() -> None:
            while True:
                try:
                    self._clean(registry)
                except (RegistryError, MissingArtifactError, OSError) as error:
                    log.warning("not cleaned for now: %s", error)
                except Exception:
                    # A mistake of ours must not end the cleaning.
                    log.exception("not cleaned for now")
                if ended.wait(CLEAN_EVERY_S):
                    return

        thread = threading.Thread(target=keep_clean, name="clean", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _work(self, registry: Registry, job: Job, lease: JobLease) -> None:
        """Do a job and record how it ended. Raises RegistryError if that cannot be recorded; the lease will expire."""
        log.info("job %s: %s of %s begins, attempt %d", job.id, job.kind, job.subject, job.attempts)
        with lease:
            scratch = self._store.scratch(job.id)
            context = JobContext(self._store, registry, lease, self._clock, self._device, scratch)
            error: HplmError | None = None
            result = None
            is_device_lost = False
            try:
                # Imports torch, which takes seconds; the lease is renewed meanwhile.
                handler = self._load_handlers()[job.kind]
                with hide_store_paths(self._store, "a file of the base or of a domain cannot be used"):
                    result = lease.retry(lambda: handler.run(job, context))
                if result.get("published"):
                    self.stop.wait(self._timings.serve_wait_s)
            except (RegistryError, LeaseLostError) as lost:
                log.warning("job %s is left to the worker that takes it next: %s", job.id, lost.wire())
                return
            except HplmError as failed:
                error = _unreadable_upload(job, failed) or failed
            except OSError as failed:
                log.exception("job %s failed", job.id)
                error = StoreUnavailableError(f"the worker cannot read or write a file it needs: {failed.strerror}")
                error.__cause__ = failed
            except (KeyboardInterrupt, SystemExit):
                raise
            except DeviceLost:
                log.exception("job %s failed", job.id)
                error = StoreUnavailableError("the worker's device was lost on this job; its log says why")
                is_device_lost = True
            except BaseException:
                # A panic in Rust is no Exception. If it went through, every worker that took the job would end.
                log.exception("job %s failed", job.id)
                error = InternalError("the worker failed on this job; its log says why")
            _free_frames(error)
            if _may_retry(job, error):
                # The lease is kept, so that no other worker meets the same full disk at once.
                self.stop.wait(self._timings.lease_s)
            has_ended = False
            try:
                has_ended = lease.retry(lambda: self._end(registry, job, result, error))
                log.info("job %s: %s", job.id, "done" if error is None else error.wire())
            except (LeaseLostError, UnknownJobError) as lost:
                log.warning("another worker took job %s before its end: %s", job.id, lost)
        if has_ended:
            self._drop_inputs(registry, job, error)
        if is_device_lost:
            log.critical("this worker's device is lost: the process ends, because every later job would fail")
            raise SystemExit(HUNG)

    def _end(self, registry: Registry, job: Job, result: dict[str, object] | None, error: HplmError | None) -> bool:
        """Record how the job ended; return False if it is in the queue again instead."""
        now_s = self._clock()
        if error is None:
            registry.finish_job(job.id, self._name, now_s, result=result)
        elif isinstance(error, StoppingError) or _may_retry(job, error):
            return not registry.release_job(job.id, self._name, now_s, counted=not isinstance(error, StoppingError))
        elif isinstance(error, JobCancelledError):
            registry.finish_job(job.id, self._name, now_s, cancelled=True)
        else:
            registry.finish_job(job.id, self._name, now_s, error={"code": error.code, "message": str(error)})
        return True

    def _drop_inputs(self, registry: Registry, job: Job, error: HplmError | None) -> None:
        """Drop the job's uploads if they were used, can never be used, or the request says so.

        Other uploads stay until they expire: a new job may name them.
        """
        crash_point("job.finished")
        shutil.rmtree(self._store.scratch(job.id), ignore_errors=True)
        were_used = error is None and not job.request["dry_run"]
        if were_used or isinstance(error, DataError | CorpusTooSmallError):
            garbage_collection.drop_uploads(self._store, registry, uploads_of(job.request))
        else:
            garbage_collection.drop_uploads(self._store, registry, uploads_to_drop(job.request))
        crash_point("job.consumed")

    def _clean(self, registry: Registry) -> None:
        """Remove files that are no longer used, and log them."""
        removed = garbage_collection.collect(self._store, registry, self._clock())
        for finding in removed.removed:
            log.info("removed %s: %s", finding.where, finding.what)
        for finding in removed.stuck:
            log.warning("%s: %s", finding.where, finding.what)


def _unreadable_upload(job: Job, error: HplmError) -> HplmError | None:
    """Return the error of a job that cannot read its upload; None if `error` has another reason.

    The sender cannot mend that: the worker may run as another user than the server.
    """
    if not isinstance(error, DataError) or not isinstance(error.__cause__, OSError) or not uploads_of(job.request):
        return None
    log.error("job %s: %s; does this worker run as the server's user?", job.id, error)
    unavailable = StoreUnavailableError(str(error))
    unavailable.__cause__ = error.__cause__
    return unavailable


def _free_frames(error: BaseException | None) -> None:
    """Clear the frames of a failed job, which would keep its features or corpus in memory as long as the error lives."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:  # causes may form a circle
        traceback.clear_frames(error.__traceback__)
        seen.append(error)
        error = error.__cause__ or error.__context__


def _may_retry(job: Job, error: HplmError | None) -> bool:
    """Return whether the job may succeed later, for instance when a full disk has room, and has attempts left."""
    if not isinstance(error, StoreUnavailableError) or job.attempts >= MOST_ATTEMPTS:
        return False
    return not isinstance(error.__cause__, OSError) or error.__cause__.errno in PASSING
