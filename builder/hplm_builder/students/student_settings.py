"""How the students of a tenant are trained, with the paper's values where they work, and variants for comparisons."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import get_args

from hplm.adapters.students import Form
from hplm.adapters.tenant import Pooling
from hplm.core.settings import REDUCTION_FACTOR, at_least
from hplm.errors import ConfigError

# The learning rates of Algorithms 1 and 2 by form. Whole layers diverge at the rate that adapters need.
LEARNING_RATES: dict[Form, float] = {"shared": 2e-3, "own": 3e-4}
PRUNING_RATES: dict[Form, float] = {"shared": 5e-4, "own": 1e-4}


@dataclass(frozen=True)
class StudentSettings:
    """How to train students: Algorithm 1 stacks them, Algorithm 2 trains all prefixes of them together.

    `most_students` bounds the number of students. `stacking_weight` is lambda of eq. 4. Each student but the first learns from
    the share `hard_share` of texts with the largest residuals and the share `random_share` of all texts at random.

    Each student is trained for at most `epochs` at the rate `learning_rate`, all prefixes for `pruning_epochs` at
    `pruning_rate`; a rate that is None is that of the form. Both stop `patience` epochs after the best epoch on dev.

    Variants for comparisons: `boosting` False trains each student on the teacher's representation alone, and averages students
    (bagging). `joint_prefixes` False trains all students together without the shorter prefixes (without pruning).
    `stacking_weight` 0 leaves stacking out. `most_students` 1 is plain distillation.
    """

    form: Form = "shared"
    most_students: int = 6
    stacking_weight: float = 1.0
    hard_share: float = 0.2
    random_share: float = 0.2
    epochs: int = 20
    pruning_epochs: int = 10
    patience: int = 3
    learning_rate: float | None = None
    pruning_rate: float | None = None
    batch_examples: int = 16
    weight_decay: float = 0.01
    dropout: float = 0.1
    pooling: Pooling = "mean"
    seed: int = 0
    reduction_factor: int = REDUCTION_FACTOR
    boosting: bool = True
    joint_prefixes: bool = True

    def __post_init__(self) -> None:
        at_least(self, 1, "most_students", "epochs", "pruning_epochs", "patience", "batch_examples", "reduction_factor")
        at_least(self, 0, "stacking_weight", "weight_decay", "seed")
        for key in ("hard_share", "random_share", "dropout"):
            if not 0 <= getattr(self, key) <= 1:
                raise ConfigError(f"{key} must be 0 to 1, got {getattr(self, key)}")
        if self.hard_share + self.random_share == 0:
            raise ConfigError("hard_share and random_share are both 0, so that students would learn from no text")
        for key in ("learning_rate", "pruning_rate"):
            rate = getattr(self, key)
            if rate is not None and not (rate > 0 and math.isfinite(rate)):
                raise ConfigError(f"{key} must be above 0 and finite, got {rate}")
        for key, known in (("form", Form), ("pooling", Pooling)):
            if getattr(self, key) not in get_args(known):
                raise ConfigError(f"{key} must be {' or '.join(get_args(known))}, got {getattr(self, key)!r}")

    @property
    def student_rate(self) -> float:
        """The learning rate of Algorithm 1."""
        return LEARNING_RATES[self.form] if self.learning_rate is None else self.learning_rate

    @property
    def prefix_rate(self) -> float:
        """The learning rate of Algorithm 2."""
        return PRUNING_RATES[self.form] if self.pruning_rate is None else self.pruning_rate

    @property
    def texts_share(self) -> float:
        """The share of all texts that a student after the first learns from, at most 1."""
        return min(1.0, self.hard_share + self.random_share)

    @property
    def changed(self) -> dict[str, object]:
        """The settings that differ from the default, by name."""
        return {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
