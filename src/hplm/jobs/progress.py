"""How far a job is."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

# An estimate from a smaller share of the work would be noise.
LEAST_SHARE = 0.02


@dataclass(frozen=True)
class JobProgress:
    """The step that a job is in and the share of the whole job that is done, 0 to 1.

    `began_s` is the monotonic time at which the step began, and `first` the progress at that time: a job that continues
    after a kill jumps ahead between two steps.
    """

    step: str
    progress: float
    began_s: float
    first: float

    def advanced(self, step: str, progress: float) -> JobProgress:
        """Return the progress after a report of `step` and `progress`."""
        progress = min(1.0, max(0.0, progress))
        if step == self.step:
            return replace(self, progress=progress)
        return JobProgress(step, progress, time.monotonic(), progress)

    def eta_s(self) -> float | None:
        """Return the seconds that the rest takes at the speed of this step; None while too little is done to say."""
        share = self.progress - self.first
        return (time.monotonic() - self.began_s) * (1 - self.progress) / share if share >= LEAST_SHARE else None
