"""When Triton is to be asked for what it may have kept from a stage."""

from __future__ import annotations

# After the end of a call. Where many come, the next brings others soon, and gathers more the later it is.
AFTER_S, AFTER_OF_MANY_S = 0.003, 0.01
# Then again: what was asked before Triton was ready for the next call waits itself.
AGAIN_AFTER_S = (0.005, 0.02, 0.1)
# Calls without a request of a client's, one after another, after which nothing is taken to wait: who came while the first
# lasted, which is a fraction of a millisecond, comes with the second.
CALLS_OF_NONE = 2


class Wakes:
    """Triton may keep who comes while a call lasts until somebody comes after its end: is that so now?

    `due_s` is when that is to be asked next, None for not before another call has ended. Times are of one clock.
    """

    def __init__(self) -> None:
        self.due_s: float | None = None
        self._again = iter(AGAIN_AFTER_S)
        self._calls_of_none = 0

    def began(self) -> None:
        """A call has come, and all that waited with it, or it comes with the next."""
        self.due_s = None

    def ended(self, requests: int, now_s: float, *, of_many: bool) -> None:
        """The stage is ready for the next call after one of so many clients' requests, `of_many` that come now."""
        if requests:
            self._again = iter(AGAIN_AFTER_S)
            self._calls_of_none = 0
        else:
            self._calls_of_none += 1
        if self._calls_of_none < CALLS_OF_NONE:
            self.due_s = now_s + (AFTER_OF_MANY_S if of_many else AFTER_S)

    def asked(self, now_s: float) -> None:
        """It was asked."""
        after_s = next(self._again, None)
        self.due_s = None if after_s is None else now_s + after_s
