"""Draws the deadlines of requests from named classes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hplm.core.wire import LONGEST_DEADLINE_S
from hplm.errors import ConfigError
from hplm.reporting.benchmark_result import plain


@dataclass(frozen=True)
class DeadlineClasses:
    """Classes by name, each with a deadline in seconds and a share of the requests.

    Example: `{"interactive": (0.1, 0.7), "batch": (2.0, 0.3)}`.
    """

    classes: Mapping[str, tuple[float, float]]

    def __post_init__(self) -> None:
        deadlines = [deadline_s for deadline_s, _ in self.classes.values()]
        shares = [share for _, share in self.classes.values()]
        if not all(0 < value < math.inf for value in (*deadlines, *shares)):
            raise ConfigError("deadlines and shares must be above 0")
        if (longest_s := max(deadlines)) > LONGEST_DEADLINE_S:
            raise ConfigError(f"a deadline is {LONGEST_DEADLINE_S:,.0f} seconds at most, not {plain(longest_s)}")
        if not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
            raise ConfigError(f"the shares of the deadline classes add up to {sum(shares):g}, not to 1")
        if len(set(deadlines)) < len(deadlines):
            raise ConfigError("two deadline classes have the same deadline: make them one")

    @classmethod
    def parse(cls, text: str) -> DeadlineClasses:
        """Parse `interactive=0.1:0.7,batch=2:0.3`. Raises ConfigError."""
        classes: dict[str, tuple[float, float]] = {}
        for part in text.split(","):
            name, _, numbers = part.partition("=")
            deadline, _, share = numbers.partition(":")
            try:
                numeric = float(deadline), float(share)
            except ValueError:
                raise ConfigError(
                    f"{part!r} is no deadline class; write NAME=SECONDS:SHARE,NAME=SECONDS:SHARE"
                ) from None
            if not name.strip() or name.strip() in classes:
                raise ConfigError(f"{part!r}: each deadline class needs a name of its own")
            classes[name.strip()] = numeric
        return cls(classes)

    def draw(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """Draw deadlines in seconds `[count]`."""
        deadlines, shares = (np.array(column) for column in zip(*self.classes.values(), strict=True))
        return rng.choice(deadlines, size=count, p=shares / shares.sum())

    def name_of(self, deadline_s: float) -> str:
        """Return the name of the class with this deadline."""
        return next(name for name, (class_deadline_s, _) in self.classes.items() if class_deadline_s == deadline_s)
