"""Processes that have died and that their parent does not reap: the parent waits for something else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from hplm.runtime.process import stat_of

# Seconds between two looks at the processes of this machine.
LOOK_EVERY_S = 0.5


class UnreapedChildren:
    """Sees whether a process leaves a dead child unreaped. Children that it had before are ignored."""

    def __init__(self, parent: int, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`parent` is the process id, and `patience_s` the seconds that it may take to reap a child."""
        self._parent, self._patience_s, self._clock = parent, patience_s, clock
        self._before = {pid for pid, _ in _children(parent)}
        self._next_look_s = clock()
        # When each dead child was seen first.
        self._dead: dict[int, float] = {}
        self._are_left = False

    def are_left(self) -> bool:
        """Return whether a child was dead and unreaped for `patience_s` seconds. Looks at most every LOOK_EVERY_S seconds."""
        if self._are_left or (now_s := self._clock()) < self._next_look_s:
            return self._are_left
        self._next_look_s = now_s + LOOK_EVERY_S
        dead = {pid for pid, state in _children(self._parent) if state == "Z"} - self._before
        self._dead = {pid: self._dead.get(pid, now_s) for pid in dead}
        self._are_left = any(now_s - since_s >= self._patience_s for since_s in self._dead.values())
        return self._are_left


def _children(parent: int) -> Iterator[tuple[int, str]]:
    """Yield the children of a process and their states, see proc(5)."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                state, parent_id = stat_of(int(folder.name))[:2]
                if int(parent_id) == parent:
                    yield int(folder.name), state
