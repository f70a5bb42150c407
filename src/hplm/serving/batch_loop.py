"""The batch loop of a stage: a bounded queue, a thread that computes, and threads that answer.

Triton's thread submits requests and computes nothing. A policy chooses the next batch. Answers leave from threads of their own,
so that sending never stalls computing. Every request gets exactly one answer.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic

from hplm.errors import CancelledError, DeadlineError, HplmError, InternalError, QueueFullError, StoppingError
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.runtime.thread_priority import be_nice
from hplm.runtime.tracing import Tracer
from hplm.scheduling.batch_pacing import BatchPacing
from hplm.scheduling.downstream_admission import Backlog
from hplm.scheduling.policy import ONE_STUDENT, Batch, StudentRange, Waiting
from hplm.scheduling.queue import RefusedRequest, RequestQueue, TakeResult
from hplm.scheduling.student_number import StudentNumber
from hplm.serving.pending_requests import ASK_CANCELLED_AFTER_S, SWEPT_AT_ONCE, PendingRequest, PendingRequests
from hplm.serving.replies import Answers
from hplm.serving.request import Answer, Client, Item, Request

# Least seconds between two looks ahead, because each goes through all requests that wait.
LOOK_AHEAD_EVERY_S = 0.01
# Seconds between two sweeps: reports of what waits, and searches for clients that have gone.
SWEEP_EVERY_S = 0.1
# Seconds for answers to leave before a process ends that can compute nothing more.
LAST_WORDS_S = 1.0

# Indices of a batch's items together with their answers.
Results = Iterator[tuple[Sequence[int], Sequence[Answer | HplmError]]]
Run = Callable[[list[Item], Batch], Results[Answer]]


class BatchLoop(Generic[Item, Answer]):
    """The queue and the threads of one stage. `run` computes a batch and yields answers as soon as they are known.

    `upcoming` receives what the policy would run next, in a thread of its own while a batch computes. `publish` receives what
    waits, about ten times a second. As often, `is_told_to_stop` is asked; if it says so, the loop closes by itself.
    If an error of a batch `is_fatal`, the answers are sent and the process ends, so that its supervisor starts another.
    `every_s` is the pause that `BatchPacing` keeps between batches. `nice` is the priority of the computing thread, see
    `be_nice`. While more than two batches wait the priority is `crowded_nice` if there is one: a computing thread that always
    goes first would keep requests from being admitted, or refused in time. Threads begin at `start`.
    """

    def __init__(
        self,
        name: str,
        queue: RequestQueue,
        run: Run[Item, Answer],
        *,
        tracer: Tracer,
        upcoming: Callable[[list[Item]], None] | None = None,
        publish: Callable[[Backlog], None] | None = None,
        is_told_to_stop: Callable[[], bool] = lambda: False,
        is_fatal: Callable[[BaseException], bool] = lambda error: False,
        exclusive: AbstractContextManager[None] | None = None,
        every_s: float = 0.0,
        nice: int = 0,
        crowded_nice: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._queue = queue
        self._run = run
        self._tracer = tracer
        self._upcoming = upcoming
        self._publish = publish
        self._is_told_to_stop = is_told_to_stop
        self._is_fatal = is_fatal
        self._exclusive = exclusive or nullcontext()
        self._clock = clock
        self._pacing = BatchPacing(every_s)
        self._nice = nice
        self._crowded_nice = nice if crowded_nice is None else crowded_nice
        # Takes note of each answered request's seconds in the queue and in its batch.
        self.note_times: Callable[[Request[Item, Answer], float, float], None] | None = None
        # The computing thread's priority now.
        self._current_nice = 0
        self._ids = itertools.count()
        # By their ids in the queue.
        self._requests: dict[int, Request[Item, Answer]] = {}
        self._answers = Answers(name, tracer)
        self._pending = PendingRequests(self._answers, clock)
        self._changed = threading.Condition()
        self._stopping = False
        self._stopped = threading.Event()
        self._computing = False
        self._look_ahead = threading.Event()
        self._knows_next = False
        self._threads = [threading.Thread(target=self._compute_loop, name=f"{name}-compute", daemon=True)]
        self._threads.append(threading.Thread(target=self._sweep_loop, name=f"{name}-sweep", daemon=True))
        if upcoming is not None:
            self._threads.append(threading.Thread(target=self._look_ahead_loop, name=f"{name}-prefetch", daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def is_running(self) -> bool:
        """Whether requests are queued and computed: it is started and not closed."""
        return not self._stopping and self._threads[0].is_alive()

    @property
    def counts(self) -> Counter[str]:
        """Answers by outcome, batches, tokens, and failures."""
        return self._answers.counts.read()

    @property
    def waiting(self) -> int:
        """The number of requests in the queue, and of pending ones."""
        return len(self._queue) + len(self._pending)

    @property
    def students(self) -> StudentNumber:
        """The cap on students, which falls under load."""
        return self._queue.students

    def submit(
        self,
        request: Request[Item, Answer],
        *,
        tenant: str,
        tokens: int,
        arrived_s: float,
        deadline_s: float,
        students: StudentRange = ONE_STUDENT,
    ) -> None:
        """Queue a request of a text of `tokens`; times are of the loop's clock. Never waits for a batch.

        Raises DeadlineError, QueueFullError or StoppingError if the request is refused at once; it gets no reply then.
        """
        with self._changed:
            if self._stopping:
                raise StoppingError("the server is shutting down")
            least_tokens = tokens * students.least
            waiting = Waiting(next(self._ids), tenant, least_tokens, arrived_s, deadline_s, students)
            refused = self._queue.offer(waiting, self._clock())
            own = next((refusal for refusal in refused if refusal.request is waiting), None)
            if own is None:
                self._requests[waiting.id] = request
                self._changed.notify()
        if own is not None:
            raise _error_of(own)
        self._refuse(refused, self._answers.refuse)
        if self._upcoming is not None and self._computing and not self._knows_next:
            self._look_ahead.set()

    def hold(
        self, request: Request[Any, Answer], admission: Generator[Any, Any, Any], deadline_s: float
    ) -> PendingRequest:
        """Keep a request that cannot be queued yet, until it is released: see PendingRequests."""
        return self._pending.hold(request, admission, deadline_s)

    def refuse(self, request: Request[Any, Answer], error: HplmError) -> None:
        """Answer a request that never came to the queue: see `Answers.refuse`."""
        self._answers.refuse(request.client, error)

    def count_refused(self, error: HplmError) -> HplmError:
        """Count and return the error of a request that is refused by raising it."""
        self._answers.counts.add_answer(error)
        return error

    def close(self) -> None:
        """Refuse the requests that wait, and every later one; the batch that runs is answered."""
        with self._changed:
            self._stopping = True
            drained = self._queue.drain()
            self._changed.notify_all()
        self._pending.stop()
        for waiting in drained:
            self._answers.give(self._requests.pop(waiting.id).client, StoppingError("the server is shutting down"))
        self._stopped.set()
        self._look_ahead.set()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Close, let the running batch end, send all answers."""
        self.close()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._answers.stop(deadline)

    def _compute_loop(self) -> None:
        while True:
            self._take_priority()
            with self._changed:
                while not self._stopping and not len(self._queue):
                    self._changed.wait()
            # Outside the lock, so that requests that come during the pause are in the batch too.
            if (pause_s := self._pacing.left_s(self._clock())) > 0:
                self._stopped.wait(pause_s)
            with self._changed:
                if self._stopping:
                    return
                # Requests that are over leave before the batch is chosen: they would take other requests' room in it.
                over = [
                    request_id
                    for request_id, request in self._requests.items()
                    if request.client.is_over and self._queue.cancel(request_id)
                ]
                cancelled = [self._requests.pop(request_id).client for request_id in over]
                failed: list[Client[Answer]] = []
                now_s = self._clock()
                try:
                    taken = self._queue.take(now_s)
                except Exception as error:
                    # A mistake of ours: all requests that wait are refused, and the stage continues.
                    log_rate_limited(f"{self._name}: no batch could be chosen", error)
                    self._queue.drain()
                    # Also requests that `take` had taken out of the queue: no batch runs now.
                    failed = [request.client for request in self._requests.values()]
                    self._requests.clear()
                    taken = TakeResult(None, ())
                self._computing = taken.batch is not None
                if taken.batch is not None:
                    self._pacing.began(len(taken.batch.requests), now_s)
            for client in cancelled:
                self._answers.give(client, CancelledError("its request has an error already"))
            for client in failed:
                self._answers.give(
                    client, InternalError("the server failed to schedule this request; its log says why")
                )
            if taken.policy_failure is not None:
                self._answers.counts.add("policy_failures")
                # The error's own words may differ for each batch, and each new text would be logged.
                kind = type(taken.policy_failure).__name__
                log_rate_limited(
                    f"the policy failed ({kind}); that batch is first come, first served", taken.policy_failure
                )
            self._refuse(taken.refused, self._answers.give)
            if taken.batch is not None:
                self._compute(taken.batch)

    def _take_priority(self) -> None:
        nice = self._crowded_nice if self._queue.fills_two_batches else self._nice
        if nice == self._current_nice:
            return
        self._current_nice = nice
        if not be_nice(nice, self._name):
            # The log has said it once; the thread keeps its priority.
            self._nice = self._crowded_nice = nice

    def _compute(self, batch: Batch) -> None:
        requests = [self._requests.pop(waiting.id) for waiting in batch.requests]
        self._knows_next = False
        self._look_ahead.set()
        tokens = sum(waiting.length for waiting in batch.requests)
        self._answers.counts.add("batches")
        self._answers.counts.add("tokens", tokens)
        answered: set[int] = set()
        is_sound = True
        fatal = False
        start = self._clock()
        try:
            with self._exclusive, self._tracer.span("batch", requests=len(requests), tokens=tokens):
                for indices, answers in self._run([request.item for request in requests], batch):
                    for index, answer in zip(indices, answers, strict=True):
                        answered.add(index)
                        is_sound = is_sound and not isinstance(answer, InternalError)
                        self._answers.give(requests[index].client, answer)
                        if self.note_times is not None and not isinstance(answer, HplmError):
                            request = requests[index]
                            self.note_times(request, start - request.received_s, self._clock() - start)
        except BaseException as error:
            # Also errors that are no Exception, such as a panic in Rust: without this thread the stage would answer nothing.
            log_rate_limited(f"{self._name} failed on a batch ({type(error).__name__})", error)
            self._answers.counts.add("failed_batches")
            fatal = self._is_fatal(error)
        finally:
            for index, request in enumerate(requests):
                if index not in answered:
                    failure = InternalError("the server failed on this batch; its log says why")
                    self._answers.give(request.client, failure)
            with self._changed:
                # A batch that failed, or failed in part, says nothing about what batches cost.
                is_whole = is_sound and len(answered) == len(requests)
                self._queue.done(self._clock() - start if is_whole else 0.0)
                self._computing = False
        if fatal:
            self._die()

    def end_if_fatal(self, error: BaseException) -> None:
        """End the process if nothing can be computed after an error that came up outside a batch."""
        if self._is_fatal(error):
            self._die()

    def _die(self) -> None:
        logging.getLogger(__name__).critical("%s: nothing can be computed here any more, this process ends", self._name)
        self.close()
        self._answers.stop(self._clock() + LAST_WORDS_S)
        os._exit(1)

    def _sweep_loop(self) -> None:
        """Publish what waits, refuse requests whose clients have gone, and close if the server is about to end.

        Each sweep asks for a few clients only, those of the oldest requests first, because asking is a round trip.
        """
        last = last_pending = -1
        while not self._stopped.wait(SWEEP_EVERY_S):
            with self._changed:
                self._queue.students.look(self._clock())
            if self._publish is not None:
                with self._changed:
                    waiting, now_s = self._queue.snapshot(), self._clock()
                # Outside the lock: new requests need not wait for the file.
                self._publish(self._queue.backlog(waiting, now_s))
            last = self._sweep(last)
            last_pending = self._pending.sweep(last_pending)
            if self._is_told_to_stop():
                logging.getLogger(__name__).warning("%s: the server is about to end; what waits is refused", self._name)
                self.close()

    def _sweep(self, last: int) -> int:
        """Refuse requests whose clients have gone, among a few with ids above `last`.

        Returns the last id that was asked for, or -1 to begin with the oldest again. This is a method of its own, as `_look`
        is, because a thread that only waits must keep no request in memory: requests keep tenants' weights.
        """
        with self._changed:
            now = self._clock()
            asked = [
                (waiting.id, self._requests[waiting.id])
                for waiting in self._queue.oldest(SWEPT_AT_ONCE, after=last)
                if now - waiting.arrived_s > ASK_CANCELLED_AFTER_S
            ]
        for request_id, request in asked:
            if not request.is_cancelled():
                continue
            with self._changed:
                was_waiting = self._queue.cancel(request_id)
                if was_waiting:
                    del self._requests[request_id]
            if was_waiting:
                self._answers.give(request.client, CancelledError("the client has gone"))
        return asked[-1][0] if len(asked) == SWEPT_AT_ONCE else -1

    def _look_ahead_loop(self) -> None:
        """Announce what the policy would take next, while a batch computes: coarse prefetch (HMI 6.2)."""
        while not self._stopping:
            self._look_ahead.wait()
            time.sleep(LOOK_AHEAD_EVERY_S)
            self._look_ahead.clear()
            self._look()

    def _look(self) -> None:
        assert self._upcoming is not None
        with self._changed:
            if self._stopping or not len(self._queue) or not self._computing:
                return
            waiting = self._queue.snapshot()
        # Outside the lock: new requests need not wait for the policy.
        chosen = self._queue.preview(waiting, self._clock())
        # If the next batch is full, later requests would seldom change it, and choosing among thousands is slow.
        self._knows_next = len(chosen) < len(waiting)
        with self._changed:
            known = (self._requests.get(waiting.id) for waiting in chosen)
            items = [request.item for request in known if request is not None]
        try:
            with self._tracer.span("prefetch", requests=len(items)):
                self._upcoming(items)
        except Exception as error:
            # Only a head start is lost: the batch itself fetches what is missing, and reports failures.
            log_rate_limited(f"{self._name}: prefetch failed", error)
            self._answers.counts.add("failed_prefetches")

    def _refuse(self, refused: Sequence[RefusedRequest], tell: Callable[[Client[Answer], HplmError], None]) -> None:
        for refusal in refused:
            if (request := self._requests.pop(refusal.request.id, None)) is not None:
                tell(request.client, _error_of(refusal))


def _error_of(refused: RefusedRequest) -> HplmError:
    if refused.reason == "full":
        return QueueFullError("too many requests wait; try again later")
    return DeadlineError("the deadline cannot be met; it was not computed")
