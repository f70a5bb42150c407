"""The stage of watches: one thread reads the jobs, and sends every change of a job to all clients that watch it."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

from hplm.core import wire
from hplm.errors import (
    BadManageRequestError,
    ForbiddenError,
    HplmError,
    InternalError,
    QueueFullError,
    StoppingError,
    UnknownJobError,
)
from hplm.manage.access import ANYONE, Caller, check_job
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.serving.counts import Counts
from hplm.serving.manage_stage import ManageRequest

# Seconds between two reads of the watched jobs.
LOOK_EVERY_S = 0.2
# Seconds until a watch is closed; its client watches again if it wants more. An open stream keeps Triton from unloading the
# model and from shutting down, and the watch of a client that has gone would stay for good.
WATCH_S = 2.0
MOST_WATCHERS = 1000
MOST_BYTES = 1 << 10
# Seconds that `stop` waits for a read under way. A read that hangs, as on a dead file system, must not keep the server.
STOP_S = 2.0
EVENT_KEYS = ("state", "step", "progress", "eta_s", "error", "result")


@dataclass
class Watcher:
    """One watch: its request, whose it is, the event that was sent last, and when the watch is closed."""

    request: ManageRequest
    caller: Caller = ANYONE
    last_event: bytes | HplmError = b""
    until_s: float = 0.0


class WatchedJobs(Protocol):
    """What a stage of watches needs of `hplm.manage.service.ManageService`, whose methods these are."""

    def admit(self, key: bytes) -> Caller: ...

    def note_unread(self, caller: Caller, error: HplmError) -> None: ...

    def watched(self, raw: bytes, caller: Caller) -> str: ...

    def job_state(self, job_id: str) -> dict[str, Any]: ...


class WatchStage:
    """Sends watchers a job's state at once, then its changes, until the job ends or WATCH_S have passed.

    The thread begins at `start`.
    """

    def __init__(self, jobs: WatchedJobs, *, most_watchers: int = MOST_WATCHERS) -> None:
        self._jobs = jobs
        self._most_watchers = most_watchers
        self._watchers: dict[str, list[Watcher]] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._counts = Counts()
        self._thread = threading.Thread(target=self._loop, name="manage-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the stage takes watches: it is started and not stopped."""
        return not self._stopping and self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """The number of clients that watch a job now."""
        with self._changed:
            return sum(map(len, self._watchers.values()))

    @property
    def counts(self) -> Counter[str]:
        """Watches by how they ended, `ok` or an error's code in lower case; and `events` sent."""
        return self._counts.read()

    def submit(self, request: ManageRequest) -> None:
        """Watch the job that `{"action": "job.watch", "job": ...}` names, or refuse at once."""
        try:
            caller = self._jobs.admit(request.item.key)
            if len(request.item.raw) > MOST_BYTES:
                # The request is parsed in this thread, and all other watches wait for that.
                error = BadManageRequestError(f"a watch names a job, in {MOST_BYTES:,} bytes at most")
                self._jobs.note_unread(caller, error)
                raise error
            job = self._jobs.watched(request.item.raw, caller)
            with self._changed:
                if self._stopping:
                    raise StoppingError("the server is shutting down")
                if sum(map(len, self._watchers.values())) >= self._most_watchers:
                    raise QueueFullError(f"{self._most_watchers} clients watch already; ask for job.show instead")
                self._watchers.setdefault(job, []).append(Watcher(request, caller))
                self._changed.notify()
        except HplmError as error:
            self._end(Watcher(request), error)

    def count_refused(self, error: HplmError) -> None:
        """Count a request that was refused before it could be submitted."""
        self._counts.add_answer(error)

    def look(self, now_s: float) -> None:
        """Read the watched jobs, send every watcher what is new, and forget watchers whose watch has ended."""
        with self._changed:
            watched = {job: list(watchers) for job, watchers in self._watchers.items()}
        for job, watchers in watched.items():
            if self._stopping:
                return
            event, is_last, subject = self._state(job)
            if self._stopping:
                # The read may have taken so long that `stop` has answered the watchers.
                return
            remaining = []
            for watcher in watchers:
                own_event = self._visible(watcher, event, subject)
                if self._tell(watcher, own_event, is_last or own_event is not event, now_s):
                    remaining.append(watcher)
            with self._changed:
                if job not in self._watchers:
                    # `stop` did not wait any longer for this read.
                    return
                newcomers = self._watchers[job][len(watchers) :]
                if remaining or newcomers:
                    self._watchers[job] = remaining + newcomers
                else:
                    del self._watchers[job]

    def stop(self) -> None:
        """Refuse new watches, and tell all watchers that the server is shutting down."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(STOP_S)
        with self._changed:
            watched, self._watchers = self._watchers, {}
        for watchers in watched.values():
            for watcher in watchers:
                self._end(watcher, StoppingError("the server is shutting down"))

    def _loop(self) -> None:
        while True:
            with self._changed:
                # `stop` may have notified during the last read, and does so only once.
                if not self._stopping:
                    self._changed.wait(LOOK_EVERY_S if self._watchers else None)
                if self._stopping:
                    return
            self.look(time.monotonic())

    def _state(self, job: str) -> tuple[bytes | HplmError, bool, str]:
        """Return a job's event, or the error instead of it, whether it is the last event, and the subject of the job."""
        try:
            shown = self._jobs.job_state(job)
            event = json.dumps({key: shown[key] for key in EVENT_KEYS})
            return event.encode(), shown["state"] not in wire.JOB_UNFINISHED, str(shown["subject"])
        except HplmError as error:
            return error, True, ""
        except Exception as error:
            log_rate_limited(f"job {job} could not be looked up", error)
            return InternalError("the server failed to look this job up; its log says why"), True, ""

    def _visible(self, watcher: Watcher, event: bytes | HplmError, subject: str) -> bytes | HplmError:
        """Return the event, or ForbiddenError if the watcher's key may not see a job of this subject."""
        if isinstance(event, HplmError) and not isinstance(event, UnknownJobError):
            return event
        try:
            check_job(watcher.caller, lambda: subject)
        except ForbiddenError as error:
            return error
        return event

    def _tell(self, watcher: Watcher, event: bytes | HplmError, is_last: bool, now_s: float) -> bool:
        """Send a watcher an event if it is new. Returns whether the watch continues."""
        if not watcher.last_event:
            watcher.until_s = now_s + WATCH_S
        elif isinstance(event, HplmError) and event.status == "UNAVAILABLE":
            # A registry that is busy for a moment must end no watch.
            event, is_last = watcher.last_event, False
        if is_last or now_s >= watcher.until_s:
            self._end(watcher, event)
            return False
        if event != watcher.last_event:
            watcher.last_event = event
            self._send(watcher, event, is_last=False)
        return True

    def _end(self, watcher: Watcher, answer: bytes | HplmError) -> None:
        self._counts.add_answer(answer)
        self._send(watcher, answer, is_last=True)

    def _send(self, watcher: Watcher, answer: bytes | HplmError, *, is_last: bool) -> None:
        self._counts.add("events")
        try:
            watcher.request.reply(answer, is_last=is_last)
        except Exception as error:
            log_rate_limited("a watcher could not be told", error)
            self._counts.add("failed_answers")
