"""Answers leave a stage from threads of their own, so that sending never stalls computing; each is counted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from hplm.errors import HplmError
from hplm.serving.counts import Counts
from hplm.tracing import Tracer

Item = TypeVar("Item")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Job(Generic[Item, Answer]):
    """One request under way: what to compute, where the answer goes, and how to ask whether anybody still wants it."""

    item: Item
    reply: Callable[[Answer | HplmError], None]
    is_cancelled: Callable[[], bool]


def is_gone(is_cancelled: Callable[[], bool]) -> bool:
    """Whether a request's client has gone; where the server cannot say, it has not."""
    try:
        return is_cancelled()
    except Exception:
        logging.getLogger(__name__).exception("the server could not say whether a client has gone")
        return False


class Answers:
    """The threads that send a stage's answers. `counts`: those by outcome, and what else the stage counts."""

    def __init__(self, name: str, tracer: Tracer, threads: int = 2) -> None:
        self._name = name
        self._tracer = tracer
        self._posting = threading.Lock()
        self._senders_ended = False
        self._outbox: SimpleQueue[tuple[Job[Any, Any], object] | None] = SimpleQueue()
        self._senders = [
            threading.Thread(target=self._send_loop, name=f"{name}-answer-{i}", daemon=True) for i in range(threads)
        ]
        for sender in self._senders:
            sender.start()
        self.counts = Counts()

    def give(self, job: Job[Any, Answer], answer: Answer | HplmError) -> None:
        """Send and count the one answer of a request."""
        self.counts.add_answer(answer)
        with self._posting:
            is_posted = not self._senders_ended
            if is_posted:
                self._outbox.put((job, answer))
        if not is_posted:
            # The senders have gone, a late batch or a newcomer has not: its own thread sends.
            self._send(job.reply, answer)

    def refuse(self, reply: Callable[[Answer | HplmError], None], error: HplmError) -> None:
        """Answer a request that never came to be a job, on this thread, and count it with the others."""
        self.counts.add_answer(error)
        self._send(reply, error)

    def stop(self, deadline_s: float) -> None:
        """Send all that was given; `deadline_s` in seconds of `time.monotonic`, half a second more at the least."""
        with self._posting:
            # What is posted is before the senders' end in the outbox, so it is sent; what comes later is sent directly.
            self._senders_ended = True
            for _ in self._senders:
                self._outbox.put(None)
        for sender in self._senders:
            sender.join(max(0.5, deadline_s - time.monotonic()))

    def _send_loop(self) -> None:
        while (one := self._outbox.get()) is not None:
            job, answer = one
            self._send(job.reply, answer)
            del one, job, answer  # a thread that only waits must hold no job, for jobs hold tenants' weights

    def _send(self, reply: Callable[[Any], None], answer: object) -> None:
        try:
            with self._tracer.span("answer"):
                reply(answer)
        except Exception:
            logging.getLogger(__name__).exception("%s: an answer could not be sent", self._name)
            self.counts.add("failed_answers")
