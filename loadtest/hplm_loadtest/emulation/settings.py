"""Settings of the backend `waiting`: a stage of an emulated group of devices."""

from __future__ import annotations

from dataclasses import dataclass

from hplm.core.settings import at_least


@dataclass(frozen=True)
class WaitingSettings:
    """A stage that waits for the time that a device would compute.

    stage_s: the seconds of each stage of the group, by model. stage: the number of this stage, from 0. hop_s: seconds that a
    request takes from a stage to the next. way_back_s: seconds that the answer takes to the client. boundary_bytes: bytes
    that a request sends from a stage to the next. default_deadline_s: the deadline of requests without one.
    """

    stage_s: dict[str, tuple[float, ...]]
    stage: int
    hop_s: float = 0.0
    way_back_s: float = 0.0
    boundary_bytes: int = 0
    policy: str = "fcfs"
    queue_capacity: int = 4096
    default_deadline_s: float = 60.0

    def __post_init__(self) -> None:
        at_least(self, 0, "stage", "hop_s", "way_back_s", "boundary_bytes")
        at_least(self, 1, "queue_capacity")

    @property
    def is_last(self) -> bool:
        """Whether the stage is the last of its group."""
        return self.stage == len(next(iter(self.stage_s.values()))) - 1

    def reserved_s(self, model: str) -> float:
        """Return the seconds that a request needs after this stage: the later stages, the ways between them and back."""
        later = self.stage_s[model][self.stage + 1 :]
        return sum(later) + len(later) * self.hop_s + self.way_back_s
