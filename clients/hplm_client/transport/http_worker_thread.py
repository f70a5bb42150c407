"""A thread that makes calls over HTTP while the caller's thread does something else."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import gevent
from gevent import monkey
from gevent.event import Event
from gevent.pool import Group

from hplm.errors import UnreachableError
from hplm_client.transport.client_ownership import CLOSED, destroy_hub

THREAD_NAME = "hplm-http-client"
# The result and the error of one call, one of them None.
Outcome = tuple[Any, Exception | None]
Call = Callable[[Any], Any]


class HttpWorkerThread:
    """A thread with its own tritonclient client, because a gevent client belongs to the thread that made it.

    In the caller's thread gevent would send calls and read answers only while the caller waits for one of them.
    """

    def __init__(self, connect: Callable[[], tuple[Any, Any]]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        # The outcomes of calls under way; None once the thread is closed.
        self._pending: set[queue.SimpleQueue[Outcome]] | None = set()
        started: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name=THREAD_NAME, daemon=True)
        self._thread.start()
        self._loop, self._spawn, self._end = started.result()

    def send(self, call: Call) -> queue.SimpleQueue[Outcome]:
        """Make a call with the thread's client. Return the queue that will hold the outcome."""
        outcome: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        with self._lock:
            if self._pending is None:
                outcome.put((None, UnreachableError(CLOSED)))
            else:
                self._pending.add(outcome)
                self._loop.run_callback_threadsafe(self._spawn, call, outcome)
        return outcome

    def close(self) -> None:
        """End the thread. Calls under way end with UnreachableError."""
        if self._thread.is_alive():
            self._loop.run_callback_threadsafe(self._end)
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _run(self, started: Future[Any]) -> None:
        hub = gevent.get_hub()
        # gevent waits for callbacks of another thread only while it watches something.
        watcher = hub.loop.async_()
        watcher.start(lambda: None)
        try:
            try:
                _, client = self._connect()
            except Exception as error:
                started.set_exception(error)
                return
            greenlets, ended = Group(), Event()

            def make_call(call: Call, outcome: queue.SimpleQueue[Outcome]) -> None:
                # An error must not leave this function, because gevent would print it.
                try:
                    result: Outcome = (call(client), None)
                except Exception as error:
                    result = (None, error)
                with self._lock:
                    if self._pending is None or outcome not in self._pending:
                        return
                    self._pending.remove(outcome)
                outcome.put(result)

            started.set_result((hub.loop, partial(greenlets.spawn, make_call), ended.set))
            ended.wait()
            with self._lock:
                unfinished, self._pending = self._pending or set(), None
            greenlets.kill()
            for outcome in unfinished:
                outcome.put((None, UnreachableError(CLOSED)))
            client.close()
        finally:
            watcher.close()
            # If gevent has patched threads, the caller uses the same hub.
            if not monkey.is_module_patched("threading"):
                destroy_hub(hub)
