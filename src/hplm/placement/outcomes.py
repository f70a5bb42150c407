"""The result of a simulation or of a replay: which requests were answered, when, and by which group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hplm.workloads.model_requests import ModelRequests

# The group of a request that no group took.
REFUSED = -1
# An answer that comes less than so many seconds after the deadline is in time: sums of times are rounded.
ROUNDING_S = 1e-6


@dataclass(frozen=True)
class Outcomes:
    """How each request of `requests` ended, in their order.

    ended_s: float64 `[k]`, the time of the answer on the clock of `requests.times_s`; NaN for a refused request.
    groups: int32 `[k]`, the group that answered; `REFUSED` for a refused request.
    busy_s: float64 `[devices]`, the seconds that each device computed.
    """

    requests: ModelRequests
    ended_s: npt.NDArray[np.float64]
    groups: npt.NDArray[np.int32]
    busy_s: npt.NDArray[np.float64]

    @property
    def latencies_s(self) -> npt.NDArray[np.float64]:
        """Seconds from arrival to answer, `[k]`; NaN for a refused request."""
        return self.ended_s - self.requests.times_s

    @property
    def in_time(self) -> npt.NDArray[np.bool_]:
        """Whether each request was answered by its deadline, `[k]`."""
        return self.latencies_s <= self.requests.deadlines_s + ROUNDING_S

    @property
    def attainment(self) -> float:
        """The share of requests that were answered by their deadline (SLO attainment); 1 if there were no requests."""
        return float(self.in_time.mean()) if len(self.requests) else 1.0
