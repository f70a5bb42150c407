"""Threads that the interpreter's end does not wait for."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable


class Daemons:
    """Up to `most` threads that run what they are given, in that order, each started when there is none free.

    A ThreadPoolExecutor's threads are waited for when the interpreter ends, so that a read which hangs, as of a file server
    that is gone, would keep an unloaded model's process for ever.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._changed = threading.Condition()
        self._given: deque[Callable[[], object]] = deque()
        self._threads = self._free = 0
        self._is_closed = False

    def run(self, work: Callable[[], object]) -> None:
        """Have it run soon; its errors are logged. RuntimeError: closed, or there is no thread and none can be started."""
        with self._changed:
            if self._is_closed:
                raise RuntimeError(f"{self._name} is closed")
            if len(self._given) >= self._free and self._threads < self._most:
                self._start()
            self._given.append(work)
            self._changed.notify()

    def close(self) -> None:
        """Begin nothing more: what waits is dropped, and what runs goes on."""
        with self._changed:
            self._is_closed = True
            self._given.clear()
            self._changed.notify_all()

    def _start(self) -> None:
        thread = threading.Thread(target=self._loop, name=f"{self._name}_{self._threads}", daemon=True)
        self._threads += 1
        self._free += 1
        try:
            thread.start()
        except RuntimeError:
            self._threads -= 1
            self._free -= 1
            # The others come to it.
            if not self._threads:
                raise

    def _loop(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except Exception:
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
