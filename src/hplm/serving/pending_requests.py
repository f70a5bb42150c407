"""Requests that wait for what they need, such as files, before they may be queued."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from hplm.errors import CancelledError, DeadlineError, HplmError, StoppingError
from hplm.serving.replies import Answers, Job, is_gone

T = TypeVar("T")
# A request that waited this long is asked whether its client is still there; asking is a round trip to the server.
ASK_CANCELLED_AFTER_S = 0.25
SWEPT_AT_ONCE = 8


def check_time_left(deadline_s: float) -> None:
    """Before anything is loaded for a request. Raises DeadlineError; times are of the monotonic clock."""
    if deadline_s <= time.monotonic():
        raise DeadlineError("the deadline cannot be met; it was not computed")


def resolve_future(future: Future[T], then: Callable[[T], None]) -> BaseException | None:
    """Give `then` what a future has found. Returns what either failed with: futures swallow what their callbacks raise."""
    # Asked for, not raised: each raise would make the traceback that all who wait share longer.
    if (error := future.exception()) is not None:
        return error
    try:
        then(future.result())
    except BaseException as unexpected:
        return unexpected
    return None


class PendingRequest:
    """A request that waits: answered without what it needs, where its time or its client has gone.

    `forget` is called when it waits no longer, for whatever reason.
    """

    def __init__(self, job: Job[Any, Any], deadline_s: float, forget: Callable[[], None]) -> None:
        self.deadline_s = deadline_s
        self._forget = forget
        self._job: Job[Any, Any] | None = job
        self._lock = threading.Lock()

    def release(self) -> Job[Any, Any] | None:
        """The request where it still waited: who gets it answers or queues it, and nobody else does.

        What it holds is let go of, however long what it waited for goes on hanging.
        """
        with self._lock:
            job, self._job = self._job, None
        if job is not None:
            self._forget()
        return job

    @property
    def job(self) -> Job[Any, Any] | None:
        """The request where it was not released yet."""
        return self._job


class PendingRequests:
    """All that a stage holds. Safe to use from several threads."""

    def __init__(self, answers: Answers, clock: Callable[[], float]) -> None:
        self._answers = answers
        self._clock = clock
        self._ids = itertools.count()
        self._held: dict[int, tuple[float, PendingRequest]] = {}
        self._lock = threading.Lock()
        self._stopping = False

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, job: Job[Any, Any], deadline_s: float) -> PendingRequest:
        """Look after a request until it is released; times are of the clock. Refused where the stage stops."""
        held_id = next(self._ids)

        def forget() -> None:
            with self._lock:
                self._held.pop(held_id, None)

        held = PendingRequest(job, deadline_s, forget)
        with self._lock:
            stopping = self._stopping
            if not stopping:
                self._held[held_id] = self._clock(), held
        if stopping:
            self._end(held, StoppingError("the server is shutting down"))
        return held

    def sweep(self, last: int) -> int:
        """Refuse those whose time has gone or that are over, and of those behind request `last` those whose clients have gone.

        Returns the last that was asked for, -1 to begin at the front again: a few at a time, for asking takes its time.
        """
        with self._lock:
            now = self._clock()
            late = [held for _, held in self._held.values() if held.deadline_s <= now]
            over = [held for _, held in self._held.values() if (job := held.job) is not None and job.is_over()]
            old = (
                (held_id, held)
                for held_id, (since_s, held) in self._held.items()
                if held_id > last and now - since_s > ASK_CANCELLED_AFTER_S
            )
            asked = list(itertools.islice(old, SWEPT_AT_ONCE))
        for held in late:
            self._end(
                held, DeadlineError("what this request needs was not loaded by its deadline; it was not computed")
            )
        for held in over:
            self._end(held, CancelledError("its request has an error already"))
        for _, held in asked:
            if (job := held.job) is not None and is_gone(job.is_cancelled):
                self._end(held, CancelledError("the client has gone"))
        return asked[-1][0] if len(asked) == SWEPT_AT_ONCE else -1

    def stop(self) -> None:
        """Refuse all, and whoever comes later."""
        with self._lock:
            self._stopping = True
            left = [held for _, held in self._held.values()]
        for held in left:
            self._end(held, StoppingError("the server is shutting down"))

    def _end(self, held: PendingRequest, error: HplmError) -> None:
        if (job := held.release()) is not None:
            self._answers.give(job, error)
