"""Builds a tenant's cascade of its trained levels: calibrates, computes what levels answer, selects, and proves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from hplm.adapters.tenant import Tenant
from hplm.cascade.level_outputs import CascadeOutputs
from hplm.cascade.plan import CascadePlan, OnLate
from hplm.engine.open_domain import Domain
from hplm.models.base import Base
from hplm.reporting.progress import Report, silent
from hplm.tasks.examples import LabelledText
from hplm_builder.data.labelled import LabelledData


class Latency(Protocol):
    """The times of a base, for example `hplm.profiles.profile.Profile`."""

    def latency_ms(self, tokens: int) -> float:
        """Return the milliseconds of a request of one text of `tokens` tokens, while no other request runs."""
        ...


@dataclass(frozen=True)
class LevelInput:
    """A trained level of a tenant: the tenant over a base, and the domain that gives its features.

    `base_name` is the base's name in the store, which the plan gets.
    """

    base: Base
    domain: Domain
    tenant: Tenant
    base_name: str


@dataclass(frozen=True)
class CascadeTarget:
    """What a tenant asks for. A target that is None asks for nothing, see `select_cascade`.

    `accuracy` is a share of right answers, `latency_ms` the mean of requests one at a time.
    """

    accuracy: float | None = None
    latency_ms: float | None = None
    deterministic: bool = False
    on_late: OnLate = "answer"


@dataclass(frozen=True)
class BuiltCascade:
    """A cascade that was selected and proved.

    Versions have no numbers yet: those of `plan` are 0, see `numbered`. The plan may leave trained levels out. `about` has, in
    JSON values, `candidates` (rows of a table), `calibration` of each level, and `warnings` if there are some.
    """

    plan: CascadePlan
    outputs: CascadeOutputs
    about: dict[str, Any]


def numbered(plan: CascadePlan, numbers: Mapping[str, int]) -> CascadePlan:
    """Return the plan with the numbers of the tenant's versions, by base."""
    levels = tuple(replace(level, number=numbers[level.base]) for level in plan.levels)
    return replace(plan, levels=levels)


def set_aside(
    data: LabelledData, proof: Sequence[LabelledText] | None, seed: int
) -> tuple[LabelledData, list[LabelledText], list[str]]:
    """Return the data to train, calibrate and select on, the examples of the proof, and warnings. Call it before training.

    Without `proof`, about PROOF_SHARE of the dev examples are set aside, by `seed` and text. Examples whose texts are among
    those that train or select prove nothing, so they are left out, with a warning. Raises DataError if the task has no
    confidence, or if no example is left.
    """
    raise NotImplementedError


def build_cascade(
    levels: Sequence[LevelInput],
    data: LabelledData,
    proof: Sequence[LabelledText],
    target: CascadeTarget,
    profile_of: Callable[[LevelInput], Latency],
    report: Report = silent,
) -> BuiltCascade:
    """Calibrate and select on the dev examples of `data`, and prove on `proof`, both of `set_aside`.

    The steps of `report` are those of STEPS. Raises ContractError with the nearest offer if the target cannot be promised, and
    what `report` raises.
    """
    raise NotImplementedError


def select_again(
    outputs: CascadeOutputs, target: CascadeTarget, profiles: Mapping[str, Latency]
) -> BuiltCascade:
    """Select and prove for another target, without computing. `profiles` has the times of each base, by name.

    Raises ContractError as `build_cascade` does.
    """
    raise NotImplementedError


def save_outputs(folder: Path, outputs: CascadeOutputs) -> None:
    """Publish the outputs as one artifact, with checksums. Raises OSError."""
    raise NotImplementedError


def load_outputs(folder: Path) -> CascadeOutputs:
    """Load and verify what `save_outputs` published. Raises MissingArtifactError or CorruptArtifactError."""
    raise NotImplementedError
