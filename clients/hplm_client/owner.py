"""Who may use a client: the process that made it, over HTTP one thread of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from gevent import get_hub
from tritonclient.utils import InferenceServerException

from hplm.errors import ConfigError, HplmError, UnreachableError

CLOSED = "the client was closed"


class Owner:
    """Asked before each call. `is_bound_to_thread`: the first call's thread is the only one that may make others."""

    def __init__(self, *, is_bound_to_thread: bool) -> None:
        self._process = os.getpid()
        self._is_bound_to_thread = is_bound_to_thread
        # Not the thread's number, which a later thread may get: each thread has a hub of its own.
        self._hub: object = None
        self.is_closed = False

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
            hub = get_hub()
            if self._hub is None:
                self._hub = hub
            if self._hub is not hub:
                raise ConfigError("over HTTP a client is for the thread of its first call: make one in each thread")

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
