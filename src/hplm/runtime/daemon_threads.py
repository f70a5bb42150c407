"""Threads that the interpreter's end does not wait for without limit."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

# For what runs at the interpreter's end. A thread that comes back from C++, as torch's, to an interpreter that is gone
# aborts the process.
END_S = 5.0


class DaemonThreads:
    """Up to `most` threads that run what they are given, in that order, each started when there is none free.

    A ThreadPoolExecutor's threads are waited for when the interpreter ends, so that a read which hangs, as of a file server
    that is gone, would keep an unloaded model's process for ever. These are for at most END_S.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._changed = threading.Condition()
        self._given: deque[Callable[[], object]] = deque()
        self._threads: list[threading.Thread] = []
        self._free = 0
        self._is_closed = False
        _all.add(self)

    def run(self, work: Callable[[], object]) -> None:
        """Have it run soon; its errors are logged. RuntimeError: closed, or there is no thread and none can be started."""
        with self._changed:
            if self._is_closed:
                raise RuntimeError(f"{self._name} is closed")
            if len(self._given) >= self._free and len(self._threads) < self._most:
                self._start()
            self._given.append(work)
            self._changed.notify()

    def close(self) -> None:
        """Begin nothing more: what waits is dropped, and what runs goes on."""
        with self._changed:
            self._is_closed = True
            self._given.clear()
            self._changed.notify_all()

    def join(self, within_s: float) -> None:
        """Once closed: wait for what runs."""
        until_s = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _start(self) -> None:
        thread = threading.Thread(target=self._loop, name=f"{self._name}_{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            # Where there are others, they come to it.
            if not self._threads:
                raise RuntimeError(f"{self._name}: no thread could be started: {error}") from error
        else:
            self._threads.append(thread)
            self._free += 1

    def _loop(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except BaseException:
                logging.getLogger(__name__).exception("%s: an error that nobody waits for", self._name)
            finally:
                # It may hold a tenant's weights.
                del work
                with self._changed:
                    self._free += 1

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._given or self._is_closed)
            self._free -= 1
            return self._given.popleft() if self._given else None


_all: weakref.WeakSet[DaemonThreads] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    until_s = time.monotonic() + END_S
    every = list(_all)
    for daemons in every:
        daemons.close()
    # An impatient second Ctrl-C ends the waiting, and is no error.
    with suppress(KeyboardInterrupt):
        for daemons in every:
            daemons.join(until_s - time.monotonic())
