"""The middle tier: tenants in host memory, between files on disk and slots on the device (HMI 5.2, 6.2)."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from hplm.errors import HplmError, QueueFullError, StoppingError
from hplm.runtime.daemon_threads import DaemonThreads
from hplm.runtime.rate_limited_log import log_rate_limited

# Threads that load tenants. A slow load holds one thread, and the others load on.
LOAD_THREADS = 8

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


@dataclass(eq=False)
class _Load(Generic[Value]):
    """A load. It waits for a thread until `is_running`. `is_unwanted`: its key was dropped meanwhile."""

    future: Future[Value] = field(default_factory=Future)
    is_running: bool = False
    is_unwanted: bool = False


class HostCache(Generic[Key, Value]):
    """Loaded values of at most `capacity` in all. The least recently used value is dropped first.

    `size_of` returns a value's bytes, or 1 if values are counted.

    Loads of different keys run side by side in `num_threads` threads, without a lock. A key has one load at a time. A dropped
    value lives on as long as a request holds it. A failed load is not remembered: the next request tries again.
    """

    def __init__(
        self,
        load: Callable[[Key], Value],
        size_of: Callable[[Value], int],
        *,
        capacity: int,
        num_threads: int = LOAD_THREADS,
    ) -> None:
        self._load = load
        self._size_of = size_of
        self._capacity = capacity
        self._lock = threading.Lock()
        self._kept: OrderedDict[Key, Value] = OrderedDict()
        self._loading: dict[Key, _Load[Value]] = {}
        self._threads = DaemonThreads(num_threads, "hplm-load")
        # For a stage that failed to start and never calls `close`.
        weakref.finalize(self, self._threads.close)
        self._is_closed = False
        self.kept_size = 0
        self.loads = 0  # that did not fail

    def get(self, key: Key) -> Value | None:
        """Return the value if it is cached, else None."""
        with self._lock:
            return self._touched(key)

    def fetch(self, key: Key) -> Future[Value]:
        """Return a future of the value. Callers that fetch a key while it loads share the load."""
        load: _Load[Value] = _Load()
        with self._lock:
            if (kept := self._touched(key)) is not None:
                load.future.set_result(kept)
                return load.future
            if key in self._loading:
                return self._loading[key].future
            self._loading[key] = load
        try:
            self._threads.run(partial(self._run, key, load))
        except RuntimeError as error:
            self._give_up([key], self._unstarted(error))
        return load.future

    def _touched(self, key: Key) -> Value | None:
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key]

    def drop(self, keys: Iterable[Key]) -> None:
        """Drop the cached values of these keys. A value that is being loaded is dropped after its load."""
        for key in keys:
            with self._lock:
                dropped = self._kept.pop(key, None)
                if key in self._loading:
                    self._loading[key].is_unwanted = True
                if dropped is not None:
                    self.kept_size -= self._size_of(dropped)
            # Freed outside the lock, because a domain's look-up unmaps gigabytes.
            del dropped

    def close(self, within_s: float = 2.0) -> None:
        """Wait up to `within_s` for running loads. Slower loads, waiting loads and later fetches fail with StoppingError."""
        self._is_closed = True
        self._threads.close()
        with self._lock:
            running = [load.future for load in self._loading.values() if load.is_running]
            waiting = [key for key, load in self._loading.items() if not load.is_running]
        stopping = StoppingError("the server is shutting down")
        self._give_up(waiting, stopping)
        wait(running, within_s)
        self._give_up(list(self._loading), stopping)

    def _unstarted(self, error: RuntimeError) -> HplmError:
        if self._is_closed:
            return StoppingError("the server is shutting down")
        log_rate_limited(f"a load could not be started: {error}")
        return QueueFullError("the server cannot start to load what this request needs now; try again later")

    def _give_up(self, keys: Sequence[Key], error: HplmError) -> None:
        for key in keys:
            with self._lock:
                load = self._loading.pop(key, None)
            if load is not None:
                load.future.set_exception(error)

    def _run(self, key: Key, load: _Load[Value]) -> None:
        with self._lock:
            if self._loading.get(key) is not load:
                return
            load.is_running = True
        try:
            value = self._load(key)
            size = self._size_of(value)
        except BaseException as error:
            with self._lock:
                is_awaited = self._ended(key, load)
            if is_awaited:
                load.future.set_exception(error)
            return
        with self._lock:
            self.loads += 1
            is_awaited = self._ended(key, load)
            if is_awaited and not load.is_unwanted:
                self._kept[key] = value
                self.kept_size += size
            while self.kept_size > self._capacity and len(self._kept) > 1:
                _, dropped = self._kept.popitem(last=False)
                self.kept_size -= self._size_of(dropped)
        if is_awaited:
            load.future.set_result(value)

    def _ended(self, key: Key, load: _Load[Value]) -> bool:
        """End a load; return whether a request awaits the value. After `close` no request awaits it."""
        is_awaited = self._loading.get(key) is load
        if is_awaited:
            del self._loading[key]
        return is_awaited
