"""The outcome of a call over gRPC, which gRPC's thread puts and the caller gets."""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue
from typing import Any

from hplm_client.transport.time_limits import DEADLINE_GRACE_S, deadline_passed


class GrpcOutcome:
    """The result and the error of one call, one of them None."""

    def __init__(self, deadline_s: float | None) -> None:
        self._outcome: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
        self._deadline_s, self._sent_s = deadline_s, time.monotonic()
        self.put, self.empty = self._outcome.put, self._outcome.empty

    def get(self) -> tuple[Any, Any]:
        """Wait for the outcome. Raises DeadlineError soon after the deadline.

        The call is not cancelled then: Triton before 24.12 may crash if a request is cancelled while its answer is sent.
        """
        if self._deadline_s is None:
            return self._outcome.get()
        remaining_s = self._sent_s + self._deadline_s + DEADLINE_GRACE_S - time.monotonic()
        try:
            return self._outcome.get(timeout=max(0.0, remaining_s))
        except Empty:
            raise deadline_passed(self._deadline_s) from None
