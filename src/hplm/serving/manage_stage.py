"""The stage of manage requests: a few threads of its own answer them, so that a slow request delays no other."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

from hplm.errors import BadManageRequestError, CancelledError, HplmError, InternalError, QueueFullError, StoppingError
from hplm.manage.access import Caller
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.serving.counts import Counts
from hplm.serving.request import Request


class ManageCall(NamedTuple):
    """A manage request as it came: JSON, and the text of a key, empty without one."""

    raw: bytes
    key: bytes = b""


class AdmittedCall(NamedTuple):
    """A manage request whose key was checked."""

    raw: bytes
    caller: Caller


Handle = Callable[[bytes, Caller], dict[str, Any]]
Admit = Callable[[bytes], Caller]
NoteUnread = Callable[[Caller, HplmError], None]
ManageRequest = Request[ManageCall, bytes]
AdmittedRequest = Request[AdmittedCall, bytes]
# Seconds that `stop` waits for requests under way. A request that hangs, as on a dead file system, must not keep the server.
STOP_S = 2.0
STOPPING = StoppingError("the server is shutting down")


@dataclass(frozen=True)
class Lane:
    """`threads` that answer requests of up to `most_bytes`. More than `capacity` under way or waiting are refused."""

    most_bytes: int
    threads: int
    capacity: int


# Small requests overtake requests with a piece of a file. Of those with a piece only a few lie in memory at once.
LANES = (Lane(64 << 10, threads=4, capacity=256), Lane(12 << 20, threads=2, capacity=8))


class _OpenLane(NamedTuple):
    most_bytes: int
    room: threading.Semaphore
    waiting: SimpleQueue[AdmittedRequest | None]
    threads: list[threading.Thread]


class ManageStage:
    """Answers every request exactly once: with what `handle` returns, or with its error.

    `admit` checks the key of a request before anything else looks at the request. `note_unread` hears of each request that
    is refused after that and before `handle` gets it.
    """

    def __init__(self, handle: Handle, admit: Admit, note_unread: NoteUnread, lanes: Sequence[Lane] = LANES) -> None:
        self._handle, self._admit, self._note_unread = handle, admit, note_unread
        # The thread that takes a request out of this set answers it.
        self._unanswered: set[AdmittedRequest] = set()
        self._stopping = False
        self._submitting = threading.Lock()
        self._counts = Counts()
        self._lanes = [self._opened(lane) for lane in sorted(lanes, key=lambda lane: lane.most_bytes)]

    def _opened(self, lane: Lane) -> _OpenLane:
        opened = _OpenLane(lane.most_bytes, threading.Semaphore(lane.capacity), SimpleQueue(), [])
        for _ in range(lane.threads):
            # Daemon threads: a thread that hangs must not keep the process from ending.
            opened.threads.append(threading.Thread(target=self._serve, args=(opened,), name="manage", daemon=True))
            opened.threads[-1].start()
        return opened

    @property
    def is_running(self) -> bool:
        """Whether the stage takes requests, and each lane has a thread that answers them."""
        return not self._stopping and all(any(map(threading.Thread.is_alive, lane.threads)) for lane in self._lanes)

    @property
    def counts(self) -> Counter[str]:
        """Answers by outcome since the start: `ok`, or an error's code in lower case."""
        return self._counts.read()

    @property
    def waiting(self) -> int:
        """The number of requests under way or waiting."""
        return len(self._unanswered)

    def submit(self, call: ManageRequest) -> None:
        """Start a request. It is refused at once without a valid key, if it is too large, or if too many are under way."""
        try:
            request = call.with_item(AdmittedCall(call.item.raw, self._admit(call.item.key)))
        except HplmError as error:
            self._answer(call, error)
            return
        size_bytes = len(request.item.raw)
        lane = next((lane for lane in self._lanes if size_bytes <= lane.most_bytes), None)
        if lane is None:
            most = self._lanes[-1].most_bytes
            text = f"a manage request has at most {most:,} bytes, this one {size_bytes:,}; files go in chunks"
            self._refuse(request, BadManageRequestError(text))
        elif not lane.room.acquire(blocking=False):
            self._refuse(request, QueueFullError("too many manage requests wait; try again later"))
        else:
            with self._submitting:
                if is_taken := not self._stopping:
                    self._unanswered.add(request)
                    lane.waiting.put(request)
            if not is_taken:
                self._refuse(request, STOPPING)

    def count_refused(self, error: HplmError) -> None:
        """Count a request that was refused before it could be submitted."""
        self._counts.add_answer(error)

    def stop(self) -> None:
        """Let requests under way end. Requests that wait, or that take longer than `STOP_S`, are refused."""
        with self._submitting:
            self._stopping = True
        for lane in self._lanes:
            for _ in lane.threads:
                lane.waiting.put(None)
        until_s = time.monotonic() + STOP_S
        for thread in (thread for lane in self._lanes for thread in lane.threads):
            thread.join(max(0.0, until_s - time.monotonic()))
        for request in list(self._unanswered):
            self._answer_once(request, StoppingError("the server is shutting down; what was asked may still be done"))

    def _serve(self, lane: _OpenLane) -> None:
        while (request := lane.waiting.get()) is not None:
            answer: bytes | HplmError
            if (error := self._why_not(request)) is None:
                answer = answered(self._handle, request.item)
            else:
                self._note_unread(request.item.caller, error)
                answer = error
            # Before the answer leaves: a client that sends its next request on it must find room.
            lane.room.release()
            self._answer_once(request, answer)
            del request, answer  # a thread that only waits must keep no request in memory

    def _why_not(self, request: AdmittedRequest) -> HplmError | None:
        """Return why a request that has waited is not answered any more, None if it is."""
        if self._stopping:
            return STOPPING
        return CancelledError("the client has gone; nothing was done") if request.is_cancelled() else None

    def _refuse(self, request: AdmittedRequest, error: HplmError) -> None:
        self._note_unread(request.item.caller, error)
        self._answer(request, error)

    def _answer_once(self, request: AdmittedRequest, answer: bytes | HplmError) -> None:
        try:
            self._unanswered.remove(request)
        except KeyError:
            # Another thread has answered the request while the server was shutting down.
            return
        self._answer(request, answer)

    def _answer(self, request: Request[Any, bytes], answer: bytes | HplmError) -> None:
        self._counts.add_answer(answer)
        try:
            request.reply(answer)
        except Exception as error:
            log_rate_limited("manager: an answer could not be sent", error)
            self._counts.add("failed_answers")


def answered(handle: Handle, call: AdmittedCall) -> bytes | HplmError:
    """Return what `handle` returns as JSON, or its error. Only the log says more of an unexpected error."""
    try:
        # JSON in ASCII: a file's key may hold half a surrogate pair, which is no UTF-8.
        return json.dumps(handle(*call)).encode()
    except HplmError as error:
        return error
    except BaseException as error:
        # Also errors that are no Exception, such as a panic in Rust: the thread must live on and answer.
        log_rate_limited(f"a manage request failed ({type(error).__name__})", error)
        return InternalError("the server failed on this manage request; its log says why")
