"""What a client may read of an error."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from hplm.errors import ArtifactError, HplmError, InternalError, RegistryError, RegistryUnavailableError

SAY_AGAIN_S = 30.0
# Of which it is remembered when they were said.
MOST_SAID = 10_000


class Complaints:
    """Errors of requests in the log, each once in half a minute: whoever asks again and again must not fill the disk."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def say(self, words: str, error: BaseException | None = None) -> None:
        """With `error`'s traceback where it is given; and how often it was not said since."""
        now_s = self._clock()
        with self._lock:
            since_s, unsaid = self._said.get(words, (-SAY_AGAIN_S, 0))
            is_due = now_s - since_s >= SAY_AGAIN_S
            if len(self._said) >= MOST_SAID and words not in self._said:
                self._said.clear()
            self._said[words] = (now_s, 0) if is_due else (since_s, unsaid + 1)
        if is_due:
            more = f" ({unsaid:,} times more since it was said last)" if unsaid else ""
            logging.getLogger(__name__).error("%s%s", words, more, exc_info=error)


COMPLAINTS = Complaints()


def for_the_wire(error: BaseException, tenant: bytes) -> HplmError:
    """What is wrong with files, the registry or our code is for the operator's log: of such an error only the code travels."""
    if not isinstance(error, HplmError):
        COMPLAINTS.say(f"tenant {_shown(tenant)} or its domain could not be loaded ({error!r})", error)
        return InternalError("this tenant's model cannot be loaded; the server's log says why")
    if not isinstance(error, ArtifactError | RegistryError):
        return error
    if isinstance(error, RegistryUnavailableError):
        # Of a tenant that may not even be: why is logged where the registry is read, not for each request.
        return RegistryUnavailableError("the registry cannot be read now; try again later")
    COMPLAINTS.say(f"tenant {_shown(tenant)}: {error}")
    return type(error)("this tenant's model cannot be loaded; the server's log says why")


def _shown(tenant: bytes) -> str:
    return tenant.decode("utf-8", "replace")
