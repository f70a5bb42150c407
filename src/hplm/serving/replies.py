"""Answers leave a stage from threads of their own, so that sending never stalls computing; each is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from hplm.errors import HplmError
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.runtime.tracing import Tracer
from hplm.serving.counts import Counts

Item = TypeVar("Item")
Next = TypeVar("Next")
Answer = TypeVar("Answer")

# Beyond these, who refuses sends the error too.
MOST_ERRORS_WAITING = 256
# Threads that send answers, and as many that send errors.
SENDERS = 2


def never() -> bool:
    """Of a request that is over when it is answered, and no sooner."""
    return False


@dataclass(frozen=True)
class Job(Generic[Item, Answer]):
    """One request under way: what to compute, where the answer goes, and how to ask whether anybody still wants it.

    The server has to be asked whether it `is_cancelled`, which takes its time; that it `is_over` is known here.
    """

    item: Item
    reply: Callable[[Answer | HplmError], None]
    is_cancelled: Callable[[], bool]
    is_over: Callable[[], bool] = never

    def with_item(self, item: Next) -> Job[Next, Answer]:
        """The same request, further on its way."""
        return Job(item, self.reply, self.is_cancelled, self.is_over)


def is_gone(is_cancelled: Callable[[], bool]) -> bool:
    """Whether a request's client has gone; where the server cannot say, it has not."""
    try:
        return is_cancelled()
    except Exception as error:
        log_rate_limited("the server could not say whether a client has gone", error)
        return False


Outbox = SimpleQueue[tuple[Callable[[Any], None], object] | None]


class Answers:
    """The threads that send a stage's answers. `counts`: those by outcome, and what else the stage counts.

    Errors leave by threads of their own: where many are refused, sending takes longer than computing (it is a round trip
    to the server), and no answer waits behind them.
    """

    def __init__(self, name: str, tracer: Tracer) -> None:
        self._name = name
        self._tracer = tracer
        self._posting = threading.Lock()
        self._senders_ended = False
        self._outbox: Outbox = SimpleQueue()
        self._errors: Outbox = SimpleQueue()
        self._senders = {
            threading.Thread(target=self._send_loop, args=(box,), name=f"{name}-{does}-{i}", daemon=True): box
            for does, box in (("answer", self._outbox), ("refuse", self._errors))
            for i in range(SENDERS)
        }
        for sender in self._senders:
            sender.start()
        self.counts = Counts()

    def give(self, job: Job[Any, Answer], answer: Answer | HplmError) -> None:
        """Send and count the one answer of a request."""
        self._post(job.reply, answer)

    def refuse(self, reply: Callable[[Answer | HplmError], None], error: HplmError) -> None:
        """Answer a request that does not get in, or has to leave for one that does, and count it with the others.

        On this thread where many errors wait to be sent: who lets requests in so lets in no more than are answered.
        """
        self._post(reply, error, at_once=self.errors_waiting >= MOST_ERRORS_WAITING)

    @property
    def errors_waiting(self) -> int:
        """Errors that no thread sends yet."""
        return self._errors.qsize()

    def stop(self, deadline_s: float) -> None:
        """Send all that was given; `deadline_s` in seconds of `time.monotonic`, half a second more at the least."""
        with self._posting:
            # What is posted is before the senders' end in the outbox, so it is sent; what comes later is sent directly.
            self._senders_ended = True
            for box in self._senders.values():
                box.put(None)
        until_s = max(deadline_s, time.monotonic() + 0.5)
        for sender in self._senders:
            sender.join(max(0.0, until_s - time.monotonic()))

    def _post(self, reply: Callable[[Any], None], answer: object, at_once: bool = False) -> None:
        self.counts.add_answer(answer)
        with self._posting:
            # Once the senders have gone, a late batch's or a newcomer's own thread sends.
            is_posted = not (at_once or self._senders_ended)
            if is_posted:
                (self._errors if isinstance(answer, HplmError) else self._outbox).put((reply, answer))
        if not is_posted:
            self._send(reply, answer)

    def _send_loop(self, box: Outbox) -> None:
        while (one := box.get()) is not None:
            reply, answer = one
            self._send(reply, answer)
            del one, reply, answer  # a thread that only waits must hold no request, nor what it came with

    def _send(self, reply: Callable[[Any], None], answer: object) -> None:
        try:
            with self._tracer.span("answer"):
                reply(answer)
        except Exception as error:
            log_rate_limited(f"{self._name}: an answer could not be sent", error)
            self.counts.add("failed_answers")
