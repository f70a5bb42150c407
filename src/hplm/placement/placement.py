"""A placement: groups of devices, how each group divides its models, and which models it holds (AlpaServe 4.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, order=True)
class ParallelConfig:
    """How a group divides a model: into `stages` ranges of layers, each on `intra` devices."""

    stages: int = 1
    intra: int = 1

    @property
    def devices(self) -> int:
        """The devices that a group of this configuration has."""
        return self.stages * self.intra

    def __str__(self) -> str:
        return f"({self.stages}, {self.intra})"


@dataclass(frozen=True)
class Group:
    """Devices that serve the same models with one configuration. Stage i has devices `i * intra` to `(i + 1) * intra`."""

    devices: tuple[int, ...]
    config: ParallelConfig

    def stage_devices(self, stage: int) -> tuple[int, ...]:
        """Return the devices of a stage."""
        return self.devices[stage * self.config.intra : (stage + 1) * self.config.intra]


@dataclass(frozen=True)
class Placement:
    """Groups, and the names of the models that each group holds. A model may be in several groups, or in none."""

    groups: tuple[Group, ...]
    models: tuple[tuple[str, ...], ...]

    @classmethod
    def empty(cls, groups: tuple[Group, ...]) -> Placement:
        """Return a placement whose groups hold nothing."""
        return cls(groups, ((),) * len(groups))

    def with_model(self, name: str, group: int) -> Placement:
        """Return the placement with a model added to a group. The order in which models were added makes no difference."""
        models = list(self.models)
        models[group] = tuple(sorted({*models[group], name}))
        return replace(self, models=tuple(models))

    def groups_of(self, name: str) -> tuple[int, ...]:
        """Return the numbers of the groups that hold a model."""
        return tuple(number for number, names in enumerate(self.models) if name in names)
