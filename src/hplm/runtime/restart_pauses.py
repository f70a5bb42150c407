"""The pauses before a process is started again: they double while the process keeps ending soon."""

from __future__ import annotations

# Seconds after which a process counts as running well: the next pause is the first again.
SETTLED_S = 30.0


class RestartPauses:
    """The pauses of one process. The first is `first_s`, each next is twice as long, none is longer than `longest_s`."""

    def __init__(self, first_s: float = 0.5, longest_s: float = 60.0) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._next_s = first_s

    def after(self, ran_s: float) -> float:
        """Return the seconds to wait after the process has run for `ran_s` seconds."""
        if ran_s >= SETTLED_S:
            self._next_s = self._first_s
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return pause_s
