"""The loss of masked words on held-out text, passage by passage, so that two measurements can be compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hplm.plot.ngrams import Ids
from hplm_builder.domains.verdict import Difference, compare

# `loss` and `accuracy`; None for a text too short to mask a token in.
Losses = dict[str, float | None]


@dataclass(frozen=True)
class HeldOut:
    """A measurement on held-out text: the summed cross-entropy of each passage `[P]`, and its number of places `[P]`.

    `right` is the number of right predictions in all passages. Equal passages are one passage. A passage without a masked
    token is left out.
    """

    losses: npt.NDArray[np.float64]
    counts: Ids
    right: int

    def summary(self) -> Losses:
        """Return mean cross-entropy (`loss`) and `accuracy` over all places."""
        if not (count := int(self.counts.sum())):
            return {"loss": None, "accuracy": None}
        return {"loss": float(self.losses.sum()) / count, "accuracy": self.right / count}

    def to_tensors(self) -> dict[str, Any]:
        """Return the measurement as a checkpoint keeps it."""
        return {"losses": torch.from_numpy(self.losses), "counts": torch.from_numpy(self.counts), "right": self.right}

    @classmethod
    def from_tensors(cls, saved: dict[str, Any] | None) -> HeldOut | None:
        """Return the measurement that `to_tensors` made; None for None."""
        if saved is None:
            return None
        return cls(saved["losses"].cpu().numpy(), saved["counts"].cpu().numpy(), saved["right"])


@dataclass(frozen=True)
class HeldOutPair:
    """Measurements of one text at the same places, before and after the lower layers were trained."""

    before: HeldOut
    after: HeldOut

    def summary(self) -> dict[str, Losses]:
        return {"before": self.before.summary(), "after": self.after.summary()}

    def difference(self) -> Difference | None:
        """Return the difference in mean cross-entropy; None if no token could be masked."""
        counts = self.before.counts
        if not len(counts):
            return None

        def mean_losses(passages: Ids) -> tuple[float, float]:
            count = counts[passages].sum()
            before, after = (float(side.losses[passages].sum() / count) for side in (self.before, self.after))
            return before, after

        return compare(mean_losses, len(counts))
