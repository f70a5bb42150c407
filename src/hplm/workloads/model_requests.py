"""Requests to several models as columns: what the simulators and the placement search read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hplm.errors import ConfigError


@dataclass(frozen=True)
class ModelRequests:
    """Requests to models, in the order of arrival. All columns have the length `k`.

    names: the models that `models` numbers.
    times_s: float64, seconds from the start, never falling.
    models: int32, the number of each request's model.
    deadlines_s: float64, seconds from the request's arrival to its deadline.
    duration_s: the length of the recording; the last request may arrive earlier.
    """

    names: tuple[str, ...]
    times_s: npt.NDArray[np.float64]
    models: npt.NDArray[np.int32]
    deadlines_s: npt.NDArray[np.float64]
    duration_s: float

    def __post_init__(self) -> None:
        if not len(self.times_s) == len(self.models) == len(self.deadlines_s):
            raise ConfigError("columns of equal length were expected")
        if len(self.times_s) and (np.diff(self.times_s) < 0).any():
            raise ConfigError("times that never fall were expected")

    def __len__(self) -> int:
        return len(self.times_s)

    def of_models(self, names: Sequence[str]) -> ModelRequests:
        """Return the requests to some of the models. The numbers of all models stay."""
        numbers = [number for number, name in enumerate(self.names) if name in set(names)]
        return self.where(np.isin(self.models, numbers))

    def where(self, kept: npt.NDArray[np.bool_]) -> ModelRequests:
        """Return the requests where `kept` `[k]` is true."""
        return ModelRequests(self.names, self.times_s[kept], self.models[kept], self.deadlines_s[kept], self.duration_s)

    def rates(self) -> dict[str, float]:
        """Return the requests a second of each model."""
        counts = np.bincount(self.models, minlength=len(self.names))
        return {name: float(count) / self.duration_s for name, count in zip(self.names, counts, strict=True)}

    def with_deadlines(self, deadline_s: Mapping[str, float]) -> ModelRequests:
        """Return the requests with a deadline for each model, in seconds from a request's arrival."""
        by_number = np.array([deadline_s[name] for name in self.names])
        return ModelRequests(self.names, self.times_s, self.models, by_number[self.models], self.duration_s)
