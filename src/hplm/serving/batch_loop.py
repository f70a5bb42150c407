"""What makes a stage asynchronous: a bounded queue, a thread that computes, threads that answer.

Triton's thread hands requests over and computes nothing; a policy chooses what runs next; answers leave from threads
of their own, so that sending never stalls computing. Everything that comes in gets exactly one answer.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic

from hplm.errors import CancelledError, DeadlineError, HplmError, InternalError, QueueFullError, StoppingError
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.runtime.thread_priority import be_nice
from hplm.runtime.tracing import Tracer
from hplm.scheduling.batch_pacing import BatchPacing
from hplm.scheduling.downstream_admission import Backlog
from hplm.scheduling.policy import Batch, Waiting, tokens_of
from hplm.scheduling.queue import RefusedRequest, RequestQueue, TakeResult
from hplm.serving.pending_requests import ASK_CANCELLED_AFTER_S, SWEPT_AT_ONCE, PendingRequest, PendingRequests
from hplm.serving.replies import Answer, Answers, Item, Job, is_gone

# At most one look ahead in this time: each goes through all that wait.
LOOK_AHEAD_EVERY_S = 0.01
SWEEP_EVERY_S = 0.1
# For answers to leave before a process ends that can compute nothing more.
LAST_WORDS_S = 1.0

Run = Callable[[list[Item], Batch], Iterator[tuple[Sequence[int], Sequence[Answer | HplmError]]]]


class BatchLoop(Generic[Item, Answer]):
    """Owns the queue and the threads of one stage. `run` computes a batch and yields answers as they are ready.

    `upcoming`, where given, is told in a thread of its own what the policy would run next while a batch computes; `publish`,
    about ten times a second, what waits. Where `is_told_to_stop`, asked as often, says so, it closes by itself.
    An error of a batch that `is_fatal` ends the process, answers first, so that whoever watches over it starts another.
    `every_s` is what `BatchPacing` keeps between batches. `nice` is the computing thread's, see `be_nice`, and `crowded_nice`,
    where given, while more than two batches wait: computing first would then keep others from being let in, or refused in time.
    Not started until `start`.
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
        self._pace = BatchPacing(every_s)
        self._nice = nice
        self._crowded_nice = nice if crowded_nice is None else crowded_nice
        # As the thread is now.
        self._is_nice = 0
        self._ids = itertools.count()
        self._jobs: dict[int, Job[Item, Answer]] = {}
        self._answers = Answers(name, tracer)
        self._held = PendingRequests(self._answers, clock)
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
    def counts(self) -> Counter[str]:
        """Answers by outcome, batches, tokens, and what failed."""
        return self._answers.counts.read()

    @property
    def waiting(self) -> int:
        """Requests in the queue now, and those held."""
        return len(self._queue) + len(self._held)

    def submit(
        self,
        job: Job[Item, Answer],
        *,
        tenant: str,
        tokens: int,
        arrived_s: float,
        deadline_s: float,
    ) -> None:
        """Queue a request; times are of the worker's clock. Never blocks on computing.

        Raises DeadlineError, QueueFullError or StoppingError where it is refused at once: there is no reply then.
        """
        with self._changed:
            if self._stopping:
                raise StoppingError("the server is shutting down")
            request = Waiting(next(self._ids), tenant, tokens, arrived_s, deadline_s)
            refused = self._queue.offer(request, self._clock())
            own = next((one for one in refused if one.request is request), None)
            if own is None:
                self._jobs[request.id] = job
                self._changed.notify()
        if own is not None:
            raise _error_of(own)
        self._refuse(refused, lambda job, error: self._answers.refuse(job.reply, error))
        if self._upcoming is not None and self._computing and not self._knows_next:
            self._look_ahead.set()

    def hold(self, job: Job[Any, Answer], deadline_s: float) -> PendingRequest:
        """Look after a request that cannot be queued yet, until it is released: see PendingRequests."""
        return self._held.hold(job, deadline_s)

    def refuse(self, reply: Callable[[Answer | HplmError], None], error: HplmError) -> None:
        """Answer a request that never came to the queue: see `Answers.refuse`."""
        self._answers.refuse(reply, error)

    def count_refused(self, error: HplmError) -> HplmError:
        """Count a request that is refused at once, by raising."""
        self._answers.counts.add_answer(error)
        return error

    def close(self) -> None:
        """Take nothing more and refuse what waits; the batch that runs is answered."""
        with self._changed:
            self._stopping = True
            left = self._queue.drain()
            self._changed.notify_all()
        self._held.stop()
        for request in left:
            self._answers.give(self._jobs.pop(request.id), StoppingError("the server is shutting down"))
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
            # Out of the lock: whoever comes meanwhile is in the batch too.
            if (pause_s := self._pace.left_s(self._clock())) > 0:
                self._stopped.wait(pause_s)
            with self._changed:
                if self._stopping:
                    return
                # Before the batch is chosen: they would take others' places in it.
                over = [number for number, job in self._jobs.items() if job.is_over() and self._queue.cancel(number)]
                unwanted = [self._jobs.pop(number) for number in over]
                now_s = self._clock()
                try:
                    taken = self._queue.take(now_s)
                except Exception as error:
                    # A mistake of ours: whoever waits is told, and the stage goes on.
                    log_rate_limited(f"{self._name}: no batch could be chosen", error)
                    self._queue.drain()
                    # All that wait, and what `take` had already taken out: no batch runs now.
                    failed = list(self._jobs.values())
                    self._jobs.clear()
                    taken = TakeResult(None, ())
                else:
                    failed = []
                self._computing = taken.batch is not None
                if taken.batch is not None:
                    self._pace.began(len(taken.batch.requests), now_s)
            for job in unwanted:
                self._answers.give(job, CancelledError("its request has an error already"))
            for job in failed:
                self._answers.give(job, InternalError("the server failed to schedule this request; its log says why"))
            if taken.policy_failure is not None:
                self._answers.counts.add("policy_failures")
                # Its own words may be others for each batch.
                kind = type(taken.policy_failure).__name__
                log_rate_limited(
                    f"the policy failed ({kind}); that batch is first come, first served", taken.policy_failure
                )
            self._refuse(taken.refused, self._answers.give)
            if taken.batch is not None:
                self._compute(taken.batch)

    def _take_priority(self) -> None:
        nice = self._crowded_nice if self._queue.fills_two_batches else self._nice
        if nice == self._is_nice:
            return
        self._is_nice = nice
        if not be_nice(nice, self._name):
            # Once is enough to know it.
            self._nice = self._crowded_nice = nice

    def _compute(self, batch: Batch) -> None:
        jobs = [self._jobs.pop(request.id) for request in batch.requests]
        self._knows_next = False
        self._look_ahead.set()
        tokens = tokens_of(batch.requests)
        self._answers.counts.add("batches")
        self._answers.counts.add("tokens", tokens)
        answered: set[int] = set()
        is_sound = True
        fatal = False
        start = self._clock()
        try:
            with self._exclusive, self._tracer.span("batch", requests=len(jobs), tokens=tokens):
                for indices, answers in self._run([job.item for job in jobs], batch):
                    for index, answer in zip(indices, answers, strict=True):
                        answered.add(index)
                        is_sound = is_sound and not isinstance(answer, InternalError)
                        self._answers.give(jobs[index], answer)
        except BaseException as error:
            # Also what is no Exception, as a panic in Rust: without this thread the stage would take requests and answer none.
            log_rate_limited(f"{self._name} failed on a batch ({type(error).__name__})", error)
            self._answers.counts.add("failed_batches")
            fatal = self._is_fatal(error)
        finally:
            for index, job in enumerate(jobs):
                if index not in answered:
                    self._answers.give(job, InternalError("the server failed on this batch; its log says why"))
            with self._changed:
                # A batch that failed, or a part of it, says nothing about what batches cost.
                is_whole = is_sound and len(answered) == len(jobs)
                self._queue.done(self._clock() - start if is_whole else 0.0)
                self._computing = False
        if fatal:
            self._die()

    def end_if_fatal(self, error: BaseException) -> None:
        """For an error that no batch met: end the process where it is one after which nothing can be computed."""
        if self._is_fatal(error):
            self._die()

    def _die(self) -> None:
        logging.getLogger(__name__).critical("%s: nothing can be computed here any more, this process ends", self._name)
        self.close()
        self._answers.stop(self._clock() + LAST_WORDS_S)
        os._exit(1)

    def _sweep_loop(self) -> None:
        """Tell what waits, take requests whose clients have gone out of the queue, close where that is told.

        A few clients at a time, the oldest requests' first, for asking takes its time.
        """
        last = last_held = -1
        while not self._stopped.wait(SWEEP_EVERY_S):
            if self._publish is not None:
                with self._changed:
                    waiting, now_s = self._queue.snapshot(), self._clock()
                # Out of the lock: nobody who comes in waits for it.
                self._publish(self._queue.backlog(waiting, now_s))
            last = self._sweep(last)
            last_held = self._held.sweep(last_held)
            if self._is_told_to_stop():
                logging.getLogger(__name__).warning("%s: the server is about to end; what waits is refused", self._name)
                self.close()

    def _sweep(self, last: int) -> int:
        """Ask for those behind request `last`; returns the last that was asked for, -1 to begin at the front again.

        A method, as `_look`: a thread that only waits must hold no job, for jobs hold tenants' weights.
        """
        with self._changed:
            now = self._clock()
            asked = [
                (request.id, self._jobs[request.id])
                for request in self._queue.oldest(SWEPT_AT_ONCE, after=last)
                if now - request.arrived_s > ASK_CANCELLED_AFTER_S
            ]
        for request_id, job in asked:
            if not is_gone(job.is_cancelled):
                continue
            with self._changed:
                was_waiting = self._queue.cancel(request_id)
                if was_waiting:
                    del self._jobs[request_id]
            if was_waiting:
                self._answers.give(job, CancelledError("the client has gone"))
        return asked[-1][0] if len(asked) == SWEPT_AT_ONCE else -1

    def _look_ahead_loop(self) -> None:
        """Coarse prefetch: what the policy would take next, while a batch computes (HMI 6.2)."""
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
        # Out of the lock: nobody who comes in waits for a look ahead.
        chosen = self._queue.preview(waiting, self._clock())
        # Full already: what comes later would seldom change it, and choosing among thousands takes its time.
        self._knows_next = len(chosen) < len(waiting)
        with self._changed:
            items = [job.item for request in chosen if (job := self._jobs.get(request.id)) is not None]
        try:
            with self._tracer.span("prefetch", requests=len(items)):
                self._upcoming(items)
        except Exception as error:
            # Only a head start is lost: the batch fetches what it lacks, and reports what fails there.
            log_rate_limited(f"{self._name}: prefetch failed", error)
            self._answers.counts.add("failed_prefetches")

    def _refuse(self, refused: Sequence[RefusedRequest], tell: Callable[[Job[Item, Answer], HplmError], None]) -> None:
        for one in refused:
            if (job := self._jobs.pop(one.request.id, None)) is not None:
                tell(job, _error_of(one))


def _error_of(refused: RefusedRequest) -> HplmError:
    if refused.reason == "full":
        return QueueFullError("too many requests wait; try again later")
    return DeadlineError("the deadline cannot be met; it was not computed")
