"""The way to one base's model: a bounded queue of texts, and threads that call the model with many texts at once."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from hplm.access.quotas import Charge
from hplm.errors import CancelledError, DeadlineError, HplmError, InternalError, QueueFullError, StoppingError
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.scheduling.gathering import GatheredText, GatherLimits, GatherQueue
from hplm.serving.counts import Counts
from hplm.serving.request import Request
from hplm.serving.routing.call_tensors import RouteAnswer, RouteInput, Tensors, call_answers, call_inputs, output_names
from hplm.serving.routing.failed_call import judge

# Inputs by name, the names of outputs, the seconds until the answer is due (None for the model's default), and what each text
# was charged -> outputs. Raises an HplmError.
CallModel = Callable[[Mapping[str, npt.NDArray[Any]], Sequence[str], float | None, Sequence[Charge]], Tensors]
RouteRequest = Request[RouteInput, RouteAnswer]
# The id of a text's key and the text's tenant -> the proof for the model that the key was checked.
Sign = Callable[[str, str], bytes]
# The client of a text that has waited for this long is asked whether it has gone. Asking is a round trip to the server.
ASK_CANCELLED_AFTER_S = 0.25
# At most this many clients are asked in a sweep.
SWEPT_AT_ONCE = 8
STOPPING = "the server is shutting down"
LATE = "the deadline cannot be met; it was not computed"


@dataclass
class _Entry:
    """A request of one text in the queue. `failures`: how many calls with it have failed because of other texts."""

    request: RouteRequest
    failures: int = 0


class ModelRoute:
    """The queue and the threads of one model. Safe to use from several threads.

    Up to `calls` threads call the model. While all are busy, texts gather for the next call. Each text gets one reply.
    """

    def __init__(
        self,
        name: str,
        call: CallModel,
        counts: Counts,
        *,
        calls: int,
        capacity: int,
        gather_s: float,
        limits: GatherLimits,
        sign: Sign | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name`: the model's. `counts` receives answers by outcome, `calls` and `retried`. `sign` is None without keys."""
        self.name = name
        self._call = call
        self._counts = counts
        self._sign = sign
        self._clock = clock
        self._queue = GatherQueue(capacity, gather_s, limits)
        self._entries: dict[int, _Entry] = {}
        self._ids = itertools.count()
        self._changed = threading.Condition()
        self._under_way = 0
        self._is_stopping = False
        self._threads = [
            threading.Thread(target=self._loop, name=f"route-{name}-{number}", daemon=True) for number in range(calls)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """The number of texts that wait for a call."""
        return len(self._queue)

    def submit(self, request: RouteRequest, tenant: str) -> None:
        """Queue a text. Raises DeadlineError, QueueFullError or StoppingError if it is refused at once; no reply follows."""
        now_s = self._clock()
        due_s = math.inf if request.deadline_s is None else request.arrived_s + request.deadline_s
        if due_s <= now_s:
            raise DeadlineError(LATE)
        item = request.item
        text = GatheredText(next(self._ids), tenant, item.form, sum(map(len, item.texts)), request.arrived_s, due_s)
        with self._changed:
            if self._is_stopping:
                raise StoppingError(STOPPING)
            refused = self._queue.offer(text, now_s)
            if refused is not text:
                self._entries[text.id] = _Entry(request)
                self._changed.notify()
            displaced = None if refused is None else self._entries.pop(refused.id, None)
        full = QueueFullError("too many requests wait; try again later")
        if refused is text:
            raise full
        if displaced is not None:
            self._reply(displaced.request, full)

    def sweep(self) -> None:
        """Refuse waiting texts whose deadline has passed, or whose clients have gone. Call it about ten times a second."""
        with self._changed:
            now_s = self._clock()
            late = [self._entries.pop(text.id).request for text in self._queue.late(now_s)]
            old = [text for text in self._queue.oldest() if now_s - text.arrived_s > ASK_CANCELLED_AFTER_S]
            asked = [(text, self._entries[text.id].request) for text in old[:SWEPT_AT_ONCE]]
        for request in late:
            self._reply(request, DeadlineError(LATE))
        for text, request in asked:
            if not (request.client.is_over or request.is_cancelled()):
                continue
            with self._changed:
                self._queue.remove([text])
                entry = self._entries.pop(text.id, None)
            if entry is not None:
                self._reply(request, CancelledError("the client has gone"))

    def close(self) -> None:
        """Refuse the texts that wait, and every later text. Calls under way are answered."""
        with self._changed:
            self._is_stopping = True
            self._queue.remove(self._queue.oldest())
            entries, self._entries = self._entries, {}
            self._changed.notify_all()
        for entry in entries.values():
            self._reply(entry.request, StoppingError(STOPPING))

    def join(self, until_s: float) -> None:
        """Wait for the threads until `until_s` of the monotonic clock. Call `close` first."""
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _loop(self) -> None:
        while (texts := self._next_call()) is not None:
            if texts:
                self._send(texts)
            del texts  # a thread that only waits must keep no request in memory

    def _next_call(self) -> list[tuple[GatheredText, _Entry]] | None:
        """Wait for the texts of a call, which counts as under way from now on. Return None at the end."""
        with self._changed:
            while not self._is_stopping:
                now_s = self._clock()
                from_s = self._queue.may_call_from_s(is_idle=not self._under_way)
                if from_s <= now_s:
                    break
                self._changed.wait(None if from_s == math.inf else from_s - now_s)
            if self._is_stopping:
                return None
            call = self._queue.take(now_s)
            late = [self._entries.pop(text.id).request for text in call.late]
            taken = [(text, self._entries.pop(text.id)) for text in call.texts]
            # Texts whose request has an error already are taken out, because nobody waits for them.
            over = [entry.request for _, entry in taken if entry.request.client.is_over]
            texts = [(text, entry) for text, entry in taken if not entry.request.client.is_over]
            self._under_way += bool(texts)
            if len(self._queue):
                self._changed.notify()
        for request in late:
            self._reply(request, DeadlineError(LATE))
        for request in over:
            self._reply(request, CancelledError("its request has an error already"))
        return texts

    def _send(self, texts: list[tuple[GatheredText, _Entry]]) -> None:
        result: list[RouteAnswer] | HplmError | None
        self._counts.add("calls")
        try:
            result = self._answers(texts)
        except HplmError as error:
            result = error
        except BaseException as error:
            # Also errors that are no Exception: without this thread the model would be called less often.
            log_rate_limited(f"route: a call of {self.name} failed ({type(error).__name__})", error)
            result = InternalError("the server failed on this request; its log says why")
        with self._changed:
            self._under_way -= 1
            if not self._under_way and len(self._queue):
                # A thread that waits for more texts need wait no longer.
                self._changed.notify()
        if isinstance(result, list):
            for (_, entry), answer in zip(texts, result, strict=True):
                self._reply(entry.request, answer)
        elif result is None:
            # Without other texts' filler, the logits of each text are no larger than from the base's own model.
            self._put_back([(replace(text, is_alone=True), entry) for text, entry in texts])
        else:
            self._sort_out(texts, result)

    def _answers(self, texts: Sequence[tuple[GatheredText, _Entry]]) -> list[RouteAnswer] | None:
        due_s = min(text.due_s for text, _ in texts)
        # A deadline that passes now is for the model to refuse.
        left_s = None if due_s == math.inf else max(1e-6, due_s - self._clock())
        sign = self._sign
        proofs = None if sign is None else [sign(entry.request.key_id, text.tenant) for text, entry in texts]
        inputs = call_inputs([(entry.request.item, entry.request.tenant) for _, entry in texts], proofs)
        charges = [entry.request.charge for _, entry in texts]
        return call_answers(self._call(inputs, output_names(texts[0][1].request.item), left_s, charges))

    def _sort_out(self, texts: Sequence[tuple[GatheredText, _Entry]], error: HplmError) -> None:
        """Refuse the texts that the error of a call is about, and queue the others once more; after that each alone."""
        refused, own = judge(error, [text.tenant for text, _ in texts])
        for index in refused:
            self._reply(texts[index][1].request, own)
        again = [texts[index] for index in range(len(texts)) if index not in refused]
        for _, entry in again:
            entry.failures += 1
        is_about_none = not refused
        self._put_back([(replace(text, is_alone=is_about_none or entry.failures > 1), entry) for text, entry in again])

    def _put_back(self, texts: Sequence[tuple[GatheredText, _Entry]]) -> None:
        if not texts:
            return
        self._counts.add("retried", len(texts))
        for _, entry in texts:
            # The failed call may have corrected the charge of this text.
            entry.request.charge = entry.request.charge._replace(is_repeated=True)
        with self._changed:
            if not (is_stopping := self._is_stopping):
                self._entries |= {text.id: entry for text, entry in texts}
                self._queue.put_back([text for text, _ in texts])
                self._changed.notify_all()
        if is_stopping:
            for _, entry in texts:
                self._reply(entry.request, StoppingError(STOPPING))

    def _reply(self, request: RouteRequest, answer: RouteAnswer | HplmError) -> None:
        self._counts.add_answer(answer)
        with suppress(Exception):
            try:
                request.reply(answer)
            except Exception as error:
                self._counts.add("failed_answers")
                log_rate_limited("route: an answer could not be sent", error)
