"""Manage requests in a few threads of their own: bytes in, bytes out, and a slow one keeps nobody waiting."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

from hplm.errors import BadManageRequestError, CancelledError, HplmError, InternalError, QueueFullError, StoppingError
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.serving.counts import Counts
from hplm.serving.replies import is_gone

Handle = Callable[[bytes], dict[str, Any]]
Reply = Callable[[bytes | HplmError], None]
# Its number, its bytes, and whether its client has gone.
Request = tuple[int, bytes, Callable[[], bool]]
# For what is under way at the end: a request that hangs, as on a dead file system, keeps nobody.
STOP_S = 2.0
STOPPING = StoppingError("the server is shutting down")


@dataclass(frozen=True)
class Lane:
    """`threads` that answer requests of up to `most_bytes`; beyond `capacity` under way or waiting, one more is refused."""

    most_bytes: int
    threads: int
    capacity: int


# Requests for a word or a list overtake those that bring a piece of a file; of these only a few lie in memory at once.
LANES = (Lane(64 << 10, threads=4, capacity=256), Lane(12 << 20, threads=2, capacity=8))


class _OpenLane(NamedTuple):
    most_bytes: int
    room: threading.Semaphore
    waiting: SimpleQueue[Request | None]
    threads: list[threading.Thread]


class ManageStage:
    """Answers every request exactly once: with what `handle` returns, or with its error."""

    def __init__(self, handle: Handle, lanes: Sequence[Lane] = LANES) -> None:
        self._handle = handle
        # Of requests without an answer: whoever takes one out of here answers it.
        self._replies: dict[int, Reply] = {}
        self._numbers = itertools.count()
        self._stopping = False
        self._submitting = threading.Lock()
        self._counts = Counts()
        self._lanes = [self._opened(lane) for lane in sorted(lanes, key=lambda lane: lane.most_bytes)]

    def _opened(self, lane: Lane) -> _OpenLane:
        opened = _OpenLane(lane.most_bytes, threading.Semaphore(lane.capacity), SimpleQueue(), [])
        for _ in range(lane.threads):
            # Daemons: one that hangs keeps no process from ending.
            opened.threads.append(threading.Thread(target=self._serve, args=(opened,), name="manage", daemon=True))
            opened.threads[-1].start()
        return opened

    @property
    def counts(self) -> Counter[str]:
        """Answers by outcome, `ok` or an error's code in lower case, since the start."""
        return self._counts.read()

    @property
    def waiting(self) -> int:
        """Requests under way or waiting now."""
        return len(self._replies)

    def submit(self, raw: bytes, reply: Reply, is_cancelled: Callable[[], bool]) -> None:
        """Start a request, or refuse it at once: too large, or too many of its size under way."""
        lane = next((lane for lane in self._lanes if len(raw) <= lane.most_bytes), None)
        if lane is None:
            most = self._lanes[-1].most_bytes
            text = f"a manage request has at most {most:,} bytes, this one {len(raw):,}; files go in chunks"
            self._answer(reply, BadManageRequestError(text))
        elif not lane.room.acquire(blocking=False):
            self._answer(reply, QueueFullError("too many manage requests wait; try again later"))
        else:
            with self._submitting:
                if is_taken := not self._stopping:
                    number = next(self._numbers)
                    self._replies[number] = reply
                    lane.waiting.put((number, raw, is_cancelled))
            if not is_taken:
                self._answer(reply, STOPPING)

    def count_refused(self, error: HplmError) -> None:
        """Of a request that could not even be submitted."""
        self._counts.add_answer(error)

    def stop(self) -> None:
        """Take nothing more; what is under way ends, what waits or takes longer than `STOP_S` is refused."""
        with self._submitting:
            self._stopping = True
        for lane in self._lanes:
            for _ in lane.threads:
                lane.waiting.put(None)
        until_s = time.monotonic() + STOP_S
        for thread in (thread for lane in self._lanes for thread in lane.threads):
            thread.join(max(0.0, until_s - time.monotonic()))
        for number in list(self._replies):
            if (reply := self._replies.pop(number, None)) is not None:
                self._answer(reply, StoppingError("the server is shutting down; what was asked may still be done"))

    def _serve(self, lane: _OpenLane) -> None:
        while (request := lane.waiting.get()) is not None:
            number, raw, is_cancelled = request
            if self._stopping:
                answer: bytes | HplmError = STOPPING
            elif is_gone(is_cancelled):
                answer = CancelledError("the client has gone; nothing was done")
            else:
                answer = answered(self._handle, raw)
            reply = self._replies.pop(number, None)
            # Before the answer leaves: whoever asks again on it must find room.
            lane.room.release()
            if reply is not None:
                self._answer(reply, answer)
            del request, raw, is_cancelled, answer, reply  # a thread that only waits must hold no request

    def _answer(self, reply: Reply, answer: bytes | HplmError) -> None:
        self._counts.add_answer(answer)
        try:
            reply(answer)
        except Exception as error:
            log_rate_limited("manager: an answer could not be sent", error)
            self._counts.add("failed_answers")


def answered(handle: Handle, raw: bytes) -> bytes | HplmError:
    """What `handle` returns as JSON, or its error; what nobody expected is for the log alone."""
    try:
        # In ASCII: half a surrogate pair, which a file's key can hold, is no UTF-8.
        return json.dumps(handle(raw)).encode()
    except HplmError as error:
        return error
    except BaseException as error:
        # Also what is no Exception, as a panic in Rust: its thread would answer nobody any more.
        log_rate_limited(f"a manage request failed ({type(error).__name__})", error)
        return InternalError("the server failed on this manage request; its log says why")
