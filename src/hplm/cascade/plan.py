"""The plan of a tenant's cascade: levels from small to large, and what was promised (Tabi, sections 4 and 5).

A level is a base of the server, over which the tenant has a version.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hplm.core.settings import parse_settings
from hplm.errors import ConfigError

# What happens to a text that should go to the next level and cannot be answered there in time, or at all.
OnLate = Literal["answer", "refuse"]
# The key of `CascadePlan.dev_confidence` in `about`.
DEV_CONFIDENCE = "dev_confidence"


@dataclass(frozen=True)
class Dispatch:
    """How a level decides which texts it answers itself (eq. 3 and 4).

    `temperature` T divides the logits. A text whose confidence is at most `cut_off` c is always re-routed. Above c it is
    re-routed with the probability of eq. 4, whose `slope` is k. The last level of a cascade re-routes nothing.
    """

    temperature: float
    cut_off: float
    slope: float

    def __post_init__(self) -> None:
        if self.temperature <= 0 or self.slope < 0 or not 0 <= self.cut_off < 1:
            raise ConfigError(
                f"a temperature above 0, a slope of 0 or more and a cut-off in [0, 1) were expected, got {self}"
            )


@dataclass(frozen=True)
class LevelPlan:
    """A level: the version `number` of the tenant over `base`.

    `weights` are those of the levels up to this one in the answer to a text that ends at this level (eq. 6); their sum is 1.
    `alpha` is the degree to which a text is pruned before it comes to this level (eq. 5); 0 prunes nothing. It is 0 at the
    first level.
    """

    base: str
    number: int
    dispatch: Dispatch
    weights: tuple[float, ...]
    alpha: float = 0.0


@dataclass(frozen=True)
class Promise:
    """The contract: the one-sided 95 % Clopper-Pearson bound of the share of right answers, and the figures behind it.

    `right` of `examples` were right, which trained, calibrated and selected nothing. `accuracy` is the bound. `latency_ms` is
    the mean that the profile expects, one request at a time. The targets are those that the tenant asked for, or None.
    """

    accuracy: float
    right: int
    examples: int
    latency_ms: float
    target_accuracy: float | None = None
    target_latency_ms: float | None = None


@dataclass(frozen=True)
class CascadePlan:
    """A tenant's cascade. A plan with one level is a tenant that one base answers, under the same contract.

    With `deterministic`, a level answers every text above its cut-off. `on_late` see OnLate.
    """

    levels: tuple[LevelPlan, ...]
    promise: Promise
    deterministic: bool = False
    on_late: OnLate = "answer"
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.levels:
            raise ConfigError("a cascade needs at least one level")
        for place, level in enumerate(self.levels, 1):
            if len(level.weights) != place or abs(sum(level.weights) - 1) > 1e-6:
                raise ConfigError(f"level {place} needs {place} weights whose sum is 1, got {level.weights}")

    @property
    def is_weighted(self) -> bool:
        """Whether an answer may depend on the logits of levels before the last one that answered. No tagging's does."""
        return any(any(level.weights[:-1]) for level in self.levels)

    @property
    def dev_confidence(self) -> float | None:
        """The mean calibrated confidence of the first level on dev examples, from `about`; None if it was not kept.

        The confidences of served texts are compared with it, to see whether they drift.
        """
        value = self.about.get(DEV_CONFIDENCE)
        return None if value is None else float(value)

    def to_json(self) -> dict[str, Any]:
        """Return the plan in JSON values, as the registry keeps it."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any, where: str) -> CascadePlan:
        """Parse `to_json`. Raises ConfigError, which names `where`."""
        return parse_settings(cls, values, where)
