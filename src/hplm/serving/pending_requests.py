"""Requests that wait until something is loaded for them, such as a tenant's weights, before they are queued."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Generator
from typing import Any

from hplm.errors import CancelledError, DeadlineError, HplmError, StoppingError
from hplm.serving.replies import Answers
from hplm.serving.request import Request

# A request that has waited for this long is asked whether its client has gone. Asking is a round trip to the server.
ASK_CANCELLED_AFTER_S = 0.25
# The most clients that one sweep asks for, because each takes a round trip.
SWEPT_AT_ONCE = 8


class PendingRequest:
    """A request whose `admission` waits for a load. It is refused at its deadline, or when its client has gone.

    `forget` is called once, when the request stops waiting for any reason.
    """

    def __init__(
        self,
        request: Request[Any, Any],
        admission: Generator[Any, Any, Any],
        deadline_s: float,
        forget: Callable[[], None],
    ) -> None:
        # None after the release.
        self.request: Request[Any, Any] | None = request
        self.admission: Generator[Any, Any, Any] | None = admission
        self.deadline_s = deadline_s
        self._forget = forget
        self._lock = threading.Lock()

    def release(self) -> Request[Any, Any] | None:
        """Return the request to the one caller that now queues or answers it; None to every later caller.

        The request's memory is free from then on, even if the load that it waited for hangs.
        """
        with self._lock:
            request, self.request, self.admission = self.request, None, None
        if request is not None:
            self._forget()
        return request


class PendingRequests:
    """All pending requests of a stage. Safe to use from several threads."""

    def __init__(self, answers: Answers, clock: Callable[[], float]) -> None:
        self._answers = answers
        self._clock = clock
        self._ids = itertools.count()
        # By id: since when each request is pending, and the request.
        self._pending: dict[int, tuple[float, PendingRequest]] = {}
        self._lock = threading.Lock()
        self._stopping = False

    def __len__(self) -> int:
        return len(self._pending)

    def hold(
        self, request: Request[Any, Any], admission: Generator[Any, Any, Any], deadline_s: float
    ) -> PendingRequest:
        """Keep a request until it is released; `deadline_s` is of the clock. A stage that stops refuses it at once."""
        pending_id = next(self._ids)

        def forget() -> None:
            with self._lock:
                self._pending.pop(pending_id, None)

        pending = PendingRequest(request, admission, deadline_s, forget)
        with self._lock:
            stopping = self._stopping
            if not stopping:
                self._pending[pending_id] = self._clock(), pending
        if stopping:
            self._end(pending, StoppingError("the server is shutting down"))
        return pending

    def sweep(self, last: int) -> int:
        """Refuse requests past their deadline, requests that are over, and requests whose clients have gone.

        Only clients of a few requests with ids above `last` are asked for, because each takes a round trip. Returns the last id
        that was asked for, or -1 to begin with the oldest again.
        """
        with self._lock:
            now = self._clock()
            late = [pending for _, pending in self._pending.values() if pending.deadline_s <= now]
            over = [
                pending
                for _, pending in self._pending.values()
                if (request := pending.request) is not None and request.client.is_over
            ]
            old = (
                (pending_id, pending)
                for pending_id, (since_s, pending) in self._pending.items()
                if pending_id > last and now - since_s > ASK_CANCELLED_AFTER_S
            )
            asked = list(itertools.islice(old, SWEPT_AT_ONCE))
        for pending in late:
            self._end(
                pending, DeadlineError("what this request needs was not loaded by its deadline; it was not computed")
            )
        for pending in over:
            self._end(pending, CancelledError("its request has an error already"))
        for _, pending in asked:
            if (request := pending.request) is not None and request.is_cancelled():
                self._end(pending, CancelledError("the client has gone"))
        return asked[-1][0] if len(asked) == SWEPT_AT_ONCE else -1

    def stop(self) -> None:
        """Refuse all pending requests, and every later one."""
        with self._lock:
            self._stopping = True
            remaining = [pending for _, pending in self._pending.values()]
        for pending in remaining:
            self._end(pending, StoppingError("the server is shutting down"))

    def _end(self, pending: PendingRequest, error: HplmError) -> None:
        if (request := pending.release()) is not None:
            self._answers.give(request.client, error)
