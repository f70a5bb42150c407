"""Calls over HTTP that go on while who made them is busy with something else."""

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
from hplm_client.transport.client_ownership import CLOSED, destroy

# Of one call: its result and its error, one of them None.
Outcome = tuple[Any, Exception | None]
Call = Callable[[Any], Any]


class Courier:
    """A thread with a client of its own, made there as `connect` does: gevent's belong to the thread that made them.

    In the caller's own thread calls would be sent and answered only while it waits for one of them.
    """

    def __init__(self, opened: Callable[[], tuple[Any, Any]]) -> None:
        self._opened = opened
        self._changing = threading.Lock()
        # Of calls that nothing was told of; None once it is closed.
        self._waiting: set[queue.SimpleQueue[Outcome]] | None = set()
        started: Future[Any] = Future()
        self._thread = threading.Thread(target=self._work, args=(started,), daemon=True)
        self._thread.start()
        self._loop, self._spawn, self._end = started.result()

    def send(self, call: Call) -> queue.SimpleQueue[Outcome]:
        """Make a call with the client; its outcome comes out of what is returned."""
        outcome: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        with self._changing:
            if self._waiting is None:
                outcome.put((None, UnreachableError(CLOSED)))
            else:
                self._waiting.add(outcome)
                self._loop.run_callback_threadsafe(self._spawn, call, outcome)
        return outcome

    def close(self) -> None:
        """What is still under way is given up, and says so."""
        if self._thread.is_alive():
            self._loop.run_callback_threadsafe(self._end)
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _work(self, started: Future[Any]) -> None:
        hub = gevent.get_hub()
        # Without something to watch gevent would not wait for the other thread.
        watcher = hub.loop.async_()
        watcher.start(lambda: None)
        try:
            try:
                _, client = self._opened()
            except Exception as error:
                started.set_exception(error)
                return
            greenlets, ended = Group(), Event()

            def make(call: Call, outcome: queue.SimpleQueue[Outcome]) -> None:
                # It must not raise: gevent would print it.
                try:
                    made: Outcome = (call(client), None)
                except Exception as error:
                    made = (None, error)
                with self._changing:
                    if self._waiting is None or outcome not in self._waiting:
                        return
                    self._waiting.remove(outcome)
                outcome.put(made)

            started.set_result((hub.loop, partial(greenlets.spawn, make), ended.set))
            ended.wait()
            with self._changing:
                given_up, self._waiting = self._waiting or set(), None
            greenlets.kill()
            for outcome in given_up:
                outcome.put((None, UnreachableError(CLOSED)))
            client.close()
        finally:
            watcher.close()
            # Where gevent has patched the threads it is the caller's too.
            if not monkey.is_module_patched("threading"):
                destroy(hub)
