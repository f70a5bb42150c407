"""What a client may read of an error."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from hplm.errors import ArtifactError, HplmError, InternalError, RegistryError, RegistryUnavailableError

WINDOW_S = 30.0
MOST_SAID = 100


class Complaints:
    """Faults of requests in the log, each once in half a minute, and a hundred at most: who asks on must not fill the disk."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: set[str] = set()
        self._unsaid = 0
        self._since_s = clock()
        self._lock = threading.Lock()

    def say(self, words: str, error: BaseException | None = None) -> None:
        """With `error`'s traceback where it is given. What was left out before is counted in a line of its own."""
        unsaid = 0
        with self._lock:
            if self._clock() - self._since_s >= WINDOW_S:
                unsaid, self._unsaid = self._unsaid, 0
                self._said.clear()
                self._since_s = self._clock()
            is_new = words not in self._said and len(self._said) < MOST_SAID
            if is_new:
                self._said.add(words)
            else:
                self._unsaid += 1
        log = logging.getLogger(__name__)
        if unsaid:
            log.error("%d more faults of requests, most like those above, were left out", unsaid)
        if is_new:
            log.error("%s", words, exc_info=error)


COMPLAINTS = Complaints()


def complain(words: str, error: BaseException | None = None) -> None:
    """`Complaints.say` of this process."""
    COMPLAINTS.say(words, error)


def for_the_wire(error: BaseException, tenant: bytes) -> HplmError:
    """What is wrong with files, the registry or our code is for the operator's log: of such an error only the code travels."""
    if not isinstance(error, HplmError):
        complain(f"tenant {_shown(tenant)} or its domain could not be loaded ({error!r})", error)
        return InternalError("this tenant's model cannot be loaded; the server's log says why")
    if not isinstance(error, ArtifactError | RegistryError):
        return error
    if isinstance(error, RegistryUnavailableError):
        # Of a tenant that may not even be: why is logged where the registry is read, not for each request.
        return RegistryUnavailableError("the registry cannot be read now; try again later")
    complain(f"tenant {_shown(tenant)}: {error}")
    return type(error)("this tenant's model cannot be loaded; the server's log says why")


def _shown(tenant: bytes) -> str:
    return tenant.decode("utf-8", "replace")
