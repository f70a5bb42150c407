"""The rule who may use a client: only the process that made it, and over HTTP only one thread of that process."""

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
# The gevent hubs that our clients over HTTP created, one a thread, each with the clients of that thread that are still open.
_OPEN_CLIENTS: WeakKeyDictionary[Any, WeakSet[ClientOwnership]] = WeakKeyDictionary()


def destroy_hub(hub: Any) -> None:
    """Release what gevent holds for this thread. A hub that looks up a host name stays, because `destroy` would wait for it."""
    lookups = hub._threadpool
    if lookups is None or not lookups.task_queue.unfinished_tasks:
        hub.destroy()


class ClientOwnership:
    """The process and thread that may use one client. With `is_bound_to_thread` the first call's thread owns the client."""

    def __init__(self, *, is_bound_to_thread: bool) -> None:
        self._process = os.getpid()
        self._is_bound_to_thread = is_bound_to_thread
        # The hub identifies the thread. A thread's number would not: a later thread may get the same number.
        self._owner_hub: object = None
        self._used_hubs: set[Any] = set()
        self.is_closed = False
        if is_bound_to_thread:
            self._use_hub()

    @property
    def is_own_process(self) -> bool:
        """Whether this process made the client."""
        return self._process == os.getpid()

    def check_process(self) -> None:
        """Raise ConfigError in a forked process: both processes share the connections and might read each other's answers."""
        if not self.is_own_process:
            raise ConfigError("the client was made in another process, before a fork: make one in each process")

    def check_open(self) -> None:
        """Raise UnreachableError if the client is closed, ConfigError in another process."""
        self.check_process()
        if self.is_closed:
            raise UnreachableError(CLOSED)

    def check_caller(self) -> None:
        """Raise what `check_open` raises, and over HTTP ConfigError if another thread made the first call."""
        self.check_open()
        if self._is_bound_to_thread:
            hub = self._use_hub()
            if self._owner_hub is None:
                self._owner_hub = hub
            if self._owner_hub is not hub:
                raise ConfigError("over HTTP a client is for the thread of its first call: make one in each thread")

    def _use_hub(self) -> Any:
        """Return this thread's hub, and note that the client uses it if our clients created it."""
        is_new = get_hub_if_exists() is None
        hub = get_hub()
        if is_new:
            _OPEN_CLIENTS[hub] = WeakSet()
        if hub in _OPEN_CLIENTS:
            self._used_hubs.add(hub)
            _OPEN_CLIENTS[hub].add(self)
        return hub

    def release_hubs(self) -> None:
        """Destroy this thread's hub if the client was the last one that used it. Call it once the connections are closed.

        Otherwise each thread that ends would leave two file descriptors and another thread behind. The hub stays if the program
        created it, in the main thread, and if gevent has patched threads, because the program may use it.
        """
        used_hubs, self._used_hubs = self._used_hubs, set()
        for hub in used_hubs:
            _OPEN_CLIENTS[hub].discard(self)
        hub = get_hub_if_exists()
        may_be_programs = threading.current_thread() is threading.main_thread() or monkey.is_module_patched("threading")
        if hub in used_hubs and not _OPEN_CLIENTS[hub] and not may_be_programs:
            destroy_hub(hub)

    @contextmanager
    def closed_as_unreachable(self) -> Iterator[None]:
        """Raise UnreachableError instead of the transport's error if the client was closed during the call."""
        try:
            yield
        except HplmError:
            raise
        except Exception as error:
            is_answer = isinstance(error, InferenceServerException) and "CANCELLED" not in str(error.status())
            if self.is_closed and not is_answer:
                raise UnreachableError(CLOSED) from None
            raise
