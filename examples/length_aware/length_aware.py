"""A scheduling policy as a plug-in: the length-aware buffer of Student Parallelism (3.3.2, B.4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from operator import attrgetter
from typing import ClassVar

from hplm.errors import ConfigError
from hplm.scheduling.policies import Fcfs
from hplm.scheduling.policy import Batch, Budget, Waiting

_OLDER = attrgetter("arrived_s", "id")


@dataclass(frozen=True)
class LengthAware:
    """The oldest request, and the next ones of its length bin.

    A bin is `bin_tokens` tokens wide. A batch is one element of the paper's buffer: at most `element_texts` requests of one
    bin. No other requests fill the batch up. The paper keeps a queue and a dictionary between calls. The first element of
    that queue follows from the waiting requests alone, so this policy keeps nothing.
    """

    bin_tokens: int = 8
    element_texts: int = 4

    fills_batches: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for key in ("bin_tokens", "element_texts"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{key} must be a whole number of 1 or more, got {value!r}")

    def select(self, waiting: Sequence[Waiting], now_s: float, budget: Budget) -> Batch:
        """Return a batch of the first element of the buffer, as many of its requests as the budget holds."""
        if not waiting:
            return Batch(())
        length_bin = self.bin_of(min(waiting, key=_OLDER))
        alike = (request for request in waiting if self.bin_of(request) == length_bin)
        return Fcfs().select(nsmallest(self.element_texts, alike, key=_OLDER), now_s, budget)

    def bin_of(self, request: Waiting) -> int:
        """Return the number of a request's length bin. With bins of 8 tokens, 1 to 8 tokens are bin 0."""
        return (request.length - 1) // self.bin_tokens
