"""The worker: takes one job after another from the registry and sees each to an end, whatever happens to it."""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import sys
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
from hplm.housekeeping.inventory import look
from hplm.manage.lease_expiry import LeaseExpiry
from hplm.manage.uploads import Uploads
from hplm.registry.jobs import MOST_ATTEMPTS
from hplm.registry.records import Job
from hplm.registry.registry import Registry
from hplm.registry.uploads import dropped_with, uploads_of
from hplm.runtime.crash_points import crash_point
from hplm.store.layout import Store
from hplm_builder.jobs.job_context import Bench
from hplm_builder.jobs.job_progress import HUNG, JobReport, LeaseTimes

log = logging.getLogger(__name__)

LOOK_S = 0.5
CLEAN_S = 60.0
LONGEST_PAUSE_S = 10.0


class Worker:
    """Works on the jobs of a store until `stop` is set. Several workers may share a store."""

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        device: str = "cpu",
        times: LeaseTimes | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`name` must be no other worker's, also none that was killed a moment ago."""
        self._store, self._name, self._device, self._clock = store, name, device, clock
        self._times = times or LeaseTimes()
        self._lapses = LeaseExpiry(self._times.watch_s)
        self.stop = threading.Event()
        self._current: tuple[Registry, Job] | None = None
        self._away_s = -math.inf  # when the registry could last not be reached

    def run(self, *, until_idle: bool = False) -> None:
        """Take jobs until `stop` is set, or with `until_idle` until there is none. Waits for a registry that is not there.

        With `until_idle` raises MissingRegistryError where there is none, MissingArtifactError where it is another store's
        or the store is not there.
        """
        pause_s = LOOK_S
        while not self.stop.is_set():
            began_s = time.monotonic()
            try:
                with contextlib.closing(Registry.open(self._store)) as registry:
                    garbage_collection.check_is_its_registry(self._store, registry.snapshot(), look(self._store))
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
                # What was there for longer than a pause is not away each time.
                was_there = time.monotonic() - began_s > LONGEST_PAUSE_S
                pause_s = 2 * LOOK_S if was_there else min(2 * pause_s, LONGEST_PAUSE_S)
                self.stop.wait(pause_s)
                self._away_s = time.monotonic()

    def give_back(self) -> None:
        """Put the job under way back into the queue, from another thread: only for a process that ends right after."""
        if (current := self._current) is not None:
            registry, job = current
            with contextlib.suppress(HplmError):
                registry.release_job(job.id, self._name, self._clock())

    def _take_jobs(self, registry: Registry, until_idle: bool) -> None:
        while not self.stop.is_set():
            # Where the store has gone, each job would fail, and its uploads go with it.
            self._store.bases()
            job = registry.claim_job(self._name, self._clock(), self._times.lease_s, lapsed=self._lapsed)
            if job is not None:
                crash_point("job.claimed")
                self._current = registry, job
                report = JobReport(registry, job, self._name, self.stop, self._times, self._clock)
                try:
                    self._work(registry, job, report)
                finally:
                    self._current = None
                    self._away_s = max(self._away_s, report.away_s)
                continue
            if until_idle and not self._lapses.is_watching:
                return
            self.stop.wait(LOOK_S)

    def _lapsed(self, over: Mapping[str, float]) -> set[str]:
        found = self._lapses(over)
        # Leases that ran out while the registry was away are good for another one: their workers may live.
        return found if time.monotonic() - self._away_s > self._times.lease_s else set()

    @contextlib.contextmanager
    def _cleaning(self, registry: Registry) -> Iterator[None]:
        """Clean now and then from a thread of its own: a job may take hours, and many may wait."""
        ended = threading.Event()

        def keep_clean() -> None:
            while True:
                try:
                    self._clean(registry)
                except (RegistryError, MissingArtifactError, OSError) as error:
                    log.warning("not cleaned for now: %s", error)
                except Exception:
                    # A mistake of ours must not be the last that is heard of cleaning.
                    log.exception("not cleaned for now")
                if ended.wait(CLEAN_S):
                    return

        thread = threading.Thread(target=keep_clean, name="clean", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _work(self, registry: Registry, job: Job, report: JobReport) -> None:
        """Do a job and say how it ended. Raises RegistryError where that cannot be said: the lease will run out."""
        log.info("job %s: %s of %s begins, attempt %d", job.id, job.kind, job.subject, job.attempts)
        uploads = Uploads(self._store, registry)
        with report:
            bench = Bench(self._store, registry, uploads, report, self._clock, self._device)
            error: HplmError | None = None
            result = None
            is_device_lost = False
            try:
                # Only now: a worker that waits does without torch and its memory. The lease is renewed meanwhile.
                from hplm_builder.jobs.handlers import run_job

                result = report.insist(lambda: run_job(job, bench))
                if result.get("published"):
                    self.stop.wait(self._times.seen_s)
            except (RegistryError, LeaseLostError) as lost:
                log.warning("job %s is left to whoever takes it next: %s", job.id, lost.wire())
                return
            except HplmError as found:
                error = _unread_upload(job, found) or found
            except OSError as failed:
                log.exception("job %s failed", job.id)
                error = StoreUnavailableError(f"the worker cannot read or write a file it needs: {failed.strerror}")
                error.__cause__ = failed
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as failed:
                # Also what is no Exception, as a panic in Rust: every worker that took the job would end with it.
                log.exception("job %s failed", job.id)
                error, is_device_lost = _error_of(failed)
            _let_go(error)
            if _tries_again(job, error):
                # Still held, so that no other worker meets the same disk at once.
                self.stop.wait(self._times.lease_s)
            has_ended = False
            try:
                has_ended = report.insist(lambda: self._end(registry, job, result, error))
                log.info("job %s: %s", job.id, "done" if error is None else error.wire())
            except (LeaseLostError, UnknownJobError) as lost:
                log.warning("job %s was another's before its end: %s", job.id, lost)
        if has_ended:
            self._consume(uploads, job, error)
        if is_device_lost:
            log.critical("this worker's device is lost: it ends, for every later job would fail")
            raise SystemExit(HUNG)

    def _end(self, registry: Registry, job: Job, result: dict[str, object] | None, error: HplmError | None) -> bool:
        """Whether the job has ended; else it is in the queue again."""
        now_s = self._clock()
        if error is None:
            registry.finish_job(job.id, self._name, now_s, result=result)
        elif isinstance(error, StoppingError) or _tries_again(job, error):
            return not registry.release_job(job.id, self._name, now_s, counted=not isinstance(error, StoppingError))
        elif isinstance(error, JobCancelledError):
            registry.finish_job(job.id, self._name, now_s, cancelled=True)
        else:
            registry.finish_job(job.id, self._name, now_s, error={"code": error.code, "message": str(error)})
        return True

    def _consume(self, uploads: Uploads, job: Job, error: HplmError | None) -> None:
        """Inputs go when they have served, never can, or the request says so; else a new job may name them till they expire."""
        crash_point("job.finished")
        shutil.rmtree(self._store.scratch(job.id), ignore_errors=True)
        served = error is None and not job.request["dry_run"]
        if served or isinstance(error, DataError | CorpusTooSmallError):
            uploads.consume(uploads_of(job.request))
        else:
            uploads.consume(dropped_with(job.request))
        crash_point("job.consumed")

    def _clean(self, registry: Registry) -> None:
        """Remove what nobody uses any more."""
        removed = garbage_collection.collect(self._store, registry, self._clock())
        for paths in (removed.retired, removed.uploads, [one.path for one in (*removed.leftovers, *removed.strays)]):
            for path in paths:
                log.info("removed %s", path)
        for problem in removed.stuck:
            log.warning("%s: %s", problem.where, problem.what)


def _error_of(failed: BaseException) -> tuple[HplmError, bool]:
    """What a job fails with that stumbled over a mistake of ours, or over its device; and whether that is lost for good."""
    if (torch := sys.modules.get("torch")) is not None:
        from hplm.models.device import is_device_lost

        if isinstance(failed, torch.OutOfMemoryError):
            return StoreUnavailableError("the device has no memory left for this job"), False
        if is_device_lost(failed):
            return StoreUnavailableError("the worker's device was lost on this job; its log says why"), True
    return InternalError("the worker failed on this job; its log says why"), False


def _unread_upload(job: Job, found: HplmError) -> HplmError | None:
    """What a job fails with that cannot read what was sent, which is not the sender's to mend."""
    if not isinstance(found, DataError) or not isinstance(found.__cause__, OSError) or not uploads_of(job.request):
        return None
    log.error("job %s: %s; does this worker run as the server's user?", job.id, found)
    error = StoreUnavailableError(str(found))
    error.__cause__ = found.__cause__
    return error


def _let_go(error: BaseException | None) -> None:
    """Of what a failed job's frames hold: its features or its corpus would live as long as the error that came through them."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:  # causes may go round
        traceback.clear_frames(error.__traceback__)
        seen.append(error)
        error = error.__cause__ or error.__context__


def _tries_again(job: Job, error: HplmError | None) -> bool:
    """Whether what stopped a job may pass, a full disk, and it goes on from what it kept: as often as after a lost worker."""
    if not isinstance(error, StoreUnavailableError) or job.attempts >= MOST_ATTEMPTS:
        return False
    return not isinstance(error.__cause__, OSError) or error.__cause__.errno in PASSING
