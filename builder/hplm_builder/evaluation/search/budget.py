"""Budgets of an evaluation: examples, epochs and learning rates, the same for every variant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hplm.errors import ConfigError

# Factors of a variant's own learning rate. Each grid of rates is a range of these.
LADDER = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True)
class Budget:
    """Limits of an evaluation. `most_*` are numbers of examples in a part, None for all examples.

    The searched learning rates are `factors` times a variant's own rate. While the best rate on dev is at an end of the grid,
    the grid grows by one rate at that end, at most `widened` times. Epochs are searched by keeping the best epoch on dev.
    With `search_every_seed` each seed has its own search, else all seeds take the rate that the first seed's search finds.
    """

    name: str
    most_train: int | None
    most_dev: int | None
    most_test: int | None
    epochs: int
    patience: int
    factors: tuple[float, ...]
    search_every_seed: bool
    widened: int = 2
    batch_examples: int = 16

    def __post_init__(self) -> None:
        for key in ("most_train", "most_dev", "most_test"):
            most = getattr(self, key)
            if most is not None and most < 2:
                raise ConfigError(f"{key} must be at least 2, got {most}")

    def rates(self, centre: float, best_of: Callable[[Sequence[float]], float | None]) -> tuple[float, ...]:
        """Return the learning rates to try around `centre`, a variant's own rate, as far as they are known.

        `best_of` returns the best of the given rates on dev, None while their runs are not finished.
        """
        first, last = LADDER.index(self.factors[0]), LADDER.index(self.factors[-1])

        def grid() -> tuple[float, ...]:
            return tuple(float(f"{centre * factor:.2g}") for factor in LADDER[first : last + 1])

        for _ in range(self.widened):
            best = best_of(grid())
            if best == grid()[0]:
                first -= 1
            elif best == grid()[-1]:
                last += 1
            else:
                break
        return grid()


# `cpu` keeps six tasks, five methods and three seeds within three hours on two cores, as docs/quality.md measured.
# `full` trains for 15 epochs over a grid of two decades, as HMI 7.1 does.
BUDGETS: Mapping[str, Budget] = {
    "cpu": Budget("cpu", 900, 400, None, 10, 5, (0.3, 1.0, 3.0), search_every_seed=False),
    "full": Budget("full", None, None, None, 15, 5, (0.1, 0.3, 1.0, 3.0, 10.0), search_every_seed=True),
    "quick": Budget("quick", 48, 24, 24, 1, 1, (0.3, 1.0), search_every_seed=False, widened=0),
}


def budget_of(
    name: str, examples: int | None = None, epochs: int | None = None, search_every_seed: bool | None = None
) -> Budget:
    """Return a budget by name, with the options that are given in place of its own. Raises ConfigError."""
    if name not in BUDGETS:
        raise ConfigError(f"--budget is one of {', '.join(BUDGETS)}, got {name!r}")
    options: dict[str, Any] = {"most_train": examples, "epochs": epochs, "search_every_seed": search_every_seed}
    return replace(BUDGETS[name], **{key: value for key, value in options.items() if value is not None})
