"""Triton waits for ever for a stub that dies in its first moments.

Behaviour: Triton waits without end for the first message of a new stub, also if the stub has died. Triton never becomes ready,
and does not even reap the process.
Workaround: while Triton starts, a process that it does not reap for LOST_S seconds means that the start is lost. Triton is
killed, and `hplm serve` starts it again.
Switched off: harmless; a Triton that notices such a death reaps the process, or ends by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hplm.runtime.process import stat_of

# Seconds that Triton may take to reap a process. It notices the death of any other stub within about a second.
LOST_S = 5.0
# Seconds between two looks at the processes of this machine.
LOOK_EVERY_S = 0.5


class LostStubs:
    """Sees, while a Triton starts, that the Triton waits for a stub that has died."""

    def __init__(self, triton: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`triton` is the process id of the Triton."""
        self._triton, self._clock = triton, clock
        self._next_look_s = clock()
        # When each dead process was seen first.
        self._dead: dict[int, float] = {}

    def are_waited_for(self) -> bool:
        """Return whether Triton has not reaped a process for LOST_S seconds. Looks at most every LOOK_EVERY_S."""
        if (now_s := self._clock()) < self._next_look_s:
            return False
        self._next_look_s = now_s + LOOK_EVERY_S
        self._dead = {pid: self._dead.get(pid, now_s) for pid in _dead_children(self._triton)}
        return any(now_s - since_s >= LOST_S for since_s in self._dead.values())


def _dead_children(parent: int) -> list[int]:
    """Return the processes that have ended and that their parent has not reaped."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                state, parent_id = stat_of(int(folder.name))[:2]
                if state == "Z" and int(parent_id) == parent:
                    found.append(int(folder.name))
    return found
