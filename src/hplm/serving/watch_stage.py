"""Watching jobs: every change of a job goes to all who watch it, from one thread however many they are."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hplm.core import wire
from hplm.errors import BadManageRequestError, HplmError, InternalError, QueueFullError, StoppingError
from hplm.manage.requests import OfJob, parse_request
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.serving.counts import Counts
from hplm.serving.manage_stage import Handle

LOOK_EVERY_S = 0.2
# A watch is closed after so long, and whoever still wants to know asks again: a stream that stays open keeps Triton from
# unloading the model and from shutting down, and a watch whose client has gone would stay for good.
WATCH_S = 2.0
MOST_WATCHERS = 1000
MOST_BYTES = 1 << 10
# For a look at the registry that is under way at the end: one that hangs, as on a dead file system, keeps nobody.
STOP_S = 2.0
EVENT_KEYS = ("state", "step", "progress", "eta_s", "error", "result")


class Reply(Protocol):
    """Sends one event or an error, the last one so marked."""

    def __call__(self, answer: bytes | HplmError, *, is_last: bool = True) -> None: ...


@dataclass
class Watcher:
    """One watch: how to reach its client, what that was told last, when the watch is closed."""

    reply: Reply
    told: bytes | HplmError = b""
    until_s: float = 0.0


class WatchStage:
    """Tells watchers a job's state at once, then whatever changes, for WATCH_S or until it ends. Not started until `start`."""

    def __init__(self, handle: Handle, *, most_watchers: int = MOST_WATCHERS) -> None:
        self._handle = handle
        self._most_watchers = most_watchers
        self._watchers: dict[str, list[Watcher]] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._counts = Counts()
        self._thread = threading.Thread(target=self._loop, name="manage-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Clients that watch a job now."""
        with self._changed:
            return sum(map(len, self._watchers.values()))

    @property
    def counts(self) -> Counter[str]:
        """Watchers by how they ended: `ok`, or an error's code in lower case; and `events` sent."""
        return self._counts.read()

    def submit(self, raw: bytes, reply: Reply, is_cancelled: Callable[[], bool]) -> None:
        """Watch the job that `{"action": "job.watch", "job": ...}` names, or refuse at once."""
        try:
            if len(raw) > MOST_BYTES:
                # It is read here, where all others' watches wait for that.
                raise BadManageRequestError(f"a watch names a job, in {MOST_BYTES:,} bytes at most")
            _, request = parse_request(raw, {"job.watch": OfJob})
            assert isinstance(request, OfJob)
            with self._changed:
                if self._stopping:
                    raise StoppingError("the server is shutting down")
                if sum(map(len, self._watchers.values())) >= self._most_watchers:
                    raise QueueFullError(f"{self._most_watchers} clients watch already; ask for job.show instead")
                self._watchers.setdefault(request.job, []).append(Watcher(reply))
                self._changed.notify()
        except HplmError as error:
            self._end(Watcher(reply), error)

    def count_refused(self, error: HplmError) -> None:
        """Of a request that could not even be submitted."""
        self._counts.add_answer(error)

    def look(self, now_s: float) -> None:
        """Tell every watcher what is new since it was told last; forget those whose watch is over."""
        with self._changed:
            watched = {job: list(watchers) for job, watchers in self._watchers.items()}
        for job, watchers in watched.items():
            if self._stopping:
                return
            event, is_last = self._state(job)
            if self._stopping:
                # It may have taken so long that `stop` has told them.
                return
            left = [watcher for watcher in watchers if self._tell(watcher, event, is_last, now_s)]
            with self._changed:
                if job not in self._watchers:
                    # `stop` could not wait for this look.
                    return
                newcomers = self._watchers[job][len(watchers) :]
                if left or newcomers:
                    self._watchers[job] = left + newcomers
                else:
                    del self._watchers[job]

    def stop(self) -> None:
        """Take nobody more; who still watches is told that the server is shutting down."""
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
                # An end that was told during the last look is told to nobody again.
                if not self._stopping:
                    self._changed.wait(LOOK_EVERY_S if self._watchers else None)
                if self._stopping:
                    return
            self.look(time.monotonic())

    def _state(self, job: str) -> tuple[bytes | HplmError, bool]:
        """A job's event, or why there is none, and whether it is the last."""
        try:
            shown = self._handle(json.dumps({"action": "job.show", "job": job}).encode())["job"]
            event = json.dumps({key: shown[key] for key in EVENT_KEYS})
            return event.encode(), shown["state"] not in wire.JOB_UNFINISHED
        except HplmError as error:
            return error, True
        except Exception as error:
            log_rate_limited(f"job {job} could not be looked up", error)
            return InternalError("the server failed to look this job up; its log says why"), True

    def _tell(self, watcher: Watcher, event: bytes | HplmError, is_last: bool, now_s: float) -> bool:
        """Whether the watcher stays."""
        if not watcher.told:
            watcher.until_s = now_s + WATCH_S
        elif isinstance(event, HplmError) and event.status == "UNAVAILABLE":
            # A registry that is busy for a moment ends nobody's watch.
            event, is_last = watcher.told, False
        if is_last or now_s >= watcher.until_s:
            self._end(watcher, event)
            return False
        if event != watcher.told:
            watcher.told = event
            self._send(watcher, event, is_last=False)
        return True

    def _end(self, watcher: Watcher, answer: bytes | HplmError) -> None:
        self._counts.add_answer(answer)
        self._send(watcher, answer, is_last=True)

    def _send(self, watcher: Watcher, answer: bytes | HplmError, *, is_last: bool) -> None:
        self._counts.add("events")
        try:
            watcher.reply(answer, is_last=is_last)
        except Exception as error:
            log_rate_limited("a watcher could not be told", error)
            self._counts.add("failed_answers")
