"""The line between a running job and the registry: progress goes out, the lease is renewed, an end asked for comes in."""

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
from hplm.manage.lease_expiry import WATCH_S
from hplm.registry.catalog import LOOK_EVERY_S
from hplm.registry.records import Job
from hplm.registry.registry import Registry
from hplm.runtime.crash_points import crash_point

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
AGAIN_S = 0.5
COMPLAIN_EVERY_S = 30.0
# A worker's status that had to leave a job that hangs, or whose device is lost.
HUNG = 75


@dataclass(frozen=True)
class LeaseTimes:
    """A job is held for `lease_s`; `beat_s` after each renewal comes the next, sooner where there is progress to tell.

    Another worker watches a lease that is over for `watch_s` before it takes the job. A tenant's job ends `seen_s` after its
    version is published: servers have looked by then, and whoever hears of the end may ask the tenant at once. A job that is
    to end, and has not asked for `hang_s` whether it is, hangs: it is given back, within `release_s`, and the process ends.
    """

    lease_s: float = 30.0
    beat_s: float = 5.0
    tell_s: float = 0.5
    watch_s: float = WATCH_S
    seen_s: float = 3 * LOOK_EVERY_S
    hang_s: float = 60.0
    release_s: float = 10.0


@dataclass(frozen=True)
class _At:
    """Where a job is, when its step began, and where it was then: one that goes on where it was killed leaps between steps."""

    step: str
    progress: float
    began_s: float
    first: float

    def eta_s(self) -> float | None:
        """As if the rest went as fast as this step did; None while that says nothing."""
        done = self.progress - self.first
        return (time.monotonic() - self.began_s) * (1 - self.progress) / done if done >= 0.02 else None


class JobReport:
    """A Report whose news a thread of its own brings to the registry, so that training never waits for a database.

    Calling it raises JobCancelledError, StoppingError or LeaseLostError where the job is to end. A context manager.
    """

    def __init__(
        self,
        registry: Registry,
        job: Job,
        worker: str,
        stop: threading.Event,
        times: LeaseTimes,
        clock: Callable[[], float],
    ) -> None:
        self._registry, self._job, self._worker = registry, job, worker
        self._stop, self._times, self._clock = stop, times, clock
        self._at = _At("", 0.0, time.monotonic(), 0.0)
        self._end: HplmError | None = None
        self._closed = threading.Event()
        self._renewed_s = self._asked_s = time.monotonic()
        self._complained_s = -math.inf
        self.away_s = -math.inf
        """When the registry could last not be reached, monotonic."""
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __call__(self, step: str, progress: float) -> None:
        progress, before = min(1.0, max(0.0, progress)), self._at
        if step == before.step:
            self._at = replace(before, progress=progress)
        else:
            self._at = _At(step, progress, time.monotonic(), progress)
        self._asked_s = time.monotonic()
        crash_point("job.reported")
        if self._stop.is_set():
            raise StoppingError("the worker is shutting down")
        if self._end is not None:
            raise self._end

    def held(self) -> None:
        """Renew the lease now. Raises LeaseLostError or JobCancelledError where nothing may be published, and RegistryError."""
        self._renew()
        if self._end is not None:
            raise self._end

    def insist(self, ask: Callable[[], Answer]) -> Answer:
        """Ask the registry, again while it refuses: for as long as it is away, for a lease where it is there.

        Nobody takes a job from a registry that is away, and a trained tenant may be at stake.
        """
        deadline_s = time.monotonic() + self._times.lease_s
        while True:
            # Who waits for the registry does not hang.
            self._asked_s = time.monotonic()
            try:
                return ask()
            except RegistryError:
                if self.away_s > self._renewed_s:
                    deadline_s = time.monotonic() + self._times.lease_s
                if time.monotonic() > deadline_s or self._stop.is_set():
                    raise
                self._stop.wait(AGAIN_S)

    def __enter__(self) -> JobReport:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _beat(self) -> None:
        told = self._at
        ended_s: float | None = None
        while not self._closed.wait(self._times.tell_s):
            now = self._at
            if self._end is not None:
                ended_s = ended_s or time.monotonic()
                if time.monotonic() - max(ended_s, self._asked_s) > self._times.hang_s:
                    log.critical("job %s hangs in step %r: this worker ends (%s)", self._job.id, now.step, self._end)
                    # Whatever giving the job back may hang in.
                    last = threading.Timer(self._times.release_s, os._exit, (HUNG,))
                    last.daemon = True
                    last.start()
                    # Now: the worker after this one may have another job before the lease runs out, and be hours at it.
                    with suppress(Exception):
                        self._registry.release_job(self._job.id, self._worker, self._clock(), counted=True)
                    last.cancel()
                    os._exit(HUNG)
            if now == told and time.monotonic() - self._renewed_s < self._times.beat_s:
                continue
            try:
                self._renew()
                told = now
            except RegistryError as error:
                # The job goes on. Should another worker have reached the registry and taken it, the next renewal says so.
                if time.monotonic() - self._complained_s > COMPLAIN_EVERY_S:
                    self._complained_s = time.monotonic()
                    log.warning("job %s: its lease was not renewed: %s", self._job.id, error)
            except Exception as error:
                # A mistake of ours: without renewals another worker would do the same work beside this one.
                log.exception("job %s: its lease was not renewed", self._job.id)
                if time.monotonic() - self._renewed_s > self._times.lease_s:
                    self._end = LeaseLostError(f"job {self._job.id} could not be held on to: {error}")

    def _renew(self) -> None:
        at = self._at
        try:
            cancelled = self._registry.report_job(
                self._job.id,
                self._worker,
                self._clock(),
                self._times.lease_s,
                step=at.step,
                progress=at.progress,
                eta_s=at.eta_s(),
            )
            self._renewed_s = time.monotonic()
            if cancelled:
                self._end = JobCancelledError("the job was cancelled")
        except (LeaseLostError, UnknownJobError) as error:
            # Unknown: of a registry that was made anew meanwhile.
            self._end = LeaseLostError(str(error))
        except RegistryError:
            self.away_s = time.monotonic()
            raise
