"""When Triton is to be asked to look at what it may have kept from a stage."""

from __future__ import annotations

# After the end of a call. Where many come, the next brings others soon, and gathers more the later it is.
AFTER_S, AFTER_OF_MANY_S = 0.001, 0.01
# Then again: asked before it is ready for the next call, Triton does not look.
AGAIN_AFTER_S = (0.005, 0.02, 0.1)


class WakeupTimes:
    """Triton may keep who comes while a call lasts until somebody comes after its end: is that so now?

    `due_s` is when it is to be asked to look next, None for not before another call has ended. Times are of one clock.
    """

    def __init__(self) -> None:
        self.due_s: float | None = None
        self._again = iter(AGAIN_AFTER_S)
        self._calls = 0

    def began(self) -> None:
        """A call has come, and all that waited with it, or it comes with the next."""
        self.due_s = None
        self._calls += 1

    def ended(self, now_s: float, *, of_many: bool) -> None:
        """The stage is ready for the next call. `of_many`: so many requests come that others follow soon."""
        self._again = iter(AGAIN_AFTER_S)
        self.due_s = now_s + (AFTER_OF_MANY_S if of_many else AFTER_S)

    def asked(self, now_s: float) -> int:
        """It is asked now. Returns after which call, for `looked`."""
        after_s = next(self._again, None)
        self.due_s = None if after_s is None else now_s + after_s
        return self._calls

    def looked(self, after_call: int) -> None:
        """It did, as it was asked to after that call: nobody was kept, or a call has come or comes now."""
        if after_call == self._calls:
            self.due_s = None
