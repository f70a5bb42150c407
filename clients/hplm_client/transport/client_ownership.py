"""Who may use a client: the process that made it, over HTTP one thread of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from gevent import get_hub, monkey
from gevent._hub_local import get_hub_if_exists
from tritonclient.utils import InferenceServerException

from hplm.errors import ConfigError, HplmError, UnreachableError

CLOSED = "the client was closed"
# gevent's hubs of threads in which clients over HTTP came first, and who of these are open.
_OPEN: WeakKeyDictionary[Any, WeakSet[Owner]] = WeakKeyDictionary()


def destroy(hub: Any) -> None:
    """Give back what gevent has for this thread, unless a name is being looked up: that would be waited for."""
    lookups = hub._threadpool
    if lookups is None or not lookups.task_queue.unfinished_tasks:
        hub.destroy()


class Owner:
    """Asked before each call. `is_bound_to_thread`: the first call's thread is the only one that may make others."""

    def __init__(self, *, is_bound_to_thread: bool) -> None:
        self._process = os.getpid()
        self._is_bound_to_thread = is_bound_to_thread
        # Not the thread's number, which a later thread may get: each thread has a hub of its own.
        self._hub: object = None
        self._seen: set[Any] = set()
        self.is_closed = False
        if is_bound_to_thread:
            self._see()

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made the client."""
        return self._process == os.getpid()

    def check_process(self) -> None:
        """Raises ConfigError. A forked process shares the connections: each of the two might read the other's answers."""
        if not self.is_here:
            raise ConfigError("the client was made in another process, before a fork: make one in each process")

    def check_open(self) -> None:
        """Raises UnreachableError where the client is closed, ConfigError in another process."""
        self.check_process()
        if self.is_closed:
            raise UnreachableError(CLOSED)

    def check(self) -> None:
        """As `check_open`, in the thread that makes the call itself: ConfigError where that is not the first call's."""
        self.check_open()
        if self._is_bound_to_thread:
            hub = self._see()
            if self._hub is None:
                self._hub = hub
            if self._hub is not hub:
                raise ConfigError("over HTTP a client is for the thread of its first call: make one in each thread")

    def _see(self) -> Any:
        """The hub of this thread."""
        is_first = get_hub_if_exists() is None
        hub = get_hub()
        if is_first:
            _OPEN[hub] = WeakSet()
        if hub in _OPEN:
            self._seen.add(hub)
            _OPEN[hub].add(self)
        return hub

    def leave(self) -> None:
        """Once the client's connections are closed: with the last client of a thread goes what gevent has there.

        Else each thread that ends would leave two descriptors and another thread behind. The main thread's stays, one that
        was there before is the program's, and where gevent has patched threads it may be.
        """
        seen, self._seen = self._seen, set()
        for hub in seen:
            _OPEN[hub].discard(self)
        here = get_hub_if_exists()
        is_programs = threading.current_thread() is threading.main_thread() or monkey.is_module_patched("threading")
        if here in seen and not _OPEN[here] and not is_programs:
            destroy(here)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Around what the transport does: UnreachableError where the client is closed meanwhile."""
        try:
            yield
        except HplmError:
            raise
        except Exception as error:
            is_answer = isinstance(error, InferenceServerException) and "CANCELLED" not in str(error.status())
            if self.is_closed and not is_answer:
                raise UnreachableError(CLOSED) from None
            raise
