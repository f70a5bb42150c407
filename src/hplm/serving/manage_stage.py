"""Manage requests in a few threads of their own: bytes in, bytes out, and a slow one keeps nobody waiting."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from hplm.errors import BadManageRequestError, CancelledError, HplmError, InternalError, QueueFullError, StoppingError
from hplm.serving.answers import is_gone
from hplm.serving.counts import Counts

Handle = Callable[[bytes], dict[str, Any]]
Reply = Callable[[bytes | HplmError], None]
Request = tuple[bytes, Reply, Callable[[], bool]]
# A request, or nothing more once somebody has taken it.
Box = list[Request]
# For what is under way at the end: a request that hangs, as on a dead file system, keeps nobody.
STOP_S = 2.0


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
    pool: ThreadPoolExecutor


class ManageStage:
    """Answers every request exactly once: with what `handle` returns, or with its error."""

    def __init__(self, handle: Handle, lanes: Sequence[Lane] = LANES) -> None:
        self._handle = handle
        self._lanes = [
            _OpenLane(lane.most_bytes, threading.Semaphore(lane.capacity), ThreadPoolExecutor(lane.threads, "manage"))
            for lane in sorted(lanes, key=lambda lane: lane.most_bytes)
        ]
        self._stopping = False
        self._waiting = 0
        self._changing = threading.Lock()
        # Of requests that a thread is at: whoever takes one out answers it.
        self._under_way: dict[int, Reply] = {}
        self._numbers = itertools.count()
        self._counts = Counts()

    @property
    def counts(self) -> Counter[str]:
        """Answers by outcome, `ok` or an error's code in lower case, since the start."""
        return self._counts.read()

    @property
    def waiting(self) -> int:
        """Requests under way or waiting now."""
        return self._waiting

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
            self._count_waiting(1)
            # A pool that cannot start a thread raises although it has queued the request: whoever takes it out of here answers.
            box: Box = [(raw, reply, is_cancelled)]
            try:
                lane.pool.submit(self._run, box, lane.room)
            except RuntimeError as error:
                if _taken(box) is not None:
                    self._leave(lane.room)
                    self._answer(reply, self._unstarted(error))

    def count_refused(self, error: HplmError) -> None:
        """Of a request that could not even be submitted."""
        self._counts.add_answer(error)

    def stop(self) -> None:
        """Take nothing more; what is under way ends, what waits or takes longer than `STOP_S` is refused."""
        self._stopping = True
        for lane in self._lanes:
            lane.pool.shutdown(wait=False)
        until_s = time.monotonic() + STOP_S
        while self._waiting and time.monotonic() < until_s:
            time.sleep(0.01)
        for number in list(self._under_way):
            if (reply := self._under_way.pop(number, None)) is not None:
                self._answer(reply, StoppingError("the server is shutting down; what was asked may still be done"))

    def _unstarted(self, error: RuntimeError) -> HplmError:
        if self._stopping:
            return StoppingError("the server is shutting down")
        logging.getLogger(__name__).error("a manage request could not be started: %s", error)
        return QueueFullError("the server cannot start work on a manage request now; try again later")

    def _run(self, box: Box, room: threading.Semaphore) -> None:
        if (request := _taken(box)) is None:
            return
        raw, reply, is_cancelled = request
        number = next(self._numbers)
        self._under_way[number] = reply
        if self._stopping:
            answer: bytes | HplmError = StoppingError("the server is shutting down")
        elif is_gone(is_cancelled):
            answer = CancelledError("the client has gone; nothing was done")
        else:
            answer = answered(self._handle, raw)
        # Before the answer leaves: whoever asks again on it must find room.
        self._leave(room)
        if self._under_way.pop(number, None) is not None:
            self._answer(reply, answer)

    def _leave(self, room: threading.Semaphore) -> None:
        room.release()
        self._count_waiting(-1)

    def _count_waiting(self, change: int) -> None:
        with self._changing:
            self._waiting += change

    def _answer(self, reply: Reply, answer: bytes | HplmError) -> None:
        self._counts.add_answer(answer)
        try:
            reply(answer)
        except Exception:
            logging.getLogger(__name__).exception("manager: an answer could not be sent")
            self._counts.add("failed_answers")


def _taken(box: Box) -> Request | None:
    try:
        return box.pop()
    except IndexError:
        return None


def answered(handle: Handle, raw: bytes) -> bytes | HplmError:
    """What `handle` returns as JSON, or its error; what nobody expected is for the log alone."""
    try:
        # In ASCII: half a surrogate pair, which a file's key can hold, is no UTF-8.
        return json.dumps(handle(raw)).encode()
    except HplmError as error:
        return error
    except Exception:
        logging.getLogger(__name__).exception("a manage request failed")
        return InternalError("the server failed on this manage request; its log says why")
