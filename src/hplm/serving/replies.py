"""Threads that send a stage's answers, so that sending never stalls computing. Each answer is counted."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Any

from hplm.errors import HplmError
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.runtime.tracing import Tracer
from hplm.serving.counts import Counts
from hplm.serving.request import Answer, Client

# If more errors wait to be sent, the thread that refuses a request sends the error itself.
MOST_ERRORS_WAITING = 256
# Threads that send answers; as many more send errors.
SENDERS = 2

# Clients without their requests: an answer that waits to be sent keeps no tensors of its request in memory.
Outbox = SimpleQueue[tuple[Client[Any], object] | None]


class Answers:
    """The threads that send a stage's answers. `counts` holds the answers by outcome, and whatever else the stage counts.

    Errors have threads of their own. Sending is a round trip to the server: if many requests are refused, sending takes
    longer than computing, and no answer should wait behind the errors.
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

    def give(self, client: Client[Answer], answer: Answer | HplmError) -> None:
        """Send and count the one answer of a request."""
        self._post(client, answer)

    def refuse(self, client: Client[Any], error: HplmError) -> None:
        """Send and count the error of a request that is not admitted, or that leaves the queue for another request.

        If many errors wait, this thread sends the error. So no thread admits requests faster than errors leave.
        """
        self._post(client, error, at_once=self.errors_waiting >= MOST_ERRORS_WAITING)

    @property
    def errors_waiting(self) -> int:
        """The number of errors that no thread has begun to send."""
        return self._errors.qsize()

    def stop(self, deadline_s: float) -> None:
        """Send all that was posted, until `deadline_s` of `time.monotonic`, and for half a second at least."""
        with self._posting:
            # Answers posted so far stand before the senders' end in the outbox. Later answers are sent directly.
            self._senders_ended = True
            for box in self._senders.values():
                box.put(None)
        until_s = max(deadline_s, time.monotonic() + 0.5)
        for sender in self._senders:
            sender.join(max(0.0, until_s - time.monotonic()))

    def _post(self, client: Client[Any], answer: object, at_once: bool = False) -> None:
        self.counts.add_answer(answer)
        with self._posting:
            # After the senders have ended, the calling thread sends the answers of late batches and new requests.
            is_posted = not (at_once or self._senders_ended)
            if is_posted:
                (self._errors if isinstance(answer, HplmError) else self._outbox).put((client, answer))
        if not is_posted:
            self._send(client, answer)

    def _send_loop(self, box: Outbox) -> None:
        while (posted := box.get()) is not None:
            client, answer = posted
            self._send(client, answer)
            del posted, client, answer  # a thread that only waits must keep no answer in memory

    def _send(self, client: Client[Any], answer: object) -> None:
        try:
            with self._tracer.span("answer"):
                client.reply(answer)
        except Exception as error:
            log_rate_limited(f"{self._name}: an answer could not be sent", error)
            self.counts.add("failed_answers")
