"""Time limits of calls: the client's timeout, and the deadline of a request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gevent import Timeout

from hplm.errors import DeadlineError

# Longest timeout in seconds. It exceeds the longest deadline, so that a client can wait for that answer. Far larger values
# overflow the clocks of the transports, and each transport then behaves differently.
LONGEST_TIMEOUT_S = 100_000.0
# Default timeout in seconds. It exceeds the server's default deadline: a call that ended at the same moment would be cancelled
# while its answer is sent.
DEFAULT_TIMEOUT_S = 35.0
# Seconds that a client waits after a request's deadline. The server counts the deadline from the request's arrival, so these
# seconds are for the way there and back.
DEADLINE_GRACE_S = 1.0
# Seconds that `close` waits for answers over gRPC. Triton before 24.12 may crash if a request is cancelled while its answer is
# sent.
CLOSE_GRACE_S = 0.5


class TimeElapsed(TimeoutError):
    """The end of a call's time, raised by `time_limit` only."""


def deadline_passed(deadline_s: float) -> DeadlineError:
    """Return the error of a request whose answer the client no longer waits for."""
    return DeadlineError(
        f"no answer came within the deadline of {deadline_s:g} s and {DEADLINE_GRACE_S:g} s more; "
        "the server may compute the request all the same"
    )


@contextmanager
def time_limit(timeout_s: float, deadline_s: float | None = None) -> Iterator[None]:
    """End a call over gevent after `timeout_s` with TimeElapsed, or soon after `deadline_s` with DeadlineError.

    A timeout of the connection itself would start again with each piece of an answer.
    """
    limit_s = timeout_s if deadline_s is None else min(timeout_s, deadline_s + DEADLINE_GRACE_S)
    elapsed = TimeElapsed(f"timed out after {limit_s:g} s")
    try:
        with Timeout(limit_s, elapsed):
            yield
    except TimeElapsed as error:
        if error is elapsed and deadline_s is not None and limit_s < timeout_s:
            raise deadline_passed(deadline_s) from None
        raise
