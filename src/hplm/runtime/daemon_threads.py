"""Threads that delay the end of the interpreter only for a limited time."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

# Seconds that the end of the interpreter waits for running work. A thread that returns from C++ code, such as torch's, after
# the interpreter is gone aborts the process.
END_S = 5.0


class DaemonThreads:
    """Up to `most` threads that run work in the order in which it is given. A thread is started when none is free.

    A ThreadPoolExecutor delays the end of the interpreter until its threads end. A read that hangs, for example of a dead
    file server, would keep the process of an unloaded model for ever. These threads delay it by at most END_S.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._changed = threading.Condition()
        self._queued: deque[Callable[[], object]] = deque()
        self._threads: list[threading.Thread] = []
        self._free = 0
        self._is_closed = False
        _all.add(self)

    def run(self, work: Callable[[], object]) -> None:
        """Run `work` soon; its errors are logged. Raises RuntimeError if closed, or if no thread can be started at all."""
        with self._changed:
            if self._is_closed:
                raise RuntimeError(f"{self._name} is closed")
            if len(self._queued) >= self._free and len(self._threads) < self._most:
                self._start()
            self._queued.append(work)
            self._changed.notify()

    def close(self) -> None:
        """Start no further work: queued work is dropped, running work goes on."""
        with self._changed:
            self._is_closed = True
            self._queued.clear()
            self._changed.notify_all()

    def join(self, within_s: float) -> None:
        """Wait up to `within_s` seconds for running work. Call `close` first."""
        until_s = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _start(self) -> None:
        thread = threading.Thread(target=self._loop, name=f"{self._name}_{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            # Another thread runs the work, if there is another.
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
                logging.getLogger(__name__).exception("%s: an error in work without a caller", self._name)
            finally:
                # The function may hold a tenant's weights.
                del work
                with self._changed:
                    self._free += 1

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queued or self._is_closed)
            self._free -= 1
            return self._queued.popleft() if self._queued else None


_all: weakref.WeakSet[DaemonThreads] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    until_s = time.monotonic() + END_S
    pools = list(_all)
    for daemons in pools:
        daemons.close()
    # A second Ctrl-C ends the wait and is no error.
    with suppress(KeyboardInterrupt):
        for daemons in pools:
            daemons.join(until_s - time.monotonic())
