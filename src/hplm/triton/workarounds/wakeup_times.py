"""When a stage sends a no-op request, so that Triton dispatches the requests that it keeps (see `kept_requests`)."""

from __future__ import annotations

# Seconds from the end of a call to the first no-op request. Under load the next call comes soon anyway, and brings more
# requests the later it comes.
AFTER_S, AFTER_BUSY_S = 0.001, 0.01
# Seconds to each further no-op request: Triton ignores one that comes before it is ready for the next call.
AGAIN_AFTER_S = (0.005, 0.02, 0.1)


class WakeupTimes:
    """The time of the next no-op request, `due_s`; None until another call has ended. All times are of one clock."""

    def __init__(self) -> None:
        self.due_s: float | None = None
        self._again = iter(AGAIN_AFTER_S)
        self._calls = 0

    def call_began(self) -> None:
        """Note that a call came. Requests that Triton kept have come with it, or come with the next call."""
        self.due_s = None
        self._calls += 1

    def call_ended(self, now_s: float, *, is_busy: bool) -> None:
        """Note that the stage is ready for another call. `is_busy`: requests arrive so fast that a call comes soon."""
        self._again = iter(AGAIN_AFTER_S)
        self.due_s = now_s + (AFTER_BUSY_S if is_busy else AFTER_S)

    def sent(self, now_s: float) -> int:
        """Note that a no-op request is sent now. Return the number of the last call, for `expired`."""
        after_s = next(self._again, None)
        self.due_s = None if after_s is None else now_s + after_s
        return self._calls

    def expired(self, call: int) -> None:
        """Note that Triton dispatched requests after this call: it kept none, or they come with a call now."""
        if call == self._calls:
            self.due_s = None
