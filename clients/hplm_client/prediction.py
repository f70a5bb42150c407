"""A tenant's answer to one text or pair."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hplm.core.wire import LabelledSpan


@dataclass(frozen=True)
class Prediction:
    """A tenant's answer: one span for a classification or regression, one per entity for a tagging.

    Spans of a pair are characters of `text + " " + pair`. `logits` are `[1, labels]`, or `[tokens, labels]` of a tagging.

    `students`: how many of the tenant's students have answered, 1 for a tenant without students. None from a server of an
    earlier version.

    The model `cascade` tells more, for which other models have None. `level` is the base that answered last. `confidence` is
    the calibrated probability that the answer is right, None for a tenant without a cascade. `late` says that a larger base
    should have answered too, and could not in time or at all.
    """

    tenant: str
    text: str
    spans: tuple[LabelledSpan, ...]
    truncated: bool
    # Left out of comparisons, because arrays have no single truth value and no hash.
    logits: npt.NDArray[np.float32] | None = field(default=None, compare=False)
    pair: str | None = None
    level: str | None = None
    confidence: float | None = None
    late: bool | None = None
    students: int | None = None

    @property
    def label(self) -> str | None:
        """Label of the first span; None if a tagging found no entity."""
        return self.spans[0].label if self.spans else None

    @property
    def score(self) -> float | None:
        """Probability of `label`; the value of a regression."""
        return self.spans[0].score if self.spans else None

    def as_dict(self) -> dict[str, Any]:
        """Return the answer for JSON, without logits. What only the model `cascade` tells is there if that model answered."""
        told = {"level": self.level, "confidence": self.confidence, "late": self.late}
        return {
            "tenant": self.tenant,
            "text": self.text,
            "pair": self.pair,
            "label": self.label,
            "score": self.score,
            "spans": [vars(span) for span in self.spans],
            "truncated": self.truncated,
            **({} if self.students is None else {"students": self.students}),
            **({} if self.level is None else told),
        }
